"""Train one method on one task with one seed and evaluate it: what every learning benchmark is made of."""

import csv
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.timing import Array, Row
from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.buffers import RolloutBufferFP16

RESULTS = Path(__file__).parent / "results"

# The paper's runs (Sec. 4), but for their learning rate, which falls linearly to 0 over the run (``annealed``): short
# runs keep it. What the paper does not state is SB3's default.
PAPER_SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "n_steps": 2048,
    "batch_size": 64,
    "n_epochs": 10,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "max_grad_norm": 0.5,
}


def annealed(learning_rate: float = PAPER_SETTINGS["learning_rate"], part: float = 1.0) -> dict[str, Any]:
    """
    The paper's settings with their linear annealing.

    :param learning_rate: at the start
    :param part: of the run over which it would fall to 0, that is run
    """
    return PAPER_SETTINGS | {"learning_rate": LinearSchedule(learning_rate, (1 - part) * learning_rate, 1.0)}


class Evaluations(BaseCallback):
    """
    Deterministic returns along a training run.

    The n-th evaluation of a seed starts in the same states whatever is evaluated.

    :param env_id: task
    :param seed: of the run
    :param every: environment steps between evaluations
    :param episodes: per evaluation, side by side, each in an environment of its own
    """

    def __init__(self, env_id: str, seed: int, every: int, episodes: int) -> None:
        super().__init__()
        self.env = make_vec_env(env_id, episodes)
        self.seed, self.every, self.episodes = seed, every, episodes
        self.points: list[tuple[int, float]] = []

    def evaluate(self) -> float:
        """Mean return of the model as it is, added to the curve."""
        self.env.seed(10_000 * (1 + self.seed) + 100 * len(self.points))  # apart from each other and from training's
        mean, _ = evaluate_policy(cast(PPO, self.model), self.env, n_eval_episodes=self.episodes, warn=False)
        self.points.append((self.num_timesteps, float(cast(float, mean))))
        return self.points[-1][1]

    def _on_rollout_start(self) -> None:
        if self.num_timesteps >= self.every * len(self.points):
            self.evaluate()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        self.evaluate()

    def area_under_curve(self) -> float:
        """Return AUC: trapezoid over environment steps, divided by the horizon (paper Sec. 4.3); NaN of one point."""
        if len(self.points) < 2:
            return float("nan")
        steps, returns = np.asarray(self.points).T
        return float(np.trapezoid(returns, steps) / steps[-1])

    def columns(self) -> Row:
        """What a results row keeps of them."""
        return {
            "return_auc": round(self.area_under_curve(), 2),
            "final_return": round(self.points[-1][1], 2) if self.points else float("nan"),
            "curve": " ".join(f"{step}:{value:.1f}" for step, value in self.points),
        }


def curve_of(row: Mapping[str, Any]) -> Array:
    """
    Evaluations along a run.

    :param row: with the columns of ``Evaluations``
    :return: environment steps and returns, FP64, shape (2, evaluations)
    """
    steps, returns = zip(*(point.split(":") for point in row["curve"].split()), strict=True)
    return np.array([steps, returns], dtype=float)


class UpdateLogs(BaseCallback):
    """Stuck updates, skipped steps and saturated values of each update; SB3's PPO logs none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {"stuck_fraction": [], "skipped_steps": [], "saturated": []}

    def _on_rollout_start(self) -> None:
        for name, values in self.values.items():
            if f"train/{name}" in self.logger.name_to_value:
                values.append(float(self.logger.name_to_value[f"train/{name}"]))

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _on_step(self) -> bool:
        return True

    def columns(self) -> Row:
        """What a results row keeps of them."""
        stuck = self.values["stuck_fraction"]
        return {
            "stuck_fraction": round(float(np.mean(stuck)), 4) if stuck else float("nan"),
            "skipped_steps": int(sum(self.values["skipped_steps"])),
            "saturated": int(sum(self.values["saturated"])),
        }


class UpdateTimes(BaseCallback):
    """Seconds of each ``train()``: from the end of a rollout to the start of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._rollout_ended = 0.0

    def _on_rollout_start(self) -> None:
        if self._rollout_ended:
            self.seconds.append(time.perf_counter() - self._rollout_ended)

    def _on_rollout_end(self) -> None:
        self._rollout_ended = time.perf_counter()

    def _on_step(self) -> bool:
        return True


def make_model(method: str | Precision, env: str | VecEnv, seed: int, **settings: Any) -> PPO:
    """
    An untrained model.

    :param method: ``sb3`` for SB3's own PPO, else the precision of PPOFP16, a preset's name or its definition
    :param env: task, or environments of it
    :param seed: of the run
    :param settings: PPO's arguments
    """
    settings = {"device": "cpu", **settings}
    if method == "sb3":
        return PPO("MlpPolicy", env, seed=seed, **settings)
    return PPOFP16("MlpPolicy", env, seed=seed, precision=method, **settings)


def train(
    model: PPO, env_id: str, seed: int, steps: int, every: int, episodes: int = 5, progress_bar: bool = False
) -> tuple[Evaluations, UpdateTimes]:
    """
    Train a model, on one thread, evaluating it along the way.

    :param model: from ``make_model``
    :param env_id: its task
    :param seed: of its run
    :param steps: environment steps
    :param every: environment steps between evaluations
    :param episodes: per evaluation
    :param progress_bar: show one
    """
    th.set_num_threads(1)
    times, evaluations = UpdateTimes(), Evaluations(env_id, seed, every, episodes)
    model.learn(steps, callback=CallbackList([times, evaluations]), progress_bar=progress_bar)
    return evaluations, times


def pyplot() -> Any:
    """Matplotlib without a screen, imported where a picture is drawn."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def state_bytes(model: PPO) -> dict[str, int]:
    """
    Bytes of the training state of any PPO, counted on its tensors and arrays.

    :param model: after at least one update
    """
    parameters = list(model.policy.parameters())
    moments = [value for state in model.policy.optimizer.state.values() for value in state.values()]
    buffer = model.rollout_buffer
    arrays = buffer.arrays() if isinstance(buffer, RolloutBufferFP16) else vars(buffer)
    return {
        "parameters": sum(parameter.nbytes for parameter in parameters),
        "gradients": sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        "optimizer state": sum(moment.nbytes for moment in moments),
        "rollout": sum(array.nbytes for array in arrays.values() if isinstance(array, np.ndarray)),
    }


def _commit() -> str:
    """That of the working tree, and whether its code differs from it; a copy of one may be told by COMMIT."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(RESULTS.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD") if shutil.which("git") else None
    if head is None or head.returncode:
        return os.environ.get("COMMIT", "unknown")
    differs = git("diff", "--quiet", "HEAD", "--", ":/", ":(exclude,top)benchmarks/results", ":(exclude,top)docs")
    return head.stdout.strip() + ("-modified" if differs.returncode else "")


COMMIT = _commit()
"""Of the code that was imported: the checkout may go on while runs last."""


def versions() -> dict[str, str]:
    """What a results row must name to be reproducible."""
    packages = ("torch", "stable_baselines3", "mujoco", "gymnasium", "numpy")
    return {
        "commit": COMMIT,
        "python": platform.python_version(),
        **{package: version(package) if find_spec(package) else "" for package in packages},
    }


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """
    Write rows, the file appearing whole or not at all; what a row lacks of the others' columns is empty.

    :param path: of the file
    :param rows: at least one
    """
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def read_csv(path: Path) -> list[dict[str, str]]:
    """
    Rows of a results file; none if there is none.

    :param path: of the file
    """
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
