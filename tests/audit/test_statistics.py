import time
from itertools import pairwise

import numpy as np
import pytest
import torch as th

from sb3_fp16.audit.statistics import (
    Interval,
    StepStatistics,
    bootstrap,
    probability_slices,
    sequence_statistics,
)


def gaussian_shift(shape, shift, seed=0):
    """d of a unit Gaussian policy whose mean is off by ``shift``; KL = shift²/2."""
    noise = np.random.default_rng(seed).normal(size=shape)
    return shift * noise - shift**2 / 2


# Steps


def test_step_statistics_are_their_closed_forms():
    d = [[0.0, np.log(2.0)], [-np.log(2.0), 0.0]]
    log2 = np.log(2.0)
    steps = StepStatistics.of(d, kl=[0.1, 0.3, 0.0, 0.2])
    assert (steps.count, steps.zero_fraction) == (4, 0.5)
    expected = {
        "mean_abs": log2 / 2,
        "kl": 0.15,
        "k1": 0.0,
        "k2": log2**2 / 4,
        "k3": (1 + -0.5) / 4,  # e^d - 1 - d, in which the logarithms cancel
        "mean_ratio": (1 + 2 + 0.5 + 1) / 4,
        "mean_ratio_error": np.std([1, 2, 0.5, 1], ddof=1) / 2,
        "std": log2 / np.sqrt(2),
    }
    for name, value in expected.items():
        assert getattr(steps, name) == pytest.approx(value, abs=1e-15), name


@pytest.mark.parametrize("shift", [0.003, 0.1, 0.7])
def test_gaussian_of_known_shift(shift):
    d, kl = gaussian_shift(400_000, shift), shift**2 / 2
    steps = StepStatistics.of(d)
    assert steps.std == pytest.approx(shift, rel=0.01)
    assert abs(steps.mean_ratio - 1) < 4 * steps.mean_ratio_error
    assert steps.mean_ratio_error == pytest.approx(np.sqrt(np.expm1(shift**2) / d.size), rel=0.05)
    assert abs(steps.k1 - kl) < 4 * shift / np.sqrt(d.size)
    assert steps.k3 == pytest.approx(kl, rel=0.02)
    assert steps.k2 == pytest.approx((shift**2 + kl**2) / 2, rel=0.02)
    assert np.isnan(steps.kl)


def test_small_ratios_do_not_cancel():
    steps = StepStatistics.of(np.full(10, 1e-9))
    assert steps.k3 == pytest.approx(5e-19, rel=1e-6, abs=0)
    assert StepStatistics.of(np.float32([1e-9])).k3 > 0


def test_a_ratio_beyond_float64_is_infinite_and_no_warning():
    steps = StepStatistics.of([0.0, 800.0])
    assert steps.mean_ratio == steps.k3 == np.inf
    assert steps.mean_abs == 400


@pytest.mark.parametrize("storage", [th.float16, th.bfloat16])
def test_rounded_gaussian_means(storage):
    """FP32 rollout against 16-bit trainer: the identities hold, whatever the format."""
    d, kl = gaussian_policy_mismatch(storage)
    steps = StepStatistics.of(d, kl)
    assert abs(steps.mean_ratio - 1) < 4 * steps.mean_ratio_error
    assert abs(steps.k1 - steps.kl) < 4 * steps.std / np.sqrt(steps.count)
    assert steps.k3 == pytest.approx(steps.kl, rel=0.05)


def test_eightfold_grid_gives_eightfold_mismatch_and_64_fold_kl():
    fp16, bf16 = (StepStatistics.of(*gaussian_policy_mismatch(f)) for f in (th.float16, th.bfloat16))
    assert bf16.mean_abs / fp16.mean_abs == pytest.approx(8, abs=1)
    assert bf16.kl / fp16.kl == pytest.approx(64, abs=10)


def gaussian_policy_mismatch(storage, steps=200_000, dims=3):
    """d and KL, shape (steps,): a linear policy of unit deviation acts in FP32, and the trainer's mean is rounded."""
    g = th.Generator().manual_seed(0)
    features, weights = th.randn(steps, 16, generator=g), th.randn(16, dims, generator=g) / 4
    mean = features @ weights
    change = (mean.to(storage).double() - mean.double()).numpy()
    noise = np.random.default_rng(0).normal(size=change.shape)
    return (change * noise - change**2 / 2).sum(axis=1), (change**2 / 2).sum(axis=1)


# Bootstrap


def test_bootstrap_covers_a_mean_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(300):
        interval = bootstrap(rng.normal(3.0, 2.0, size=100), np.mean, resamples=400, seed=seed)
        covered += interval.low <= 3.0 <= interval.high
    assert 0.90 < covered / 300 < 0.98


def test_bootstrap_resamples_whole_sequences():
    """Steps that repeat inside a sequence add no information, so they must not narrow the interval."""
    one_step = gaussian_shift((50, 1), 1.0)
    narrow, wide = (bootstrap(np.repeat(one_step, n, axis=1), np.mean) for n in (1, 20))
    assert narrow == pytest.approx(wide)
    width = wide.high - wide.low
    assert width == pytest.approx(2 * 1.96 * one_step.std() / np.sqrt(50), rel=0.15)


def test_bootstrap_level_and_seed():
    values = gaussian_shift(200, 1.0)
    half, most = (bootstrap(values, np.mean, level=level) for level in (0.5, 0.99))
    assert most.low < half.low < half.value < half.high < most.high
    assert bootstrap(values, np.mean, seed=1) == bootstrap(values, np.mean, seed=1) != bootstrap(values, np.mean)


def test_one_sequence_says_nothing_of_others():
    interval = bootstrap([[1.0, 2.0]], np.mean)
    assert interval.value == 1.5
    assert np.isnan(interval.low)
    assert np.isnan(interval.high)


def test_bootstrap_is_quick():
    values = gaussian_shift((384, 8), 1.0)
    start = time.perf_counter()
    bootstrap(values, np.mean)
    assert time.perf_counter() - start < 1


# Sequences


def test_independent_steps_follow_both_predictions():
    shift, steps, sequences = 0.1, 256, 2000
    d = gaussian_shift((sequences, steps), shift)
    kl = np.full_like(d, shift**2 / 2)
    rows = sequence_statistics(d, [16, steps], kl, resamples=200)
    assert [row.horizon for row in rows] == [16, steps]
    for row in rows:
        t = row.horizon
        assert row.sequences == sequences
        assert row.mean.low < row.mean.value < row.mean.high
        assert row.predicted_mean == pytest.approx(-t * shift**2 / 2)
        assert row.cumulative_kl == pytest.approx(t * shift**2 / 2)
        assert row.mean.value == pytest.approx(row.predicted_mean, abs=4 * shift * np.sqrt(t / sequences))
        assert row.std.value == pytest.approx(shift * np.sqrt(t), rel=0.07)
        assert row.rms.value == pytest.approx(row.predicted_rms, rel=0.07)
        assert row.rms.value**2 == pytest.approx(row.mean.value**2 + row.std.value**2)
        assert row.covariance_share == pytest.approx(1, abs=0.13)


def test_without_kl_the_prediction_takes_k3():
    d = gaussian_shift((10, 20), 0.1)
    (row,) = sequence_statistics(d, [20], resamples=10)
    assert row.predicted_mean == -20 * StepStatistics.of(d).k3
    assert np.isnan(row.cumulative_kl)


@pytest.mark.parametrize("phi", [0.5, -0.4])
def test_covariance_share_of_an_autoregression(phi):
    """Stationary AR(1): Var(S_T) / (T·Var) = 1 + 2 Σ_k (1 − k/T) φ^k."""
    sequences, steps = 20_000, 32
    rng = np.random.default_rng(0)
    d = np.empty((sequences, steps))
    d[:, 0] = rng.normal(size=sequences)
    for t in range(1, steps):
        d[:, t] = phi * d[:, t - 1] + np.sqrt(1 - phi**2) * rng.normal(size=sequences)
    (row,) = sequence_statistics(d, [steps], resamples=10)
    lags = np.arange(1, steps)
    share = 1 + 2 * ((1 - lags / steps) * phi**lags).sum()
    assert row.covariance_share == pytest.approx(share, rel=0.05)


def test_covariance_share_is_no_matter_of_drift_or_of_unequal_steps():
    """Var(S) = 4 of steps with variances 4 and 0, whose means differ."""
    (row,) = sequence_statistics([[1.0, 10.0], [5.0, 10.0]], [2], resamples=10)
    assert row.covariance_share == 1


def test_identical_implementations_are_exactly_zero():
    (row,) = sequence_statistics(np.zeros((3, 4)), [4], kl=np.zeros((3, 4)))
    assert row.mean == row.std == row.rms == Interval(0, 0, 0)
    assert row.predicted_mean == row.predicted_rms == row.cumulative_kl == 0
    assert np.isnan(row.covariance_share)


def test_after_its_end_a_sequence_adds_nothing_and_stays():
    d = np.array([[1.0, 2.0, 4.0], [8.0, np.nan, np.nan]])  # padding may hold anything
    rows = sequence_statistics(d, [1, 2, 3], kl=d, lengths=[3, 1], resamples=10)
    assert [row.mean.value for row in rows] == [(1 + 8) / 2, (3 + 8) / 2, (7 + 8) / 2]
    assert [row.cumulative_kl for row in rows] == [(1 + 8) / 2, (3 + 8) / 2, (7 + 8) / 2]
    kappa, variance = np.mean([1, 2, 4, 8]), np.var([1, 2, 4, 8])
    assert rows[2].predicted_mean == pytest.approx(-kappa * (3 + 1) / 2)
    assert rows[2].predicted_rms == pytest.approx(np.sqrt(variance * (3 + 1) / 2 + kappa**2 * (9 + 1) / 2))


def test_where_all_ended_there_may_be_more_room_than_steps():
    (row,) = sequence_statistics([[1.0, 2.0], [3.0, 0.0]], [100], lengths=[2, 1], available=[100, 200], resamples=10)
    assert row.mean.value == 3


def test_eligibility_asks_for_room_and_not_for_length():
    d = np.ones((4, 8))
    lengths, available = [8, 2, 2, 99], [8, 8, 4, 4]  # the third ended by itself, but had little room
    rows = sequence_statistics(d, [4, 5, 8, 9], lengths=lengths, available=available, resamples=10)
    assert [(row.horizon, row.sequences, row.mean.value) for row in rows] == [(4, 4, 3), (5, 2, 3.5), (8, 2, 5)]


def test_eligibility_does_not_select_by_what_stopped_a_sequence():
    """
    An action that ends the episode is one that the trainer finds improbable. Keeping whoever was seen for T steps, or
    ended before, over-represents the ended ones among those with little room; ours keeps E[e^S] = 1 and E[S] = −ΣKL.
    """
    sequences, steps, shift, horizon = 60_000, 12, 0.5, 8
    rng = np.random.default_rng(0)
    d = gaussian_shift((sequences, steps), shift)
    ends = d < -0.8
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, steps + 1)
    available = rng.integers(1, steps + 1, size=sequences)
    kl = np.full_like(d, shift**2 / 2)

    (ours,) = sequence_statistics(d, [horizon], kl, lengths, available, resamples=10)
    error = ours.std.value / np.sqrt(ours.sequences)
    assert abs(ours.mean.value + ours.cumulative_kl) < 4 * error

    whole = np.where(np.arange(steps) < lengths[:, None], d, 0)[:, :horizon].sum(axis=1)
    live = np.minimum(lengths, horizon) * shift**2 / 2
    naive = (available >= horizon) | (lengths <= available)
    assert whole[naive].mean() + live[naive].mean() < -20 * error
    lasted = (available >= horizon) & (lengths >= horizon)  # buckets by length are biased, too
    assert whole[lasted].mean() + live[lasted].mean() > 20 * error


def test_horizons_with_fewer_than_two_sequences_are_left_out():
    d = np.ones((2, 5))
    assert [row.horizon for row in sequence_statistics(d, [2, 4, 6], available=[5, 3], resamples=10)] == [2]
    assert sequence_statistics(np.empty((0, 5)), [1]) == []
    assert sequence_statistics(d, [1], lengths=[0, 0]) == []


# Slices


def test_slices_by_edges():
    log_prob = np.array([-9.0, -3.0, -2.0, -1.0, 0.0])
    rows = probability_slices([9.0, -3.0, 2.0, -1.0, 5.0], log_prob, [-np.inf, -5, -4, -2, 0])
    assert [(row.low, row.high, row.count) for row in rows] == [(-np.inf, -5, 1), (-5, -4, 0), (-4, -2, 1), (-2, 0, 3)]
    assert np.isnan(rows[1].mean_abs)
    assert [row.mean_abs for row in rows if row.count] == [9, 3, (2 + 1 + 5) / 3]


def test_slices_by_quantiles_hold_every_step_once():
    rng = np.random.default_rng(0)
    log_prob = -rng.exponential(size=(10, 100))
    rows = probability_slices(log_prob / 10, log_prob, 4)
    assert [row.count for row in rows] == [250] * 4
    assert [row.mean_abs for row in rows] == sorted((row.mean_abs for row in rows), reverse=True)
    assert all(a.high == b.low for a, b in pairwise(rows))
    (row,) = probability_slices([1.0, 3.0], [-1.0, -1.0], 4)
    assert (row.low, row.high, row.count, row.mean_abs) == (-1, -1, 2, 2)


# Errors


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(bad):
    good, broken = np.zeros((2, 3)), np.zeros((2, 3))
    broken[1, 2] = bad
    with pytest.raises(ValueError, match=rf"d has 1 values that are not finite, the first {bad} at \(1, 2\)"):
        StepStatistics.of(broken)
    with pytest.raises(ValueError, match="kl has 1 values"):
        StepStatistics.of(good, kl=broken)
    with pytest.raises(ValueError, match="values has 1 values"):
        bootstrap(broken, np.mean)
    with pytest.raises(ValueError, match="d has 1 values"):
        sequence_statistics(broken, [2])
    with pytest.raises(ValueError, match="kl has 1 values"):
        sequence_statistics(good, [2], kl=broken)
    with pytest.raises(ValueError, match="log_prob has 1 values"):
        probability_slices(good, broken, 2)


def test_bad_shapes_are_named():
    good = np.zeros((2, 3))
    for arguments, message in [
        (((good[0], [1]), {}), r"d has shape \(3,\), not \(sequences, steps\)"),
        (((good, [0]), {}), "horizons are numbers of steps from 1 on"),
        (((good, [1], good.T), {}), r"kl has shape \(3, 2\), d has \(2, 3\)"),
        (((good, [1]), {"lengths": [1]}), "lengths must be 2 numbers of steps"),
        (((good, [1]), {"available": [1, -1]}), "available must be 2 numbers of steps"),
        (((good, [1]), {"available": [1.0, 1.5]}), "available must be 2 numbers of steps"),
        (((good, [1]), {"available": [3, 4]}), "d has 3 steps, but 4 were recorded of sequence 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            sequence_statistics(*arguments[0], **arguments[1])
    for edges in ([0.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="edges must be two or more, increasing"):
            probability_slices(good, good, edges)
    with pytest.raises(ValueError, match="they must be alike"):
        probability_slices(good, good[0], 2)
    for empty in (StepStatistics.of, lambda values: bootstrap(values, np.mean)):
        with pytest.raises(ValueError, match=r"there are no steps|there is no sequence"):
            empty([])
