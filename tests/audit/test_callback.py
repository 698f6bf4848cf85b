import csv
import time

import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.audit import AuditCallback
from tests.audit.test_twin import SMALL, bits


def always(folder=None, **settings):
    return AuditCallback(folder, every=1, budget=1.0, minibatches=2, **settings)


def new(env, precision, policy="MlpPolicy", **settings):
    settings = {**SMALL, **settings}
    if precision == "sb3":
        return PPO(policy, env, **settings)
    return PPOFP16(policy, env, precision=precision, **settings)


@pytest.mark.parametrize("precision", [*(p for p in Precision.presets if not p.startswith("e5m")), "e5m7", "sb3"])
def test_training_goes_on_as_it_would_have_without(toy, precision):
    plain = new(toy(), precision).learn(256)
    callback = always()
    callback.budget = 100.0  # each rollout is audited, however slow
    audited = new(toy(), precision).learn(256, callback=callback)
    assert len(callback.audits) == 4
    assert all(th.equal(a, b) for a, b in zip(bits(plain), bits(audited), strict=True))
    assert [steps for steps, _ in callback.moved] == [64, 128, 192, 256]
    assert all(0 <= share <= 1 for _, share in callback.moved)
    assert callback.moved[-1][1] > 0


@pytest.mark.parametrize("precision", ["fp16", "sb3"])
@pytest.mark.parametrize("kind", ["gsde", "multi", "dict", "image"])
def test_other_policies(toy, precision, kind):
    from tests.test_everything_trains import Anything

    floats, discrete = spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([2, 3])
    cases = {
        "gsde": ("MlpPolicy", floats, spaces.Box(-1, 1, (2,)), {"use_sde": True}),
        "multi": ("MlpPolicy", floats, discrete, {}),
        "dict": ("MultiInputPolicy", spaces.Dict({"a": floats}), discrete, {}),
        "image": ("CnnPolicy", spaces.Box(0, 255, (3, 36, 36), "uint8"), discrete, {}),
    }
    policy, observations, actions, settings = cases[kind]
    env = DummyVecEnv([lambda: Anything(observations, actions) for _ in range(2)])
    callback = always()
    new(env, precision, policy, **{**settings, "n_steps": 16}).learn(32, callback=callback)
    (found,) = callback.audits
    assert found.mismatches[0].steps.mean_abs < 0.05
    assert len(found.verdicts()) >= 5


def test_what_it_writes_and_logs(toy, tmp_path, recorder, capsys):
    model = new(toy(), "fp16")
    logger = recorder()
    model.set_logger(logger)
    callback = always(tmp_path / "deep" / "audit", verbose=1)
    callback.budget = 100.0
    model.learn(128, callback=callback)
    assert {path.name for path in (tmp_path / "deep" / "audit").iterdir()} == {"audit.csv", "audit.png", "verdict.txt"}
    with (tmp_path / "deep" / "audit" / "audit.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["timesteps"] for row in rows} == {"64", "128"}
    assert sum(row["measure"] == "moved" and row["section"] == "iteration" for row in rows) == 2
    names = ("unchanged", "retained", "noise", "step_ratio", "step_cosine", "moved")
    for name in (*names, "log_ratio_error", "range_used"):
        assert len(logger.values[f"audit/{name}"]) == 2
    assert logger.values["audit/zero_second_moments"] == [0]  # before the first update there are none
    assert logger.values["audit/unchanged"] == [found.unchanged for found in callback.audits]
    assert "Audit after 128 steps:" in capsys.readouterr().out


def test_a_users_optimizer_is_audited_without_sharp(toy):
    callback = always()
    new(toy(), "fp16", policy_kwargs={"optimizer_class": th.optim.RMSprop}).learn(64, callback=callback)
    assert callback.audits[0].shadows == ()
    assert callback.audits[0].layers


def test_copies_say_nothing(toy, capsys):
    callback = always()
    model = new(toy(), "fp16", verbose=1)
    capsys.readouterr()
    model.learn(64, callback=callback, log_interval=None)
    assert "engine" not in capsys.readouterr().out


def test_every_so_many_rollouts(toy):
    callback = AuditCallback(every=3, minibatches=1)
    callback.budget = 100.0
    new(toy(), "fp16").learn(64 * 7, callback=callback)
    assert [found.timesteps for found in callback.audits] == [64, 256, 448]


def test_audits_beyond_the_budget_are_put_off(toy):
    callback = AuditCallback(every=1, minibatches=1, budget=1e-6)
    new(toy(), "fp16").learn(64 * 4, callback=callback)
    assert [found.timesteps for found in callback.audits] == [64]


@pytest.mark.parametrize(("longest", "audits"), [(0.4, 1), (1.0, 0)])
def test_an_audit_counts_before_it_is_made(monkeypatch, longest, audits):
    """Of ten seconds a fifth may go into audits, and 1.5 have."""
    callback, made = AuditCallback(budget=0.2), []
    monkeypatch.setattr(callback, "_audit", lambda: made.append(1))
    monkeypatch.setattr(callback, "_weights", list)
    callback._rollouts = callback._due = 5
    callback._started, callback._seconds, callback._longest = time.perf_counter() - 10, 1.5, longest
    callback._on_rollout_end()
    assert len(made) == audits


def test_one_callback_for_two_runs(toy, tmp_path):
    callback = always(tmp_path)
    for _ in range(2):
        new(toy(), "fp16").learn(64, callback=callback)
    with (tmp_path / "audit.csv").open() as file:
        steps = [row["timesteps"] for row in csv.DictReader(file)]
    assert set(steps) == {"64"}
    assert len(callback.audits) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"minibatches": 1.5}, "minibatches=1.5"),
        ({"budget": 0}, "budget=0"),
        ({"budget": float("nan")}, "budget=nan"),
    ],
)
def test_senseless_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AuditCallback(**settings)


def test_other_algorithms_are_refused(toy):
    with pytest.raises(ValueError, match="A2C"):
        A2C("MlpPolicy", toy(), device="cpu").learn(10, callback=AuditCallback())
