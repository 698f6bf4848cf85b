"""The sweep's bookkeeping, on a short run and on rows that are made up."""

import numpy as np
import pytest

from benchmarks import sweep
from sb3_fp16 import Precision


def made_up(env, arm, seed, auc, policy=0.0):
    policies = np.zeros((3, 2, sweep.PROBES, 2))
    policies[-1, 0] = policy
    return {
        **{"env": env, "arm": arm, "seed": str(seed), "return_auc": str(auc), "final_return": str(2 * auc)},
        **{"stuck_fraction_late": "0.5", "curve": "0:1.0 10:2.0", "policies": sweep.pack(list(policies))},
    }


def test_one_factor_differs_from_the_preset():
    preset = Precision.presets["fp16"].to_dict()
    for name, arm in sweep.ARMS.items():
        if isinstance(arm.precision, Precision) and name != "masters":
            changed = {key for key, value in arm.precision.to_dict().items() if value != preset[key]}
            assert changed <= {"input_sharing", "hidden_sharing"} or len(changed) == 1, name
    assert len({(str(arm.precision), arm.learning_rate) for arm in sweep.ARMS.values()}) == len(sweep.ARMS)


def test_a_short_run(monkeypatch, toy):
    monkeypatch.setattr(sweep, "STEPS", 6144)
    monkeypatch.setattr(sweep, "EVERY", 2048)
    monkeypatch.setattr(sweep, "PROBED_AT", (2048, 4096, 6144))
    monkeypatch.setattr(sweep, "EPISODES", 1)
    row = sweep.run("Pendulum-v1", "fp16", 3)
    assert [point.split(":")[0] for point in row["curve"].split()] == ["0", "2048", "4096", "6144"]
    assert 0 < row["stuck_fraction"] < 1
    policies = sweep.unpack(row["policies"])
    assert policies.shape == (3, 2, sweep.PROBES, 1)
    assert (policies[:, 1] == policies[:, 1, :1]).all()  # log_std does not depend on the state
    assert len(np.unique(policies[:, 1])) == 2  # the last update's learning rate is 0


def test_packed_policies_keep_half_precision():
    policies = [np.random.default_rng(0).normal(size=(2, sweep.PROBES, 5)) for _ in range(3)]
    np.testing.assert_allclose(sweep.unpack(sweep.pack(policies)), policies, rtol=1e-3, atol=1e-6)


def test_probes_are_always_the_same():
    first, second = sweep.probes("Pendulum-v1"), sweep.probes("Pendulum-v1")
    np.testing.assert_array_equal(first, second)
    assert first.shape == (sweep.PROBES, 3)
    assert len(np.unique(first, axis=0)) == sweep.PROBES


def test_pairs_are_compared_within_tasks():
    rng = np.random.default_rng(1)
    rows = []
    for env, scale in (("HalfCheetah-v5", 1000.0), ("Hopper-v5", 10.0)):
        for seed in range(8):
            luck = rng.normal()
            rows += [
                made_up(env, "fp32", seed, scale * (5 + luck)),
                made_up(env, "fp16", seed, scale * (5.5 + luck), 0.3),
            ]
    rows.append(made_up("Walker2d-v5", "fp16", 0, 1.0))  # has no partner
    found = sweep.compare(rows, "fp16", "fp32")
    assert (found.pairs, found.wins) == (16, 16)
    assert found.difference.value == pytest.approx(0.1, rel=0.15)  # of either task, whatever its scale
    assert found.difference.low > 0.08  # the luck of a seed cancels within its pair
    assert found.final.value == pytest.approx(found.difference.value)
    assert found.auc == pytest.approx(1 + found.difference.value)
    assert found.drift == pytest.approx(0.3**2, rel=1e-2)  # two dimensions of 0.3²/2
    assert sweep.compare(rows, "paper", "fp32") is None
    table = sweep.table(rows).splitlines()
    assert len(table) == 4
    assert "| `fp16` | the preset | 17 | 110 |" in sweep.table(rows)


def test_fresh_seeds_are_apart():
    rows = [
        made_up(env, arm, seed, 100.0 + 10 * (arm == "dithered") * (seed in sweep.FRESH) + seed)
        for env in sweep.ENVS
        for arm in sweep.CONFIRMED
        for seed in (*sweep.SEEDS, *sweep.FRESH)
    ]
    assert "| `dithered` | weights written back dithered | 24 | 100 |" in sweep.table(rows)
    lines = sweep.confirmation(rows).splitlines()
    assert len(lines) == 2 + 3
    assert lines[2].startswith("| `fp16` | `fp32` | 24 | +0 [+0, +0] |")
    assert lines[4].startswith("| `dithered` | `fp16` | 24 | +9 [+9, +9] |")
    assert lines[4].endswith("| 24 of 24 |")
    assert sweep.confirmation([row for row in rows if int(row["seed"]) in sweep.SEEDS]).count("\n") == 1


def test_closed_form_of_the_drift():
    rng = np.random.default_rng(0)
    policy, reference = rng.normal(size=(2, 2, sweep.PROBES, 3))
    (mean, log_std), (mean0, log_std0) = policy, reference
    sample = mean0 + np.exp(log_std0) * rng.normal(size=(20_000, *mean0.shape))

    def log_prob(mean, log_std):
        return (-log_std - 0.5 * ((sample - mean) / np.exp(log_std)) ** 2).sum(-1)

    estimate = (log_prob(mean0, log_std0) - log_prob(mean, log_std)).mean()
    assert sweep.gaussian_kl(policy, reference) == pytest.approx(estimate, rel=0.02)


def test_the_picture(tmp_path):
    rows = [made_up(env, arm, seed, 10.0 + seed) for env in sweep.ENVS for arm in ("fp32", "fp16") for seed in (0, 1)]
    sweep.draw(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
