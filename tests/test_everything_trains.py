"""Whatever runs with SB3's PPO: policies, spaces, extractors and wrappers, each trained for two updates."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize
from torch import nn

from sb3_fp16 import PPOFP16

PRESETS = ("fp16", "paper", "fp32")

ACTIONS = {
    "box": lambda: spaces.Box(-1, 1, (2,)),
    "box64": lambda: spaces.Box(-2, 2, (2, 2), np.float64),
    "discrete": lambda: spaces.Discrete(3),
    "multidiscrete": lambda: spaces.MultiDiscrete([2, 4]),
    "multibinary": lambda: spaces.MultiBinary(3),
}
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)
OBSERVATIONS = {
    "box": lambda: spaces.Box(-np.inf, np.inf, (5,)),
    "box64": lambda: spaces.Box(-np.inf, np.inf, (5,), np.float64),
    "discrete": lambda: spaces.Discrete(4),
    "multidiscrete": lambda: spaces.MultiDiscrete([3, 2]),
    "multibinary": lambda: spaces.MultiBinary(6),
    "image": lambda: copy.deepcopy(IMAGE),
    "dict": lambda: spaces.Dict(
        {"camera": copy.deepcopy(IMAGE), "pose": spaces.Box(-9, 9, (3,), np.float64), "mode": spaces.Discrete(2)}
    ),
}
POLICY_FOR = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}


class Anything(gym.Env):
    """Samples observations of any space; reward prefers small or zero actions; episodes of 10 steps, truncated."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space, self.steps = observation_space, action_space, 0

    def _observe(self):
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        return self._observe(), -float(np.abs(action).mean()), False, self.steps >= 10, {}


def environment(observation="box", action="box"):
    return Anything(OBSERVATIONS[observation](), ACTIONS[action]())


def train(env, policy="MlpPolicy", precision="fp16", moved=0.2, **settings):
    """Two updates; parameters finite, moved, and in the preset's format."""
    settings = {"n_steps": 32, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu", **settings}
    model = PPOFP16(policy, env, precision=precision, **settings)
    before = model.policy.parameters_to_vector()
    model.learn(2 * settings["n_steps"] * model.n_envs)
    after = model.policy.parameters_to_vector()
    assert np.isfinite(after).all()
    assert (before != after).mean() > moved
    assert {p.dtype for p in model.policy.parameters()} == {model.precision.dtype}
    return model


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("observation", OBSERVATIONS)
def test_matrix(observation, action, precision):
    env = environment(observation, action)
    model = train(env, POLICY_FOR.get(observation, "MlpPolicy"), precision)
    assert model.policy.absolute_because is None or precision == "fp32"
    actions, _ = model.predict(env.observation_space.sample())
    if action != "multibinary":  # SB3 itself returns these as floats
        assert actions.dtype == env.action_space.dtype
        assert env.action_space.contains(actions)
    buffer = model.rollout_buffer
    if observation in ("image", "dict"):
        images = buffer.observations if observation == "image" else buffer.observations["camera"]
        assert images.dtype == np.uint8


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("full_std", [True, False])
@pytest.mark.parametrize("squash", [True, False])
@pytest.mark.parametrize("expln", [True, False])
def test_gsde(precision, full_std, squash, expln):
    settings = {"full_std": full_std, "squash_output": squash, "use_expln": expln}
    for policy, observation in (("MlpPolicy", "box"), ("CnnPolicy", "image")):
        model = train(
            environment(observation), policy, precision, use_sde=True, sde_sample_freq=4, policy_kwargs=settings
        )
        assert th.isfinite(model.policy.log_std).all()


class Normalised(BaseFeaturesExtractor):
    """An extractor with layers of many kinds and a parameter of its own."""

    def __init__(self, observation_space, features_dim=24):
        super().__init__(observation_space, features_dim)
        size = int(np.prod(observation_space.shape))
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(size, 20), nn.LayerNorm(20), nn.SiLU(), nn.Linear(20, features_dim, bias=False),
            nn.BatchNorm1d(features_dim), nn.Softplus(), nn.Dropout(0.1), nn.PReLU(),
        )  # fmt: skip
        self.scale = nn.Parameter(th.ones(features_dim))

    def forward(self, observations):
        return self.net(observations) * self.scale


@pytest.mark.parametrize("precision", PRESETS)
@pytest.mark.parametrize("share", [True, False])
def test_custom_extractors(precision, share):
    settings = {"features_extractor_class": Normalised, "share_features_extractor": share, "net_arch": [16]}
    model = train(environment(), precision=precision, policy_kwargs=settings)
    norm = model.policy.features_extractor.net[5]
    assert norm.running_mean.dtype == th.float32
    assert norm.running_mean.abs().sum() > 0
    assert list(model.policy.networks) == (["shared"] if share else ["policy", "value"])


class ShiftedPolicy(ActorCriticPolicy):
    """A user's policy that overrides what it means to act and to be evaluated."""

    def forward(self, obs, deterministic=False):
        actions, values, log_prob = super().forward(obs, deterministic)
        return actions, values + 7, log_prob

    def evaluate_actions(self, obs, actions):
        values, log_prob, entropy = super().evaluate_actions(obs, actions)
        return values + 7, log_prob, entropy


class WiderPolicy(ActorCriticPolicy):
    """A user's policy that only builds another network."""

    def __init__(self, *args, width=10, **kwargs):
        super().__init__(*args, net_arch=[width], **kwargs)


@pytest.mark.parametrize("precision", PRESETS)
def test_overridden_methods_are_honoured(precision):
    model = train(environment(), ShiftedPolicy, precision)
    assert (model.rollout_buffer.values > 3).all()
    assert "forward, evaluate_actions" in model.policy.absolute_because or precision == "fp32"
    assert model.rollout_buffer.log_probs is not None
    assert model.policy_class is ShiftedPolicy


def test_users_classes_that_change_only_the_network_keep_residuals():
    model = train(environment(), WiderPolicy, policy_kwargs={"width": 12})
    assert model.policy.absolute_because is None
    assert model.policy.action_net.in_features == 12


BY_CLASS = [(ActorCriticPolicy, "box"), (ActorCriticCnnPolicy, "image"), (MultiInputActorCriticPolicy, "dict")]


@pytest.mark.parametrize(("policy", "observation"), BY_CLASS)
def test_sb3s_classes_by_name_or_by_class(policy, observation):
    model = train(environment(observation), policy)
    assert model.policy_class is policy, "what was given stays in place"
    assert isinstance(model.policy, policy)


@pytest.mark.parametrize("precision", PRESETS)
def test_vector_wrappers(precision):
    normalised = VecNormalize(make_vec_env("Pendulum-v1", n_envs=3, seed=0))
    model = train(normalised, precision=precision)
    assert model.get_vec_normalize_env() is normalised
    stacked = VecFrameStack(DummyVecEnv([lambda: environment("image")] * 2), n_stack=3)
    model = train(stacked, "CnnPolicy", precision)
    assert model.rollout_buffer.observations.shape[2] == 3
    assert model.rollout_buffer.observations.dtype == np.uint8


def test_subprocesses():
    env = make_vec_env("Pendulum-v1", n_envs=2, seed=0, vec_env_cls=SubprocVecEnv)
    train(env)
    env.close()


def test_rollouts_smaller_than_a_minibatch():
    train(environment(), n_steps=8, batch_size=64)


def test_float64_actions_come_back_in_the_spaces_type():
    model = train(environment("box64", "box64"))
    assert model.predict(np.zeros(5))[0].dtype == np.float64
