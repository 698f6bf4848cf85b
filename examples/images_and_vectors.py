"""
A dictionary of an image and a vector: images are stored as bytes, convolutions run on FP16 weights.

The image shows where the target is, the vector where the agent is; the reward is their closeness.
``python examples/images_and_vectors.py [--steps 20000]``
"""

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from sb3_fp16 import PPOFP16

SIZE = 36  # the least that SB3's NatureCNN reads
Observation = dict[str, np.ndarray[Any, Any]]


class FindTheTarget(gym.Env[Any, np.int64]):
    """Move left, stay or move right on a line of SIZE points; episodes of 50 steps."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (1, SIZE, SIZE), np.uint8), "position": spaces.Box(0, 1, (1,), np.float32)}
    )
    action_space = spaces.Discrete(3)

    def _observe(self) -> Observation:
        image = np.zeros((1, SIZE, SIZE), np.uint8)
        image[0, :, max(0, self.target - 2) : self.target + 3] = 255
        return {"image": image, "position": np.array([self.position / (SIZE - 1)], np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Any]:
        """Put agent and target anywhere."""
        super().reset(seed=seed)
        self.steps = 0
        self.position, self.target = (int(x) for x in self.np_random.integers(0, SIZE, 2))
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, Any]:
        """Move by up to two points."""
        self.steps += 1
        self.position = int(np.clip(self.position + 2 * (int(action) - 1), 0, SIZE - 1))
        return self._observe(), 1 - abs(self.position - self.target) / SIZE, False, self.steps >= 50, {}


def main() -> None:
    """Train and show the last returns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    steps = parser.parse_args().steps
    env = make_vec_env(FindTheTarget, n_envs=4, seed=0)
    model = PPOFP16("MultiInputPolicy", env, n_steps=128, batch_size=128, n_epochs=4, verbose=1, seed=0, device="cpu")
    model.learn(steps)
    returns = [float(episode["r"]) for episode in model.ep_info_buffer or ()]
    print(f"mean return of the last {len(returns)} episodes: {np.mean(returns):.1f} of at most 50")


if __name__ == "__main__":
    main()
