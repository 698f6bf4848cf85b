import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.logger import Logger

th.set_num_threads(1)

if os.environ.get("SB3_FP16_SANITIZE") == "1":  # make sanitize: with any other module the tests would prove nothing
    from sb3_fp16 import _cpu

    module = Path(_cpu.__file__).read_bytes()
    if not (b"__asan_init" in module and b"__ubsan_handle" in module):
        raise pytest.UsageError(f"{_cpu.__file__} is no sanitized build")


class Toy(gym.Env):
    """Random observations; the reward is the action's closeness to the first observation. Episodes of 20 steps."""

    def __init__(self, action_space=None, obs_dim=3, obs_scale=1.0, reward_scale=1.0, dtype=np.float32):
        self.observation_space = spaces.Box(-np.inf, np.inf, (obs_dim,), dtype)
        self.action_space = action_space or spaces.Box(-1, 1, (2,), np.float32)
        self.obs_scale, self.reward_scale, self.steps = obs_scale, reward_scale, 0

    def _observe(self):
        self.obs = self.np_random.normal(size=self.observation_space.shape) * self.obs_scale
        return self.obs.astype(self.observation_space.dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        self.steps += 1
        reward = -float(np.abs(np.mean(action) - self.obs.flat[0] / self.obs_scale)) * self.reward_scale
        return self._observe(), reward, False, self.steps >= 20, {}


@pytest.fixture
def toy():
    return Toy


class RecordingLogger(Logger):
    """Keeps every value it is given."""

    def __init__(self):
        super().__init__(None, [])
        self.values: dict[str, list] = {}

    def record(self, key, value, exclude=None):
        self.values.setdefault(key, []).append(value)


@pytest.fixture
def recorder():
    return RecordingLogger
