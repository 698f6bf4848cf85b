"""Public bug reports of people who train PPO, as inputs. The number behind each is its issue."""

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_fp16 import PPOFP16
from sb3_fp16.buffers import RolloutBufferFP16

HALF = ("fp16", "paper", "bf16", "bf16-sr")


class Given(gym.Env):
    """Observations from a function of the step, a constant reward; episodes of 50 steps."""

    def __init__(self, observation_space, action_space, observe, reward=1.0):
        self.observation_space, self.action_space = observation_space, action_space
        self.observe, self.reward, self.steps = observe, reward, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(self.steps), {}

    def step(self, action):
        self.steps += 1
        return self.observe(self.steps), self.reward, False, self.steps % 50 == 0, {}


def model_of(env, policy="MlpPolicy", **settings):
    settings = {"n_steps": 64, "batch_size": 32, "n_epochs": 2, "seed": 0, "device": "cpu", **settings}
    return PPOFP16(policy, env, **settings)


def assert_finite(model):
    assert np.isfinite(model.policy.parameters_to_vector()).all()
    for name, array in model.rollout_buffer.arrays().items():
        assert np.isfinite(array.astype(np.float64)).all(), name


BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize("precision", HALF)
def test_sb3_519_dictionary_observations_to_two_million(precision):
    space = spaces.Dict({"price": spaces.Box(0, 2e6, (3,), np.float64), "flag": spaces.Discrete(2)})
    env = Given(space, BOX, lambda step: {"price": np.full(3, 1e6 + step), "flag": step % 2})
    model = model_of(env, "MultiInputPolicy", precision=precision)
    if precision.startswith("bf16"):  # BF16 holds them
        model.learn(128)
        assert model.rollout_buffer.saturated["observations"] == 0
    else:
        with pytest.warns(UserWarning, match=r"observation\['price'\] exceeds"):
            model.learn(128)
        assert model.rollout_buffer.saturated["observations"] == 3 * 64
    assert_finite(model)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sb3_519_a_bad_key_is_named(bad):
    space = spaces.Dict({"price": spaces.Box(-np.inf, np.inf, (3,), np.float64), "other": spaces.Box(0, 1, (1,))})

    def observe(step):
        return {"price": np.full(3, bad if step == 7 else 1.0), "other": np.zeros(1, np.float32)}

    env = DummyVecEnv([lambda: Given(space, BOX, lambda _: observe(0)), lambda: Given(space, BOX, observe)])
    with pytest.raises(ValueError, match=rf"observation\['price'\] is {bad} in environment 1"):
        model_of(env, "MultiInputPolicy").learn(64)


@pytest.mark.parametrize("precision", HALF)
def test_hill_a_1143_nine_thousand_observations_and_actions(precision):
    space, many = spaces.Box(-1, 1, (9000,)), spaces.Box(-1, 1, (9000,))
    rng = np.random.default_rng(0)
    env = Given(space, many, lambda _: rng.uniform(-1, 1, 9000).astype(np.float32))
    model = model_of(env, n_steps=16, batch_size=16, precision=precision)
    model.learn(32)
    assert_finite(model)
    assert int(model.engine.gradient_scale.skipped_steps) == 0


@pytest.mark.parametrize("precision", [*HALF, "fp32"])
def test_zoo_156_sb3_1401_learning_rate_of_one(precision):
    model = model_of("Pendulum-v1", learning_rate=1.0, precision=precision)
    complaint = ""
    try:
        model.learn(1024)
    except ValueError as error:
        complaint = str(error)
    assert not complaint or "learning_rate" in complaint or precision == "fp32"
    assert np.isfinite(model.policy.parameters_to_vector()).all()


@pytest.mark.parametrize("precision", HALF)
def test_sb3_675_1145_float64_spaces(precision):
    space = spaces.Box(-1, 1, (3,), np.float64)
    model = model_of(Given(space, spaces.Box(-2, 2, (2,), np.float64), lambda _: np.ones(3)), precision=precision)
    model.learn(128)
    action, _ = model.predict(np.ones(3))
    assert action.dtype == np.float64
    assert model.action_space.contains(action)


@pytest.mark.parametrize("precision", [*HALF, "fp32"])
def test_sb3_440_a_last_minibatch_of_one_and_constant_rewards(precision):
    env = Given(spaces.Box(-1, 1, (3,)), BOX, lambda _: np.ones(3, np.float32))
    model = model_of(env, n_steps=65, batch_size=64, n_epochs=10, precision=precision)
    model.learn(260)
    assert_finite(model)


@pytest.mark.slow
def test_sb3_1593_gsde_for_a_hundred_thousand_steps(recorder):
    env = make_vec_env("Pendulum-v1", n_envs=4, seed=0)
    settings = {"n_steps": 1024, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9}
    model = model_of(env, use_sde=True, sde_sample_freq=4, **settings)
    model.set_logger(recorder())
    model.learn(100_000)
    assert th.isfinite(model.policy.log_std).all()
    assert max(model.logger.values["train/approx_kl"]) < 1


@pytest.mark.parametrize("precision", [*HALF, "fp32"])
def test_rsl_rl_33_a_tiny_standard_deviation(precision):
    model = model_of("Pendulum-v1", precision=precision, policy_kwargs={"log_std_init": -12.0})
    model.learn(256)
    assert_finite(model)
    assert th.isfinite(model.policy.log_std).all()


@pytest.mark.parametrize("precision", HALF)
def test_contrib_81_247_eight_thousand_choices(precision):
    space = spaces.Box(-1, 1, (3,))
    model = model_of(Given(space, spaces.Discrete(8000), lambda _: np.ones(3, np.float32)), precision=precision)
    model.learn(128)
    distribution = model.policy.get_distribution(th.ones(2, 3)).distribution
    assert distribution.probs.dtype == th.float32
    th.testing.assert_close(distribution.probs.sum(1), th.ones(2), rtol=0, atol=1e-5)
    actions = np.array([model.predict(np.ones(3, np.float32))[0] for _ in range(20)])
    assert ((actions >= 0) & (actions < 8000)).all()
    assert len(set(actions.tolist())) > 10
    assert "8000 logits" in model.policy.absolute_because


@pytest.mark.parametrize("precision", [*HALF, "fp32"])
def test_trl_454_no_learning_rate_no_change(precision, recorder):
    model = model_of("Pendulum-v1", learning_rate=0.0, n_steps=64, batch_size=64, n_epochs=1, precision=precision)
    model.set_logger(recorder())
    model.learn(64)
    logged = model.logger.values
    assert logged["train/clip_fraction"] == [0]
    # Another batch size may round a mean to its neighbour; BF16's is eight times as far, and KL goes with the square.
    assert logged["train/approx_kl"][0] < (1e-6 if not precision.startswith("bf16") else 64e-6)


def test_sb3_834_1630_images_in_dictionaries_stay_bytes():
    image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    space = spaces.Dict({"left": image, "right": image, "speed": spaces.Box(-1, 1, (1,))})
    env = DummyVecEnv([lambda: Given(space, BOX, lambda _: space.sample())] * 3)
    model = model_of(env, "MultiInputPolicy", n_steps=16)
    model.learn(96)
    buffer = model.rollout_buffer
    assert isinstance(buffer, RolloutBufferFP16)
    assert {buffer.observations[key].dtype.name for key in ("left", "right")} == {"uint8"}
    images = 16 * 3 * 2 * 36 * 36 * 3
    assert images < model.precision_report()["rollout"].bytes < 1.01 * images


def test_sb3_683_deterministic_actions_after_loading(tmp_path):
    space = spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Discrete(3)})
    model = model_of(Given(space, BOX, lambda _: space.sample()), "MultiInputPolicy").learn(128)
    model.save(tmp_path / "model")
    twin = PPOFP16.load(tmp_path / "model", device="cpu")
    for _ in range(20):
        obs = space.sample()
        np.testing.assert_array_equal(
            model.predict(obs, deterministic=True)[0], twin.predict(obs, deterministic=True)[0]
        )


def test_sb3_897_unbounded_actions_are_refused_as_by_ppo():
    env = Given(spaces.Box(-1, 1, (3,)), spaces.Box(-np.inf, np.inf, (2,)), lambda _: np.ones(3, np.float32))
    for cls in (PPO, PPOFP16):
        with pytest.raises(AssertionError, match="must have a finite lower and upper bound"):
            cls("MlpPolicy", env, device="cpu")
