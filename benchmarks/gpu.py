"""
What a complete update costs on a GPU, and what memory it takes (paper Sec. 4.4): PPOFP16's methods, each as one CUDA
graph, beside FP32 and SB3's PPO.

Observations of 17 and actions of 6 numbers, two networks of two hidden layers, 10 epochs. A rollout has 2048 samples,
or two minibatches if those are more, of random numbers: no environment runs. The learning rate is so small that a
policy that sees one rollout again and again stays where it is, and every weight's update is computed.

``python -m benchmarks.gpu [--only update,memory] [--quick]``, in under four minutes; needs a CUDA device. Each part
writes its results file when it is done.
"""

import argparse
import gc
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.runner import RESULTS, make_model, read_csv, state_bytes, versions, write_csv
from benchmarks.timing import Array, Row, Work, cells, in_new_process, in_turn, spread
from sb3_fp16 import PPOFP16
from sb3_fp16.engines.graph import GraphEngine, why_no_graph

Rows = Sequence[Mapping[str, Any]]

WIDTHS, BATCHES = (64, 512, 2048), (64, 512, 2048)
METHODS = ("fp32", "amp-fp16", "amp-bf16", "paper", "fp16")
NAMES = {"sb3": "SB3's PPO"} | {method: f"`{method}`" for method in METHODS}
OBSERVATIONS, ACTIONS, ENVS = 17, 6, 64
ROLLOUT, EPOCHS, LEARNING_RATE = 2048, 10, 1e-6
PROCESSES, REPEATS, REPEATS_OF_SB3 = 5, 5, 1
SECONDS = 160
"""What the processes may take together; on a slow GPU they are fewer, which the results say."""


class Device(NamedTuple):
    """
    Where updates run; tests run them on a CPU.

    :param name: torch's
    :param synchronize: waits for all that was enqueued there
    """

    name: str = "cuda"
    synchronize: Callable[[], object] = th.cuda.synchronize


class Shape(NamedTuple):
    """
    Of an update.

    :param width: of both hidden layers
    :param batch_size: of a minibatch
    """

    width: int
    batch_size: int

    @property
    def samples(self) -> int:
        """Of a rollout."""
        return max(ROLLOUT, 2 * self.batch_size)


class NoEnvironments(VecEnv):
    """What a model must know of environments that it never steps."""

    def __init__(self) -> None:
        observations = spaces.Box(-np.inf, np.inf, (OBSERVATIONS,), np.float32)
        super().__init__(ENVS, observations, spaces.Box(-1, 1, (ACTIONS,), np.float32))

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """None of each."""
        return [None] * self.num_envs

    def _never(self, *arguments: Any, **settings: Any) -> Any:
        raise NotImplementedError("no environment runs here")

    reset = step_async = step_wait = close = set_attr = env_method = env_is_wrapped = _never


def made(method: str, shape: Shape, device: Device) -> PPO:
    """
    A model with its rollout, its first update to be run as a graph.

    :param method: ``sb3`` or a precision
    :param shape: of its updates
    :param device: to run them on
    """
    model = with_rollout(method, shape, EPOCHS, device.name)
    if isinstance(model, PPOFP16):
        assert (reason := why_no_graph(model.policy)) is None, reason
        model.use_engine(GraphEngine(model.policy, model.batch_size))
    return model


def with_rollout(method: str, shape: Shape, epochs: int, device: str) -> PPO:
    """
    A model with a rollout that no environment has been stepped for.

    :param method: ``sb3`` or a precision
    :param shape: of its updates
    :param epochs: of each
    :param device: to run them on
    """
    settings: Row = {"batch_size": shape.batch_size, "n_steps": shape.samples // ENVS, "n_epochs": epochs}
    # Orthogonal weights would take longer than all that is measured.
    networks = {"net_arch": [shape.width] * 2, "ortho_init": False}
    settings |= {"learning_rate": LEARNING_RATE, "policy_kwargs": networks}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are trying to run")
        model = make_model(method, NoEnvironments(), seed=0, device=device, **settings)
    model.set_logger(Logger(None, []))
    fill(model)
    return model


@th.no_grad()
def fill(model: PPO) -> None:
    """
    A rollout of random observations and rewards, and the policy's own actions.

    :param model: whose buffer is filled
    """
    random, buffer = np.random.default_rng(0), model.rollout_buffer
    buffer.reset()
    model.policy.set_training_mode(False)
    for _ in range(buffer.buffer_size):
        observations = random.normal(size=(ENVS, OBSERVATIONS)).astype(np.float32)
        actions, values, log_probs = model.policy(th.as_tensor(observations, device=model.device))
        rewards, starts = random.normal(size=ENVS), np.zeros(ENVS, dtype=bool)
        buffer.add(observations, actions.cpu().numpy(), rewards, starts, values, log_probs)
    buffer.compute_returns_and_advantage(last_values=values, dones=starts)


def captures(model: PPO) -> int:
    """
    Graphs captured so far.

    :param model: of any method
    """
    return model.engine.recorded if isinstance(model, PPOFP16) and isinstance(model.engine, GraphEngine) else 0


def replay_of(model: PPO) -> Work:
    """
    All launches of an update alone, on what the last update left on the device.

    :param model: after an update as a graph
    """
    return cast(Work, cast(Any, model).engine._update._replay)


def about_device(device: Device) -> Row:
    """What a results row must name beside versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0]) and subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return {
        "gpu": th.cuda.get_device_name(device.name) if device.name != "cpu" else "none",
        "driver": found[0] if found else "unknown",
        "cuda": th.version.cuda or "none",
        "date": date.today().isoformat(),
    }


# Update: train(), and the graph's replay alone


def update(processes: int, repeats: int) -> list[Row]:
    """One row per shape and method, over processes of their own."""
    shapes, start = [Shape(*shape) for shape in product(WIDTHS, BATCHES)], time.perf_counter()
    measured: list[list[Row]] = []
    while len(measured) < processes:
        measured.append(in_new_process(update_times, shapes, repeats))
        if (time.perf_counter() - start) * (1 + 1 / len(measured)) > SECONDS:  # one more would be too late
            break
    return summarized(measured, repeats)


def update_times(shapes: Sequence[Shape], repeats: int, device: Device | None = None) -> list[Row]:
    """
    One process: a row per shape and method.

    :param shapes: of updates
    :param repeats: of each measurement
    :param device: a GPU, if not a test's
    """
    return [row for shape in shapes for row in times_of(shape, repeats, device or Device())]


def times_of(shape: Shape, repeats: int, device: Device) -> list[Row]:
    """
    Medians over the repeats, and of the ratios to what FP32 took in the same repeat.

    :param shape: of the updates
    :param repeats: of all methods in turn; SB3's PPO gets fewer, and its ratio is to FP32 in turn with it
    :param device: where they run
    """
    gc.collect()  # models that are done with
    models = {method: made(method, shape, device) for method in METHODS}
    sb3 = made("sb3", shape, device)
    for model in (*models.values(), sb3):  # captures, and warms up
        model.train()
    assert all(map(captures, models.values())), "an update was left to torch"
    whole = timed([model.train for model in models.values()], repeats, device)
    replays = timed([replay_of(model) for model in models.values()], repeats, device)
    of_sb3 = timed([models["fp32"].train, sb3.train], min(repeats, REPEATS_OF_SB3), device)
    rows = [{"method": "sb3", **medians("ms", of_sb3)[1], "device_ms": "", "device_ms_ratio": "", "captures": 0}]
    columns = zip(models.items(), medians("ms", whole), medians("device_ms", replays), strict=True)
    rows += [{"method": name, **a, **b, "captures": captures(model)} for (name, model), a, b in columns]
    minibatches = -(-shape.samples // shape.batch_size) * EPOCHS
    sizes = {**shape._asdict(), "samples": shape.samples, "minibatches": minibatches}
    return [{**sizes, **row, **about_device(device)} for row in rows]


def timed(works: Sequence[Work], repeats: int, device: Device) -> Array:
    """
    Seconds of each piece of work until the device has done it, all in turn.

    :param works: to be done
    :param repeats: of all
    :param device: to wait for
    """

    def done(work: Work) -> None:
        work()
        device.synchronize()

    device.synchronize()
    return in_turn([partial(done, work) for work in works], repeats)


def medians(name: str, seconds: Array) -> list[Row]:
    """
    Milliseconds, and the ratio to the first piece of work, as two columns per piece of work.

    :param name: of the first column
    :param seconds: from ``timed``
    """
    ratios = seconds / seconds[:, :1]
    pairs = zip(1e3 * np.median(seconds, axis=0), np.median(ratios, axis=0), strict=True)
    return [{name: float(ms), f"{name}_ratio": float(ratio)} for ms, ratio in pairs]


def summarized(of_processes: Sequence[Sequence[Row]], repeats: int) -> list[Row]:
    """
    Medians and ranges over processes of what each has measured.

    :param of_processes: rows of each process, the same ones in the same order
    :param repeats: within each
    """
    rows = []
    for same in zip(*of_processes, strict=True):
        row = {name: same[0][name] for name in ("width", "batch_size", "samples", "minibatches", "method")}
        for name in ("ms", "device_ms"):
            for column, values in ((name, name), (f"{name}_ratio_to_fp32", f"{name}_ratio")):
                if same[0][values] == "":
                    row |= {f"{column}_{which}": "" for which in ("median", "min", "max")}
                else:
                    row |= spread(column, np.array([one[values] for one in same]))
        row |= {"captures": max(one["captures"] for one in same), "processes": len(same), "repeats": repeats}
        row |= {name: same[0][name] for name in ("gpu", "driver", "cuda", "date")}
        rows.append({**row, **versions()})
    return rows


def update_table(rows: Rows) -> str:
    """Ratios to FP32 as Markdown; absolute times belong to one machine and stay in the results file."""
    lines = ["| width | batch | method | update / FP32's, median | min to max | launches alone / FP32's | min to max |"]
    lines.append("|---:|---:|---|---:|---:|---:|---:|")
    for row in rows:
        alone = cells(row, "device_ms_ratio_to_fp32", 2) if row["device_ms_ratio_to_fp32_median"] else " | "
        start = f"| {row['width']} | {row['batch_size']} | {NAMES[row['method']]} "
        lines.append(f"{start}| {cells(row, 'ms_ratio_to_fp32', 2)} | {alone} |")
    return "\n".join(lines)


# Memory: what torch has allocated at most during the first two updates, with parameters, rollout and capture


def memory(processes: int, repeats: int) -> list[Row]:
    """One row per width and method at the largest minibatch, each method in a process of its own."""
    shapes = [Shape(width, BATCHES[-1]) for width in WIDTHS]
    with ProcessPoolExecutor(len(METHODS) + 1, get_context("spawn")) as pool:
        rows = [row for part in pool.map(memory_of, ("sb3", *METHODS), [shapes] * (len(METHODS) + 1)) for row in part]
    return [{**row, **versions()} for row in sorted(rows, key=lambda row: cast(int, row["width"]))]


def memory_of(method: str, shapes: Sequence[Shape], device: Device | None = None) -> list[Row]:
    """
    A row per shape, what one has taken being freed before the next.

    :param method: ``sb3`` or a precision
    :param shapes: the smallest first, as libraries keep their workspaces
    :param device: a GPU, if not a test's
    """
    device = device or Device()
    return [peak_of(method, shape, device) for shape in shapes]


def peak_of(method: str, shape: Shape, device: Device) -> Row:
    """
    One row.

    :param method: ``sb3`` or a precision
    :param shape: of the updates
    :param device: where they run
    """
    gc.collect()
    th.cuda.empty_cache()
    before = th.cuda.memory_allocated()
    model = made(method, shape, device)
    th.cuda.reset_peak_memory_stats()
    for _ in range(2):
        model.train()
    peak, optimizer = th.cuda.max_memory_allocated(), state_bytes(model)["optimizer state"]
    return {
        **shape._asdict(),
        "method": method,
        "optimizer_bytes": optimizer,
        "optimizer_mib": round(optimizer / 2**20, 2),
        "peak_mib": round(peak / 2**20, 2),
        "before_mib": round(before / 2**20, 2),
        "captures": captures(model),
        **about_device(device),
    }


def memory_table(rows: Rows) -> str:
    """MiB as Markdown."""
    lines = ["| width | method | optimizer state, MiB | peak, MiB | of it there before | peak / FP32's |"]
    lines.append("|---:|---|---:|---:|---:|---:|")
    fp32 = {row["width"]: float(row["peak_mib"]) for row in rows if row["method"] == "fp32"}
    for row in rows:
        sizes = " | ".join(f"{float(row[name]):.2f}" for name in ("optimizer_mib", "peak_mib", "before_mib"))
        ratio = float(row["peak_mib"]) / fp32[row["width"]] if fp32[row["width"]] else 1.0
        lines.append(f"| {row['width']} | {NAMES[row['method']]} | {sizes} | {ratio:.2f} |")
    return "\n".join(lines)


class Part(NamedTuple):
    """
    One results file and one table.

    :param measure: rows, from numbers of processes and repeats
    :param table: Markdown from the rows of the file
    :param file: where they are kept, once there are any
    """

    measure: Callable[[int, int], list[Row]]
    table: Callable[[Rows], str]
    file: Path


PARTS = {
    "update": Part(update, update_table, RESULTS / "gpu_update.csv"),
    "memory": Part(memory, memory_table, RESULTS / "gpu_memory.csv"),
}


def main() -> None:
    """Measure what is asked for, write each part's rows, print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", "--part", default=",".join(PARTS), help="of %(default)s; separated by commas")
    parser.add_argument("--quick", action="store_true", help="two processes and three repeats: no results to commit")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of the results files")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not th.cuda.is_available():
        parser.error("torch finds no CUDA device")
    for name in names:
        part, start = PARTS[name], time.perf_counter()
        file = arguments.into / part.file.name
        write_csv(file, part.measure(*((2, 3) if arguments.quick else (PROCESSES, REPEATS))))
        print(f"{name}, {time.perf_counter() - start:.0f} s\n{part.table(read_csv(file))}\n", flush=True)


if __name__ == "__main__":
    main()
