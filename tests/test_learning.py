"""It learns: one small task per action space must reach a threshold within a minute."""

import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import IdentityEnvMultiBinary, IdentityEnvMultiDiscrete
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_fp16 import PPOFP16

CARTPOLE = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3}
PENDULUM = {"n_steps": 512, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.9}
IDENTITY = {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "learning_rate": 1e-3, "gamma": 0.5}


def mean_return(env, precision, steps, settings, test_env=None):
    model = PPOFP16("MlpPolicy", env, precision=precision, seed=0, device="cpu", **settings)
    model.learn(steps)
    mean, _ = evaluate_policy(model, test_env or env, n_eval_episodes=10, warn=False)
    return mean


@pytest.mark.parametrize("precision", ["fp16", "paper", "bf16-sr"])
def test_discrete(precision):
    env, test_env = make_vec_env("CartPole-v1", n_envs=4, seed=0), make_vec_env("CartPole-v1", seed=9)
    assert mean_return(env, precision, 20_000, CARTPOLE, test_env) > 400


@pytest.mark.parametrize("precision", ["fp16", "paper"])
def test_box(precision):
    """A random policy has about -1200."""
    env, test_env = make_vec_env("Pendulum-v1", n_envs=8, seed=0), make_vec_env("Pendulum-v1", seed=9)
    assert mean_return(env, precision, 60_000, PENDULUM, test_env) > -400


@pytest.mark.parametrize("env_class", [IdentityEnvMultiDiscrete, IdentityEnvMultiBinary])
def test_several_choices(env_class):
    """One point per step for repeating the observation, 100 steps."""
    env = make_vec_env(lambda: env_class(), n_envs=4, seed=0)
    assert mean_return(env, "fp16", 8_000, IDENTITY) > 90
