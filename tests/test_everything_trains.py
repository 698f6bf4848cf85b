"""Whatever runs with SB3's PPO: policies, spaces, extractors and wrappers, each trained for two updates."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize
from torch import nn

from sb3_fp16 import PPOFP16, SHARP

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


@pytest.mark.parametrize("precision", ["e5m9", "e5m7", "e5m5", "bf16"])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
def test_formats_on_odd_action_sizes(precision, shape):
    env = Anything(OBSERVATIONS["box"](), spaces.Box(-1, 1, shape))
    train(env, precision=precision, moved=0.02)
    train(env, precision=precision, moved=0.02, use_sde=True)


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "clip_range_vf"])
@pytest.mark.parametrize("precision", PRESETS)
def test_linear_schedules_end_at_zero(precision, name):
    """The last rollout overshoots total_timesteps, and SB3's progress would go below 0."""
    schedule = {name: lambda progress: 1e-3 * progress}
    model = PPOFP16("MlpPolicy", environment(), n_steps=64, device="cpu", precision=precision, **schedule)
    model.learn(100)
    assert model.num_timesteps == 128


class SharedNet(nn.Module):
    """All that SB3 asks of an mlp_extractor."""

    def __init__(self, features):
        super().__init__()
        self.latent_dim_pi = self.latent_dim_vf = 32
        self.shared = nn.Sequential(nn.Linear(features, 32), nn.ReLU())

    def forward(self, x):
        hidden = self.shared(x)
        return hidden, hidden

    def forward_actor(self, x):
        return self.shared(x)

    forward_critic = forward_actor


class SharedPolicy(ActorCriticPolicy):
    def _build_mlp_extractor(self):
        self.mlp_extractor = SharedNet(self.features_dim)


class OwnDistribution(DiagGaussianDistribution):
    pass


class DistributionPolicy(ActorCriticPolicy):
    def _build(self, lr_schedule):
        self.action_dist = OwnDistribution(2)
        super()._build(lr_schedule)


class LateDistributionPolicy(ActorCriticPolicy):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.action_dist = OwnDistribution(2)


class LateHeadPolicy(ActorCriticPolicy):
    """Replaces a network and the optimizer after SB3's constructor."""

    def __init__(self, observation_space, action_space, lr_schedule, *args, **kwargs):
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)
        self.value_net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class GroupsPolicy(ActorCriticPolicy):
    def _build(self, lr_schedule):
        super()._build(lr_schedule)
        parameters = list(self.parameters())
        groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 1e-4}]
        self.optimizer = self.optimizer_class(groups, lr=lr_schedule(1))


@pytest.mark.parametrize("precision", [*PRESETS, "amp-fp16", "bf16-sr"])
@pytest.mark.parametrize(
    "policy", [SharedPolicy, DistributionPolicy, LateDistributionPolicy, LateHeadPolicy, GroupsPolicy]
)
def test_users_policies_of_many_kinds(policy, precision):
    model = train(environment(), policy, precision)
    if precision == "fp16":
        assert isinstance(model.policy.optimizer, SHARP)
        own = policy in (DistributionPolicy, LateDistributionPolicy)
        assert (model.policy.absolute_because is not None) == own
        assert ("shared" in model.policy.networks) == (policy is SharedPolicy)


class Attention(BaseFeaturesExtractor):
    """Layers that use the parameters of others, and a weight that is computed."""

    def __init__(self, observation_space, features_dim=8):
        super().__init__(observation_space, features_dim)
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(5, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, observations):
        x = self.first(observations).unsqueeze(1)
        return self.block(self.attention(x, x, x)[0]).squeeze(1)


@pytest.mark.parametrize("precision", [*PRESETS, "bf16-sr", "amp-fp16", "amp-bf16", "amp-bf16-sr"])
def test_attention(precision):
    train(environment(), precision=precision, policy_kwargs={"features_extractor_class": Attention})


def test_settings_of_adam_that_sharp_has_and_has_not():
    train(environment(), policy_kwargs={"optimizer_kwargs": {"foreach": False, "amsgrad": False, "eps": 1e-5}})
    with pytest.raises(ValueError, match="no amsgrad"):
        train(environment(), policy_kwargs={"optimizer_kwargs": {"amsgrad": True}})


class MaskedPolicy(ActorCriticPolicy):
    """Forbids the first action."""

    def _get_action_dist_from_latent(self, latent_pi):
        logits = self.action_net(latent_pi)
        mask = th.zeros_like(logits, dtype=th.bool)
        mask[:, 0] = True
        return self.action_dist.proba_distribution(logits.masked_fill(mask, -th.inf))


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16-sr"])
def test_masked_logits(precision):
    model = train(environment(action="discrete"), MaskedPolicy, precision, ent_coef=0.0, moved=0.1)
    assert (model.rollout_buffer.actions != 0).all()
