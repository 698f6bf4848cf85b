import csv
import threading
import time

import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.audit import AuditCallback
from tests.audit.test_twin import SMALL, bits


def always(folder=None, **settings):
    return AuditCallback(folder, every=1, budget=0.5, minibatches=2, **settings)


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
@pytest.mark.parametrize("kind", ["gsde", "multi", "binary", "dict", "image"])
def test_other_policies(toy, precision, kind):
    from tests.test_everything_trains import Anything

    floats, discrete = spaces.Box(-1, 1, (3,)), spaces.MultiDiscrete([2, 3])
    cases = {
        "gsde": ("MlpPolicy", floats, spaces.Box(-1, 1, (2,)), {"use_sde": True}),
        "multi": ("MlpPolicy", floats, discrete, {}),
        "binary": ("MlpPolicy", floats, spaces.MultiBinary(3), {}),
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
    assert logger.values["audit/lost_second_moments"] == [0]  # before the first update there are none
    assert logger.values["audit/unchanged"] == [found.unchanged for found in callback.audits]
    assert "Audit after 128 steps:" in capsys.readouterr().out


def test_a_users_optimizer_is_audited_without_sharp(toy):
    callback = always()
    for optimizer in (th.optim.RMSprop, th.optim.SGD, th.optim.AdamW):
        for precision in ("fp16", "sb3"):
            settings = {"policy_kwargs": {"optimizer_class": optimizer, "optimizer_kwargs": {}}}
            new(toy(), precision, **settings).learn(64, callback=callback)
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


@pytest.mark.parametrize(("longest", "audits"), [(0.1, 1), (0.3, 0)])
def test_an_audit_counts_before_it_is_made(monkeypatch, longest, audits):
    """Of ten seconds audits have taken 1.5; they may take a fifth of the rest."""
    callback, made = AuditCallback(budget=0.2), []
    monkeypatch.setattr(callback, "_audit", lambda: made.append(1))
    monkeypatch.setattr(callback, "_weights", list)
    callback._rollouts = callback._due = 5
    callback._started, callback._seconds, callback._longest = time.perf_counter() - 10, 1.5, longest
    callback._on_rollout_end()
    assert len(made) == audits


def test_a_run_that_goes_on_goes_on_in_its_files(toy, tmp_path):
    model, callback = new(toy(), "fp16"), always(tmp_path)
    callback.budget = 100.0
    model.learn(64, callback=callback)
    model.learn(64, callback=callback, reset_num_timesteps=False)
    with (tmp_path / "audit.csv").open() as file:
        assert {row["timesteps"] for row in csv.DictReader(file)} == {"64", "128"}
    assert [found.timesteps for found in callback.audits] == [64, 128]


def test_an_audit_that_fails_does_not_end_training(toy, tmp_path):
    model = new(toy(), "sb3")
    model.lock = threading.Lock()  # SB3 cannot save it
    with pytest.warns(UserWarning, match="No more audits of this run: TypeError: cannot pickle"):
        model.learn(192, callback=always(tmp_path))
    assert model.num_timesteps == 192
    (tmp_path / "audit.png").mkdir()
    model = new(toy(), "sb3")
    with pytest.warns(UserWarning, match="No more audits of this run: IsADirectoryError"):
        model.learn(64, callback=always(tmp_path))


def test_other_callbacks_find_the_buffer_as_it_was(toy):
    """SB3's buffers rearrange themselves when they are first read."""

    class Halve(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_end(self):
            self.model.rollout_buffer.advantages[:, 0] *= -0.5

    parameters = []
    for callbacks in ([Halve()], [always(), Halve()]):
        env = DummyVecEnv([lambda: toy() for _ in range(2)])
        parameters.append(bits(new(env, "sb3").learn(128, callback=callbacks)))
    assert all(th.equal(a, b) for a, b in zip(*parameters, strict=True))


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
        ({"budget": 0.6}, "budget=0.6"),
    ],
)
def test_senseless_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AuditCallback(**settings)


def test_other_algorithms_are_refused(toy):
    with pytest.raises(ValueError, match="A2C"):
        A2C("MlpPolicy", toy(), device="cpu").learn(10, callback=AuditCallback())
