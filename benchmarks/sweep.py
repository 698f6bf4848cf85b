"""
The sweep behind the ``fp16`` preset: one factor at a time, three tasks x 8 seeds x 204,800 steps per arm.

Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.sweep --jobs 2``
"""

import argparse
import base64
from dataclasses import replace
from itertools import product
from typing import NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.utils import LinearSchedule

from benchmarks.runner import PAPER_SETTINGS, RESULTS, Evaluations, make_model, run_missing, versions
from benchmarks.timing import Array, Row
from sb3_fp16 import Precision

ENVS = ("HalfCheetah-v5", "Walker2d-v5", "Hopper-v5")
SEEDS = tuple(range(8))
STEPS, EVERY, EPISODES = 204_800, 20_480, 5
PROBES = 32
PROBED_AT = (20_480, 102_400, 204_800)
FILE = RESULTS / "sweep.csv"


class Arm(NamedTuple):
    """
    What is compared.

    :param differs: from ``fp16``, in words
    :param precision: a preset, or ``fp16`` with one factor changed
    :param learning_rate: of Adam or SHARP at the start, annealed linearly to 0 as in the paper's runs
    """

    differs: str
    precision: str | Precision
    learning_rate: float = PAPER_SETTINGS["learning_rate"]


_FP16 = Precision.presets["fp16"]
_MASTERS = replace(
    _FP16, input_sharing="elementwise", hidden_sharing="elementwise", root_rounding="fp32", writeback="residual"
)

# In the order in which they run, those that could matter most first.
ARMS: dict[str, Arm] = {
    "fp32": Arm("FP32, torch's Adam", "fp32"),
    "fp16": Arm("the preset", "fp16"),
    "dithered": Arm("weights written back dithered", replace(_FP16, writeback="dithered")),
    "residual": Arm("every weight has an FP32 carry", replace(_FP16, writeback="residual")),
    "elementwise": Arm(
        "no shared second moment", replace(_FP16, input_sharing="elementwise", hidden_sharing="elementwise")
    ),
    "paper": Arm("the paper as written", "paper"),
    "masters": Arm("no sharing, FP32 second moment, FP32 carry", _MASTERS),
    "bf16": Arm("the paper in BF16", "bf16"),
    "bf16-sr": Arm("BF16, written back stochastically", "bf16-sr"),
    "bf16-lr": Arm("the paper in BF16, twice the learning rate", "bf16", 6e-4),
    "nearest": Arm("weights written back to nearest", replace(_FP16, writeback="nearest")),
    "row": Arm("rows share a second moment in every layer", replace(_FP16, input_sharing="row", hidden_sharing="row")),
    "elementwise-row": Arm(
        "no sharing at the input, rows elsewhere", replace(_FP16, input_sharing="elementwise", hidden_sharing="row")
    ),
    "root-nearest": Arm("second moment rounded to nearest", replace(_FP16, root_rounding="nearest")),
    "root-stochastic": Arm("second moment rounded stochastically", replace(_FP16, root_rounding="stochastic")),
    "root-fp32": Arm("second moment in FP32", replace(_FP16, root_rounding="fp32")),
}


class _Watch(BaseCallback):
    """
    What a run tells of itself: stuck updates, skipped steps, saturated values, and its policy now and then.

    :param probes: observations at which the policy is kept
    """

    def __init__(self, probes: Array) -> None:
        super().__init__()
        self.probes = probes
        self.logs: dict[str, list[float]] = {"stuck_fraction": [], "skipped_steps": [], "saturated": []}
        self.policies: list[Array] = []

    def _on_rollout_start(self) -> None:
        for name, values in self.logs.items():
            if f"train/{name}" in self.logger.name_to_value:
                values.append(float(self.logger.name_to_value[f"train/{name}"]))
        if self.num_timesteps in PROBED_AT:
            self._keep_policy()

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    @th.no_grad()
    def _keep_policy(self) -> None:
        model = cast(PPO, self.model)
        distribution = model.policy.get_distribution(th.as_tensor(self.probes, device=model.device))
        gaussian = cast(DiagGaussianDistribution, distribution).distribution
        self.policies.append(np.stack([gaussian.mean.float().numpy(), gaussian.stddev.log().float().numpy()]))

    def _on_step(self) -> bool:
        return True


def probes(env_id: str) -> Array:
    """
    Observations of random actions, at which policies are compared.

    :param env_id: task
    :return: FP32, shape (PROBES, observation dimensions)
    """
    env = gym.make(env_id)
    env.action_space.seed(0)
    observations = [env.reset(seed=0)[0]]
    while len(observations) < 8 * PROBES:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        observations.append(env.reset()[0] if terminated or truncated else observation)
    return np.asarray(observations[::8], dtype=np.float32)


def pack(policies: list[Array]) -> str:
    """
    Policies as text.

    :param policies: means and log standard deviations, shape (2, PROBES, action dimensions), per time of PROBED_AT
    """
    return base64.b64encode(np.asarray(policies, dtype="<f2").tobytes()).decode()


def unpack(text: str) -> Array:
    """
    What ``pack`` was given.

    :param text: from it
    :return: FP64, shape (times, 2, PROBES, action dimensions)
    """
    return np.frombuffer(base64.b64decode(text), "<f2").astype(float).reshape(len(PROBED_AT), 2, PROBES, -1)


def run(env_id: str, arm: str, seed: int) -> Row:
    """One training run as one row."""
    th.set_num_threads(1)
    settings = PAPER_SETTINGS | {"learning_rate": LinearSchedule(ARMS[arm].learning_rate, 0.0, 1.0)}
    model = make_model(ARMS[arm].precision, env_id, seed, **settings)
    watch, evaluations = _Watch(probes(env_id)), Evaluations(env_id, seed, EVERY, EPISODES)
    model.learn(STEPS, callback=[watch, evaluations])
    stuck, skipped, saturated = watch.logs.values()
    return {
        "env": env_id,
        "arm": arm,
        "seed": seed,
        "steps": STEPS,
        "return_auc": round(evaluations.area_under_curve(), 2),
        "final_return": round(evaluations.points[-1][1], 2),
        "stuck_fraction": round(float(np.mean(stuck)), 4),
        "stuck_fraction_late": round(float(np.mean(stuck[-10:-1])), 4),  # the last learning rate is 0
        "skipped_steps": int(sum(skipped)),
        "saturated": int(sum(saturated)),
        "curve": " ".join(f"{step}:{value:.1f}" for step, value in evaluations.points),
        "policies": pack(watch.policies),
        **versions(),
    }


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="runs at a time; one per core by default")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="all by default")
    arguments = parser.parse_args()
    wanted = [(env, arm, seed) for arm, seed, env in product(arguments.arms, SEEDS, ENVS)]
    run_missing(FILE, ("env", "arm", "seed"), wanted, run, arguments.jobs)


if __name__ == "__main__":
    main()
