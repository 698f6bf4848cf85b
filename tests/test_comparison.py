"""Ranks, wins and intervals of methods that are compared."""

import numpy as np
import pytest

from benchmarks.comparison import Scores, in_brackets, interquartile_mean, spread_of, stratified
from sb3_fp16.audit.statistics import Interval


def rows_of(auc):
    """From {(method, env): AUC of each seed}."""
    return [
        {"method": method, "env": env, "seed": str(seed), "return_auc": str(value)}
        for (method, env), values in auc.items()
        for seed, value in enumerate(values)
    ]


AUC = {
    ("x", "A"): [3.0, 1.0, 5.0],
    ("y", "A"): [2.0, 1.0, 9.0],
    ("z", "A"): [1.0, 0.0, 7.0],
    ("x", "B"): [300.0, np.nan],
    ("y", "B"): [100.0, 100.0],
    ("z", "B"): [200.0, 150.0],
    ("w", "A"): [99.0],
}


def test_pairs_that_all_have_finished():
    scores = Scores.of(rows_of(AUC), ("x", "y", "z"))
    assert scores.pairs == [("A", "0"), ("A", "1"), ("A", "2"), ("B", "0"), ("B", "1")]
    assert Scores.of(rows_of(AUC), ("x", "w")).pairs == [("A", "0")]
    assert Scores.of(rows_of(AUC), ("x", "v")).pairs == []
    np.testing.assert_array_equal(scores.of_task("B")[1:], [[100, 100], [200, 150]])
    assert scores.on("B").wins("y", "x") == 1  # as x crashed
    assert scores.tasks == ["A", "B"]


def test_ranks_firsts_and_wins():
    scores = Scores.of(rows_of(AUC), ("x", "y", "z"))
    np.testing.assert_array_equal(scores.ranks(), [[1, 1.5, 3, 1, 3], [2, 1.5, 1, 3, 2], [3, 3, 2, 2, 1]])
    np.testing.assert_array_equal(scores.firsts(), [2, 1, 1])  # a tie has no first
    assert scores.wins("x", "y") == 2
    assert scores.wins("y", "x") == 2  # one of them because x crashed
    assert scores.wins("x", "x") == 0


def test_differences_are_scaled_within_tasks():
    auc = {("x", "A"): [3.0, 1.0], ("y", "A"): [2.0, 0.0], ("x", "B"): [300.0, 100.0], ("y", "B"): [200.0, 0.0]}
    found = Scores.of(rows_of(auc), ("x", "y")).normalised_difference("x", "y")
    assert found == pytest.approx((1 / 3, 1 / 3, 1 / 3))  # whatever is drawn, each pair differs by a third
    crashed = auc | {("x", "A"): [np.nan, 1.0]}
    assert Scores.of(rows_of(crashed), ("x", "y")).normalised_difference("x", "y").value < 0.1


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(200):
        found = stratified([rng.normal(1.0, 1.0, size=12), rng.normal(-1.0, 3.0, size=12)], resamples=500)
        covered.append(found.low <= 0.0 <= found.high)
    assert 0.86 < np.mean(covered) < 0.98  # percentile intervals of a dozen are a little short


def test_resampling_stays_within_tasks():
    found = stratified([np.full(5, 1.0), np.full(5, 3.0)])
    assert found == (2.0, 2.0, 2.0)  # a bootstrap over all would vary
    assert np.isnan(stratified([np.array([1.0]), np.array([3.0])]).low)


def test_interquartile_mean_and_text():
    values = np.array([[-1e9, 1.0], [1.0, 1.0], [3.0, 1.0], [1e9, 1.0]])
    np.testing.assert_array_equal(interquartile_mean(values), [2, 1])
    assert in_brackets(Interval(0.2, -0.1, 0.5), 1) == "+0.2 [-0.1, +0.5]"
    assert in_brackets(Interval(0.2, np.nan, np.nan), 1) == "+0.2 [–, –]"
    assert spread_of(np.array([1.0, 3.0, np.nan])) == "2 ± 1, 1 crashed"
    assert spread_of(np.array([5.0])) == "5"
    assert spread_of(np.array([np.nan])) == "–, 1 crashed"
