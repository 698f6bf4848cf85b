"""
What PPOFP16 costs on a CPU beside SB3's PPO and beside a whole update in JAX: one process, one core, methods in turn.

Each part writes its results file when it is done. ``python -m benchmarks.cpu [--only update,tasks] [--repeats 9]``;
the JAX rows need ``pip install .[bench]``, the memory part Linux.
"""

import argparse
import ctypes
import gc
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.runner import RESULTS, make_model, read_csv, versions, write_csv
from benchmarks.timing import (
    Array,
    Row,
    Work,
    cells,
    collected,
    go_on,
    in_new_process,
    in_turn,
    spread,
    stepping,
    use_one_core,
)
from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.engines.eager import EagerEngine

Rows = Sequence[Mapping[str, Any]]

ENV = "HalfCheetah-v5"
TASKS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5", "Swimmer-v5")
ROLLOUT = 2048  # SB3's default, in all environments together
NAMES = {"sb3": "SB3's PPO", "fp32": "PPOFP16 `fp32`", "fp16": "PPOFP16 `fp16`", "env": "environment alone"}


# Update: SB3's train() at its defaults


def native_models() -> dict[str, PPO]:
    """A model of each preset that the native engine serves."""
    models = {name: make_model(name, ENV, seed=0) for name in Precision.presets}
    return {name: m for name, m in models.items() if isinstance(m, PPOFP16) and m.engine.name == "native"}


def eager_model(precision: str) -> PPO:
    """A model whose updates run on the reference."""
    model = make_model(precision, ENV, seed=0)
    assert isinstance(model, PPOFP16)
    model.use_engine(EagerEngine(model.policy, model.batch_size))
    return model


def jax_updates(model: PPO) -> dict[tuple[str, str], Work]:
    """
    The same updates in JAX, compiled; none where it is not installed.

    :param model: SB3's, with its rollout
    """
    if find_spec("jax") is None:
        print("jax is not installed: its rows are left out")
        return {}
    from benchmarks.jax_peer import JaxUpdate

    peers = {("jax", "fp32"): JaxUpdate(model).train, ("jax", "fp16"): JaxUpdate(model, half=True).train}
    for train in peers.values():
        train()
    return dict(peers)


def update(repeats: int) -> list[Row]:
    """One row per engine and method."""
    sb3 = collected(make_model("sb3", ENV, seed=0))
    works: dict[tuple[str, str], Work] = {("", "sb3"): sb3.train}
    works |= {("eager", name): collected(eager_model(name)).train for name in ("fp32", "fp16", "paper")}
    works |= {("native", name): collected(model).train for name, model in native_models().items()}
    works |= jax_updates(sb3)
    seconds = in_turn(works.values(), repeats)
    minibatches = sb3.n_epochs * ROLLOUT / sb3.batch_size
    return [
        {
            "engine": engine,
            "method": method,
            **spread("us_per_minibatch", 1e6 * seconds[:, i] / minibatches),
            **spread("ratio_to_sb3", seconds[:, i] / seconds[:, 0]),
            "repeats": repeats,
            **versions(),
            "jax": version("jax") if find_spec("jax") else "",
        }
        for i, (engine, method) in enumerate(works)
    ]


def update_table(rows: Rows) -> str:
    """Ratios to SB3 as Markdown; absolute times belong to one machine and stay in the results file."""
    lines = ["| engine | method | time / SB3's, median | min to max | times as fast |", "|---|---|---:|---:|---:|"]
    for row in rows:
        lines.append(f"| {row['engine']} | `{row['method']}` | {_to_sb3(row)} |")
    return "\n".join(lines)


def _to_sb3(row: Mapping[str, Any]) -> str:
    return f"{cells(row, 'ratio_to_sb3', 3)} | {1 / float(row['ratio_to_sb3_median']):.2f}"


# End to end: learn() with SB3's DummyVecEnv and Monitor


def end_to_end(repeats: int) -> list[Row]:
    """One row per method and one for the environment; three rollouts and updates per repeat."""
    steps = 3 * ROLLOUT
    methods = ("sb3", "fp32", "fp16")
    works: list[Work] = [partial(go_on, collected(make_model(method, ENV, seed=0)), steps) for method in methods]
    seconds = in_turn([*works, stepping(ENV, 1, steps)], repeats)
    return [
        {
            "env": ENV,
            "method": method,
            "steps": steps,
            **spread("us_per_step", 1e6 * seconds[:, i] / steps),
            **spread("ratio_to_sb3", seconds[:, i] / seconds[:, 0]),
            "repeats": repeats,
            **versions(),
        }
        for i, method in enumerate((*methods, "env"))
    ]


def end_to_end_table(rows: Rows) -> str:
    """Ratios to SB3 as Markdown."""
    lines = ["| what | time per step / SB3's, median | min to max | times as fast |", "|---|---:|---:|---:|"]
    lines += [f"| {NAMES[row['method']]} | {_to_sb3(row)} |" for row in rows]
    return "\n".join(lines)


# Tasks: where an environment step's time goes


def tasks(repeats: int) -> list[Row]:
    """
    One row per task and number of environments, in microseconds per step of one environment.

    The learning rate is 0, so that episodes stay as short as under the random actions that the environment alone gets.
    """
    cases = [(task, 1) for task in TASKS] + [(ENV, n_envs) for n_envs in (4, 16, 64)]
    works: list[Work] = []
    for task, n_envs in cases:
        env = make_vec_env(task, n_envs, seed=0)
        model = collected(make_model("fp16", env, seed=0, n_steps=ROLLOUT // n_envs, learning_rate=0.0))
        works += [partial(go_on, model, ROLLOUT), stepping(task, n_envs, ROLLOUT // n_envs), model.train]
    times = 1e6 / ROLLOUT * in_turn(works, repeats).reshape(repeats, len(cases), 3)
    return [
        {
            "env": task,
            "n_envs": n_envs,
            **spread("total_us", times[:, i, 0]),
            **spread("env_us", times[:, i, 1]),
            **spread("update_us", times[:, i, 2]),
            **spread("left_us", times[:, i, 0] - times[:, i, 1] - times[:, i, 2]),
            "repeats": repeats,
            **versions(),
        }
        for i, (task, n_envs) in enumerate(cases)
    ]


def tasks_table(rows: Rows) -> str:
    """Microseconds as Markdown, as what is left is no ratio of anything."""
    lines = ["| task | envs | whole step | environment | update | left | min to max | left per call of the VecEnv |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        parts = " | ".join(f"{float(row[f'{part}_us_median']):.1f}" for part in ("total", "env", "update"))
        per_call = float(row["left_us_median"]) * int(row["n_envs"])
        lines.append(f"| {row['env']} | {row['n_envs']} | {parts} | {cells(row, 'left_us', 1)} | {per_call:.0f} |")
    return "\n".join(lines)


# Widths: FP16 against FP32 where products and where memory set the time

# width, batch size, n_steps, n_epochs: fewer minibatches for larger networks.
SHAPES = (
    (64, 64, 2048, 10),
    (256, 64, 2048, 2),
    (1024, 64, 1024, 1),
    (64, 2, 128, 5),
    (256, 2, 128, 1),
    (1024, 2, 64, 1),
)


def widths(repeats: int) -> list[Row]:
    """One row per width, batch size and precision."""
    cases = list(product(SHAPES, ("fp32", "fp16")))
    models = [collected(_model_of(method, *shape)) for shape, method in cases]
    seconds = in_turn([model.train for model in models], repeats)
    rows = []
    for i, ((width, batch, n_steps, n_epochs), method) in enumerate(cases):
        minibatches = n_epochs * n_steps // batch
        fp32 = seconds[:, i - i % 2]
        row = {"width": width, "batch_size": batch, "method": method, "minibatches": minibatches}
        row |= spread("us_per_minibatch", 1e6 * seconds[:, i] / minibatches)
        row |= spread("ratio_to_fp32", seconds[:, i] / fp32)
        rows.append({**row, "repeats": repeats, **versions()})
    return rows


def _model_of(method: str, width: int, batch_size: int, n_steps: int, n_epochs: int) -> PPO:
    settings = {"batch_size": batch_size, "n_steps": n_steps, "n_epochs": n_epochs}
    return make_model(method, ENV, seed=0, policy_kwargs={"net_arch": [width, width]}, **settings)


def widths_table(rows: Rows) -> str:
    """FP16 against FP32, and minibatches of 2 against minibatches of 64, as Markdown."""
    by_case = {(row["width"], row["batch_size"], row["method"]): row for row in rows}

    def share(width: str, method: str) -> str:
        small, large = (float(by_case[width, batch, method]["us_per_minibatch_median"]) for batch in ("2", "64"))
        return f"{100 * small / large:.0f} %"

    lines = ["| width | `fp16` / `fp32`, batch 64 | min to max | batch 2 | min to max | 2 / 64, `fp32` | `fp16` |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|")
    for width in dict.fromkeys(row["width"] for row in rows):
        ratios = [cells(by_case[width, batch, "fp16"], "ratio_to_fp32", 2) for batch in ("64", "2")]
        lines.append(f"| {width} | {' | '.join([*ratios, share(width, 'fp32'), share(width, 'fp16')])} |")
    return "\n".join(lines)


# Scaling: batch size and epochs

BATCHES, EPOCHS = (32, 64, 128, 256, 512), (5, 10, 20)


def scaling(repeats: int) -> list[Row]:
    """One row per method, batch size and number of epochs, all on the same number of samples per epoch."""
    shapes = [(batch, 10) for batch in BATCHES] + [(64, epochs) for epochs in EPOCHS if epochs != 10]
    cases = list(product(("sb3", "fp32", "fp16"), shapes))
    models = {method: collected(make_model(method, ENV, seed=0)) for method in ("sb3", "fp32", "fp16")}
    seconds = in_turn([partial(_train_with, models[method], *shape) for method, shape in cases], repeats)
    return [
        {
            "method": method,
            "batch_size": batch,
            "n_epochs": epochs,
            **spread("ms", 1e3 * seconds[:, i]),
            "repeats": repeats,
            **versions(),
        }
        for i, (method, (batch, epochs)) in enumerate(cases)
    ]


def _train_with(model: PPO, batch_size: int, n_epochs: int) -> None:
    model.batch_size, model.n_epochs = batch_size, n_epochs
    model.train()


def scaling_table(rows: Rows) -> str:
    """A straight line through a minibatch's time over its size, and an update's time over its epochs, as Markdown."""
    lines = ["| method | time of a minibatch of B | off that line by at most | 5 and 20 epochs / 10 epochs |"]
    lines.append("|---|---|---:|---:|")
    for method in dict.fromkeys(row["method"] for row in rows):
        ms = {(int(r["batch_size"]), int(r["n_epochs"])): float(r["ms_median"]) for r in rows if r["method"] == method}
        per_minibatch = np.array([ms[batch, 10] * batch for batch in BATCHES])
        slope, start, error = line_through(BATCHES, per_minibatch)
        epochs = " and ".join(f"{ms[64, n] / ms[64, 10]:.2f}" for n in EPOCHS if n != 10)
        lines.append(f"| {NAMES[method]} | ∝ B + {start / slope:.0f} | {100 * error:.1f} % | {epochs} |")
    return "\n".join(lines)


def line_through(x: Sequence[float], y: Array) -> tuple[float, float, float]:
    """
    The straight line with the least squares of relative deviations.

    :param x: abscissae
    :param y: positive ordinates
    :return: slope, value at 0, and the largest relative deviation
    """
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    return float(slope), float(start), float(np.abs((slope * np.asarray(x) + start) / y - 1).max())


# Memory: the peak of the first update, with the optimizer's state that it makes


def memory(repeats: int) -> list[Row]:
    """One row per width and method, each repeat in a process of its own."""
    repeats, rows = min(repeats, 3), []
    for width, method in product((64, 1024), ("sb3", "fp32", "fp16")):
        runs = [in_new_process(peak_of_one_update, method, width) for _ in range(repeats)]
        growth, peak = np.array(runs).T
        row = {"width": width, "method": method, **spread("growth_mib", growth), **spread("peak_mib", peak)}
        rows.append({**row, "repeats": repeats, **versions()})
    return rows


def peak_of_one_update(method: str, width: int) -> tuple[float, float]:
    """
    Largest resident memory during an update on a rollout of 512 steps: above what was there before, and in all; MiB.

    :param method: ``sb3`` or a precision
    :param width: of both hidden layers
    """
    use_one_core()
    collected(make_model(method, ENV, seed=0, n_steps=64, policy_kwargs={"net_arch": [8, 8]}))  # loads all code
    model = make_model(method, ENV, seed=0, n_steps=512, n_epochs=1, policy_kwargs={"net_arch": [width, width]})
    vars(model)["train"] = lambda: None
    collected(model)
    del vars(model)["train"]
    return peak_of(model.train), _status_mib("VmHWM")


def peak_of(work: Work) -> float:
    """
    Largest resident memory during a piece of work, above what was there before, MiB.

    :param work: to be done
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free inside the process would hide what the work needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status_mib("VmRSS")
    work()
    return _status_mib("VmHWM") - before


def _status_mib(name: str) -> float:
    """Of this process. Not getrusage's ru_maxrss: a new process inherits that of the one that started it."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def memory_table(rows: Rows) -> str:
    """MiB and ratios to SB3 as Markdown."""
    lines = ["| width | method | peak of an update, MiB | min to max | / SB3's |", "|---:|---|---:|---:|---:|"]
    sb3 = {row["width"]: float(row["growth_mib_median"]) for row in rows if row["method"] == "sb3"}
    for row in rows:
        ratio = float(row["growth_mib_median"]) / sb3[row["width"]]
        lines.append(f"| {row['width']} | {NAMES[row['method']]} | {cells(row, 'growth_mib', 2)} | {ratio:.2f} |")
    return "\n".join(lines)


# Floor: the time that an update's matrix products alone would take at the core's best


def floor(repeats: int) -> list[Row]:
    """What each method makes of the core: products of an update per second, beside a large product of torch's."""
    sb3 = collected(make_model("sb3", ENV, seed=0))
    weights = [p.numel() for p in sb3.policy.parameters() if p.ndim == 2]
    observations = sb3.policy.observation_space.shape
    assert observations is not None
    # Forward, gradient of the weights, and of the layer below, which the two first layers have no need of.
    per_sample = 2 * (3 * sum(weights) - 2 * observations[0] * sb3.policy.net_arch["pi"][0])  # type: ignore[call-overload]
    size, samples = 1024, ROLLOUT * sb3.n_epochs
    a, b = th.randn(size, size), th.randn(size, size)
    models = {name: collected(make_model(name, ENV, seed=0)) for name in ("fp32", "fp16")}
    works: dict[str, Work] = {"torch.mm": partial(th.mm, a, b)}
    works |= {f"native {name}": model.train for name, model in models.items()}
    works |= {f"{engine} {name}": train for (engine, name), train in jax_updates(sb3).items()}
    operations = [2.0 * size**3, *[float(per_sample * samples)] * (len(works) - 1)]
    rates = np.array(operations) / in_turn(works.values(), repeats) / 1e9
    return [
        {
            "method": method,
            **spread("gflops", rates[:, i]),
            **spread("share_of_best", rates[:, i] / rates[:, 0]),
            "repeats": repeats,
            **versions(),
        }
        for i, method in enumerate(works)
    ]


def floor_table(rows: Rows) -> str:
    """Shares of the best rate as Markdown."""
    lines = ["| what | products per second / `torch.mm`'s, median | min to max |", "|---|---:|---:|"]
    lines += [f"| {row['method']} | {cells(row, 'share_of_best', 2)} |" for row in rows]
    return "\n".join(lines)


class Part(NamedTuple):
    """
    One results file and one table.

    :param measure: rows from a number of repeats
    :param table: Markdown from the rows of the file
    :param file: where they are kept
    """

    measure: Callable[[int], list[Row]]
    table: Callable[[Rows], str]
    file: Path


PARTS = {
    "update": Part(update, update_table, RESULTS / "cpu_update.csv"),
    "end_to_end": Part(end_to_end, end_to_end_table, RESULTS / "cpu_end_to_end.csv"),
    "tasks": Part(tasks, tasks_table, RESULTS / "cpu_tasks.csv"),
    "widths": Part(widths, widths_table, RESULTS / "cpu_widths.csv"),
    "scaling": Part(scaling, scaling_table, RESULTS / "cpu_scaling.csv"),
    "memory": Part(memory, memory_table, RESULTS / "cpu_memory.csv"),
    "floor": Part(floor, floor_table, RESULTS / "cpu_floor.csv"),
}


def main() -> None:
    """Measure what is asked for, write each part's rows, print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="of %(default)s; separated by commas")
    parser.add_argument("--repeats", type=int, default=9, help="of each measurement")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    use_one_core()
    for name in names:
        part, start = PARTS[name], time.perf_counter()
        write_csv(part.file, part.measure(arguments.repeats))
        print(f"{name}, {time.perf_counter() - start:.0f} s\n{part.table(read_csv(part.file))}\n", flush=True)


if __name__ == "__main__":
    main()
