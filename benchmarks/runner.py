"""Train one method on one task with one seed and evaluate it: what every learning benchmark is made of."""

import csv
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, CallbackList
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.timing import Row
from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.buffers import RolloutBufferFP16

RESULTS = Path(__file__).parent / "results"

# The paper's runs (Sec. 4), but for their learning rate, which falls linearly to 0 over the run: short runs keep it.
# What the paper does not state is SB3's default.
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


class Evaluations(BaseCallback):
    """
    Deterministic returns along a training run.

    :param env_id: task
    :param seed: of the evaluation environment
    :param every: environment steps between evaluations
    :param episodes: per evaluation
    """

    def __init__(self, env_id: str, seed: int, every: int, episodes: int) -> None:
        super().__init__()
        self.env = Monitor(gym.make(env_id))
        self.env.reset(seed=10_000 + seed)
        self.every, self.episodes = every, episodes
        self.points: list[tuple[int, float]] = []

    def evaluate(self) -> float:
        """Mean return of the model as it is, added to the curve."""
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
        """Return AUC: trapezoid over environment steps, divided by the horizon (paper Sec. 4.3)."""
        steps, returns = np.asarray(self.points).T
        return float(np.trapezoid(returns, steps) / steps[-1])


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


def run_missing(
    file: Path, columns: Sequence[str], wanted: Sequence[tuple[Any, ...]], run: Callable[..., Row], jobs: int | None
) -> list[Row]:
    """
    Runs that a results file lacks, each a row of it as soon as it has finished; those in it are not repeated.

    :param file: with one row per run
    :param columns: what names a run, the arguments of ``run``
    :param wanted: their values, in the order that runs start and rows are kept in
    :param run: gives a row; importable, as other processes call it
    :param jobs: processes; one per core by default
    :return: all rows
    """
    order = {tuple(map(str, values)): place for place, values in enumerate(wanted)}

    def place(row: Row) -> int:
        return order.get(tuple(str(row[column]) for column in columns), len(order))

    rows: list[Row] = list(read_csv(file))
    done = {place(row) for row in rows}
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as pool:
        missing = [pool.submit(run, *values) for number, values in enumerate(wanted) if number not in done]
        for finished in as_completed(missing):
            rows.append(finished.result())
            rows.sort(key=place)
            write_csv(file, rows)
            print(f"{len(rows)} of {len(wanted)} runs", flush=True)
    return rows


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


def versions() -> dict[str, str]:
    """What a results row must name to be reproducible."""
    packages = ("torch", "stable_baselines3", "mujoco")
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        **{package: version(package) if find_spec(package) else "" for package in packages},
    }


def _commit() -> str:
    """That of the working tree; a copy of one may be told by COMMIT."""
    if shutil.which("git") is None:
        return os.environ.get("COMMIT", "unknown")
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or os.environ.get("COMMIT", "unknown")


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """
    Write rows that share their keys, the file appearing whole or not at all.

    :param path: of the file
    :param rows: at least one
    """
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
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
