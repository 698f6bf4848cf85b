"""Times of several things in one process, one core, in turn: what every speed benchmark is made of."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

Row = dict[str, Any]
Array = np.ndarray[Any, np.dtype[Any]]
Work = Callable[[], object]
Result = TypeVar("Result")


def use_one_core() -> None:
    """One thread of torch, and one core for whatever else: XLA's own settings leave it more."""
    th.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def in_new_process(work: Callable[..., Result], *arguments: Any) -> Result:
    """
    What work returns, done in a process that has done nothing else.

    :param work: a function of a module
    :param arguments: of it
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def in_turn(works: Iterable[Work], repeats: int) -> Array:
    """
    Seconds that each piece of work takes, all in turn, so that a machine that slows down slows down all of them.

    :param works: to be done
    :param repeats: of all
    :return: shape (repeats, works)
    """

    def seconds(work: Work) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    works = list(works)
    return np.array([[seconds(work) for work in works] for _ in range(repeats)])


def spread(name: str, values: Array) -> Row:
    """
    Median, minimum and maximum as columns, to four digits.

    :param name: that the columns start with
    :param values: one per repeat
    """
    numbers = {"median": np.median(values), "min": values.min(), "max": values.max()}
    return {f"{name}_{which}": float(f"{number:.4g}") for which, number in numbers.items()}


def collected(model: PPO) -> PPO:
    """
    The model after one rollout and one update, which warm it up; the rollout is still there.

    :param model: untrained
    """
    return model.learn(model.n_steps * model.n_envs)


def go_on(model: PPO, steps: int) -> None:
    """
    Train as a user does.

    :param model: from ``collected``
    :param steps: of the environments, all together
    """
    model.learn(steps, reset_num_timesteps=False)


def stepping(env_id: str, n_envs: int, steps: int) -> Work:
    """
    What the environments cost without PPO: SB3's DummyVecEnv and Monitor under the actions of an untrained policy.

    :param env_id: task
    :param n_envs: environments in the DummyVecEnv
    :param steps: of each
    """
    env = make_vec_env(env_id, n_envs, seed=0)
    space = env.action_space
    assert isinstance(space, spaces.Box)
    noise = np.random.default_rng(0).normal(size=(steps, n_envs, *space.shape)).astype(space.dtype)
    env.reset()
    return partial(_step_through, env, np.clip(noise, space.low, space.high))


def _step_through(env: VecEnv, actions: Array) -> None:
    for action in actions:
        env.step(action)


def cells(row: Mapping[str, Any], name: str, digits: int) -> str:
    """
    Two cells of a Markdown table: median, and minimum to maximum.

    :param row: of a results file
    :param name: that ``spread``'s columns start with
    :param digits: after the point
    """
    median, low, high = (f"{float(row[f'{name}_{which}']):.{digits}f}" for which in ("median", "min", "max"))
    return f"{median} | {low} to {high}"
