"""The worked example of weight sticking, against arithmetic done another way, and the fine-tuning runs."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch as th

from benchmarks import finetuning, sticking
from benchmarks.runner import read_csv

NUMPY = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
KINDS = {"bf16": sticking.BF16, "fp16": sticking.FP16}


def moves_in_numpy(name, start, step):
    weight, dtype = np.float32(start), NUMPY[name]
    copy, count = dtype(weight), 0
    while dtype(weight) == copy:
        weight, count = np.float32(weight + np.float32(step)), count + 1
    return count


def test_ticks_of_the_document():
    """At 0.025, which lies between 2^-6 and 2^-5."""
    assert (sticking.tick_at(sticking.BF16), sticking.tick_at(sticking.FP16)) == (2.0**-13, 2.0**-16)
    assert f"{2.0**-13:.2e} {2.0**-14:.1e} {2.0**-17:.1e}" == "1.22e-04 6.1e-05 7.6e-06"


@pytest.mark.parametrize(("name", "from_tick", "up", "down"), [("bf16", 62, 86, 37), ("fp16", 8, 2, 14)])
def test_first_moves(name, from_tick, up, down):
    """From 205 · 2^-13, a tick of both formats, and from 0.025 = 204.8 · 2^-13 = 1638.4 · 2^-16."""
    on_tick, counts = 205 * 2.0**-13, (from_tick, up, down)
    starts = ((on_tick, 1e-6), (0.025, 1e-6), (0.025, -1e-6))
    assert tuple(int(sticking.first_move(KINDS[name], th.tensor([w]), step)) for w, step in starts) == counts
    assert tuple(moves_in_numpy(name, w, step) for w, step in starts) == counts


def test_a_step_that_fp32_swallows_is_refused():
    with pytest.raises(ValueError, match="1e-06 does not change FP32 weights of 64"):
        sticking.first_move(sticking.BF16, th.tensor([64.0]))


@pytest.mark.parametrize("steps", [1, 4, 61])
def test_stochastic_copies_move_by_what_is_due(steps):
    ratio, error, share = sticking.stochastic_movement(steps)
    assert abs(ratio - 1) < 4 * error < 0.03
    probability = steps * 1e-6 * 2**13
    assert abs(share / probability - 1) < 4 * error + 3e-4  # FP32 steps are 0.02 % longer


def test_example_is_the_committed_one():
    committed = read_csv(sticking.EXAMPLE_FILE)
    for row, ours in zip(committed, sticking.example(), strict=True):
        assert row["quantity"] == ours["quantity"]
        assert float(row["computed"]) == pytest.approx(ours["computed"], rel=1e-4)
        assert row["document"] == "" or float(row["document"]) == pytest.approx(ours["computed"], rel=0.06)
    assert all(row["quantity"] in sticking.example_table(committed) for row in committed)


def test_signs_persist_as_stated():
    for persistence in (0.0, 0.5, 1.0):
        signs = sticking.signed_steps(100_000, 4, persistence) / sticking.STEP
        assert signs.abs().unique().tolist() == [1]
        assert (signs[1:] * signs[:-1]).mean(dim=1).numpy() == pytest.approx(persistence, abs=0.013)
        assert abs(float(signs[0].mean())) < 0.013


def test_population_moves_as_the_normal_distribution_says():
    """From BF16 ticks, four steps one way cross half a tick below 2^-9 in BF16, below 2^-6 in FP16, not elsewhere."""
    weights = 1 << 18
    rows = {(row["start"], row["persistence"], row["copy"]): row for row in sticking.population(weights)}
    spread = sticking.WEIGHT / 0.67449
    for copy, below in (("bf16", 2.0**-9), ("fp16", 2.0**-6)):
        share = math.erf(below / spread / 2**0.5)
        error = 4 * (share * (1 - share) / weights) ** 0.5
        assert rows["on BF16 ticks", 1.0, copy]["moved_percent"] / 100 == pytest.approx(share, abs=error + 5e-4)
    assert len(rows) == 2 * 3 * 3


def test_followed_and_first_reach():
    due, change = th.tensor([1.0, -2.0, 1.0]), th.tensor([1.0, 0.0, -1.0])
    assert finetuning.followed(due, change) == 0
    assert finetuning.followed(due, due / 2) == 0.5
    rewards, values = np.array([0.0, 0.2, 0.1, 0.4]), np.array([0.0, 1.0, 2.0, 3.0])
    assert finetuning.first_reach(rewards, values, 0.1) == 0.5
    assert finetuning.first_reach(rewards, values, 0.25) == pytest.approx(2.5)
    assert math.isnan(finetuning.first_reach(rewards, values, 0.5))


def test_questions_reward_right_answers_alone():
    rule = finetuning.rules(0)[1]
    env = finetuning.Questions(rule, seed=0)
    right = finetuning.right_answers(rule, env.reset())
    given = np.where(np.arange(len(right)) % 2, right, right + 1)
    _, rewards, dones, _ = env.step(given)
    assert rewards.tolist() == [0, 1] * (len(right) // 2)
    assert dones.all()
    assert not np.array_equal(right, finetuning.right_answers(rule, env.asked)), "new questions are asked"


@pytest.fixture
def tiny(monkeypatch):
    finetuning.trained_weights.cache_clear()
    for name, value in {"LAYERS": 2, "WIDTH": 64, "EXAMINED": 64, "PRETRAINED_REWARD": 0.2}.items():
        monkeypatch.setattr(finetuning, name, value)
    yield
    finetuning.trained_weights.cache_clear()


def test_runs_tell_what_sticks(tiny):
    rows = {method: finetuning.run("on-ticks", method, 0, iterations=20) for method in finetuning.METHODS}
    assert (rows["fp32"]["stuck"], rows["fp32"]["followed_first"], rows["fp32"]["followed_last"]) == (0, 1, 1)
    moved = {method: row["moved_first"] for method, row in rows.items()}
    assert moved["amp-bf16"] < moved["amp-bf16-lr"] < moved["amp-fp16"] < moved["fp32"]
    assert rows["amp-bf16"]["followed_first"] < 0.1 < 0.5 < rows["amp-bf16-sr"]["followed_first"]
    assert max(row["start_reward"] for row in rows.values()) - min(row["start_reward"] for row in rows.values()) < 1e-3
    for row in rows.values():
        points = [point.split(":") for point in row["curve"].split()]
        assert [int(done) for done, _, _ in points] == [0, 5, 10, 15, 20]
        assert float(points[0][2]) == 0 < float(points[-1][2])
    slow, fast = rows["fp32"], rows["amp-bf16-lr"]
    assert fast["learning_rate"] == 2 * slow["learning_rate"]
    assert 1 < slow["net_steps_first"] <= 4.01


def test_a_run_does_not_depend_on_what_ran_before(tiny):
    cold, warm = (finetuning.run("on-ticks", "amp-fp16", 0, iterations=5) for _ in range(2))
    assert cold == warm


def test_weights_that_start_between_ticks_follow_at_once(tiny):
    row = finetuning.run("between-ticks", "amp-bf16", 0, iterations=10)
    assert row["followed_last"] > 0.5
    assert row["stuck"] > 0.9


def test_methods_are_compared_seed_by_seed_at_equal_reward(monkeypatch):
    """FP32 gains 0.4 in 20 iterations; the other method half of that in twice the time, with three times the drift."""
    monkeypatch.setattr(finetuning, "SEEDS", (0, 1))
    curves = {"fp32": "0:{0}:0 10:{1}:0.1 20:{2}:0.3", "amp-bf16": "0:{0}:0 10:{0}:0 20:{1}:0.3"}
    areas = {("fp32", 0): 0.2, ("fp32", 1): 0.4, ("amp-bf16", 0): 0.1, ("amp-bf16", 1): 0.2}
    rows = [
        {
            "setting": "slow",
            "method": method,
            "seed": str(seed),
            "area_gained": str(area),
            "curve": curves[method].format(seed, seed + 0.2, seed + 0.4),
        }
        for (method, seed), area in areas.items()
    ]
    compared = finetuning.against_fp32(rows, "slow", "amp-bf16")
    for name, ratio in {"area": 0.5, "iterations": 2, "drift": 3}.items():
        assert compared[name] == pytest.approx((ratio, 0), abs=1e-9)
    rows[-1]["area_gained"] = "0.6"
    assert finetuning.against_fp32(rows, "slow", "amp-bf16")["area"] == pytest.approx(
        (1, finetuning.STUDENT_T * 2**0.5 / 2 / 2**0.5)
    )


def test_remedies_are_complete():
    rows = read_csv(finetuning.FILE)
    runs = {(row["setting"], row["method"], int(row["seed"])) for row in rows}
    assert len(rows) == len(runs) == len(finetuning.SETTINGS) * len(finetuning.METHODS) * len(finetuning.SEEDS)
    table = finetuning.table(rows)
    assert "nan" not in table
    assert all(method.name in table for method in finetuning.METHODS.values())
