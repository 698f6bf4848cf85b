"""Comparing updates, on a small run."""

import copy

import numpy as np
import pytest

from benchmarks import fidelity
from benchmarks.runner import make_model
from sb3_fp16.audit.twin import SINGLE, twin_of

SMALL = {"n_steps": 256, "batch_size": 64, "n_epochs": 4}


@pytest.fixture(scope="module")
def model():
    model = make_model("fp32", "Pendulum-v1", 0, **SMALL).learn(512)
    _, callback = model._setup_learn(256, None, reset_num_timesteps=False)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, 256)
    return model


def test_a_rollout_is_taken_over(model):
    rollout = model.rollout_buffer
    taken = fidelity.rollout_for(twin_of(model, SINGLE), rollout)
    for name in ("observations", "actions", "rewards", "values", "advantages", "returns", "episode_starts"):
        np.testing.assert_array_equal(getattr(taken, name), getattr(rollout, name), err_msg=name)
    half = fidelity.rollout_for(twin_of(model, "fp16"), rollout)
    assert half.observations.dtype == np.float16
    np.testing.assert_allclose(half.returns.astype(float), rollout.returns, rtol=1e-3)
    through = fidelity.rollout_for(twin_of(model, SINGLE), rollout, fidelity._FP16)
    assert through.observations.dtype == np.float32
    np.testing.assert_array_equal(through.observations, rollout.observations.astype(np.float16).astype(np.float32))
    assert (through.observations != rollout.observations).any()


def test_the_same_update_is_the_same_and_others_are_not(model):
    observations = model.rollout_buffer.observations[:, 0]
    before = fidelity._Outputs(twin_of(model, SINGLE), observations)

    def after(precision, order=0):
        updated = fidelity._updated(model, precision, model.rollout_buffer, order=order)
        return fidelity._Outputs(updated, observations)

    reference = after(SINGLE)

    def against(outputs):
        return fidelity._against(before, reference, outputs)

    same = against(after(SINGLE))
    assert (same["kl"], same["movement"], same["cosine"], same["values"]) == (0, 1, 1, 0)
    half_way = copy.copy(reference)
    half_way.mean, half_way.values = (before.mean + reference.mean) / 2, before.values
    found = against(half_way)
    assert (found["movement"], found["cosine"], found["values"]) == pytest.approx((0.5, 1, 1))
    order, half, brain = against(after(SINGLE, order=1)), against(after(fidelity._FP16)), against(after("bf16"))
    assert 0 < half["kl"] < 0.2 * brain["kl"]
    assert order["kl"] > 0
    assert brain["movement"] < half["movement"]


def test_a_run_is_a_row_and_rows_a_table(monkeypatch):
    monkeypatch.setattr(fidelity, "AFTER", (1, 2))
    monkeypatch.setattr(fidelity, "PAPER_SETTINGS", SMALL)
    row = fidelity.run("Pendulum-v1", 0)
    assert all(len(row[f"{arm} kl"].split()) == 2 for arm in fidelity.ARMS)
    table = fidelity.table([row, row])
    assert len(table.splitlines()) == 2 + len(fidelity.ARMS)
    assert "nan" not in table
