"""
What an update costs next to SB3's own ``train()``: side by side in one process, one thread.

HalfCheetah-v5, SB3's defaults (2048 steps, 10 epochs of 32 minibatches, two 64x64 tanh networks).
``python -m benchmarks.update``
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import PPO

from benchmarks.runner import RESULTS, make_model, versions, write_csv
from sb3_fp16 import PPOFP16
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.native import NativeEngine

# (engine, method)
RUNS = (("", "sb3"), ("eager", "fp32"), ("eager", "fp16"), ("eager", "paper"), ("native", "fp32"), ("native", "fp16"))
REPEATS = 15
FILE = RESULTS / "update.csv"


def seconds_of_one_update(model: PPO) -> float:
    """One ``train()`` on the rollout that the model holds."""
    start = time.perf_counter()
    model.train()
    return time.perf_counter() - start


def model_on(engine: str, method: str) -> PPO:
    """
    A model whose updates run on an engine.

    :param engine: ``eager`` or ``native``; nothing for SB3's own
    :param method: ``sb3`` or a precision
    """
    model = make_model(method, "HalfCheetah-v5", seed=0)
    if isinstance(model, PPOFP16):
        kind = {"eager": EagerEngine, "native": NativeEngine}[engine]
        model.use_engine(kind(model.policy, model.batch_size))
    return model


def main() -> None:
    """Measure, write one row per method, print the ratios."""
    th.set_num_threads(1)
    models = [model_on(engine, method) for engine, method in RUNS]
    for model in models:
        model.learn(2048)  # fills the rollout and warms up
    # In turn, so that a machine that slows down slows down all of them.
    seconds = np.array([[seconds_of_one_update(model) for model in models] for _ in range(REPEATS)])
    ratios = seconds / seconds[:, :1]
    rows: list[dict[str, Any]] = [
        {
            "engine": engine,
            "method": method,
            "update_ms_median": round(1e3 * float(np.median(seconds[:, i])), 1),
            "ratio_to_sb3_median": round(float(np.median(ratios[:, i])), 4),
            "ratio_min": round(float(ratios[:, i].min()), 4),
            "ratio_max": round(float(ratios[:, i].max()), 4),
            "repeats": REPEATS,
            **versions(),
        }
        for i, (engine, method) in enumerate(RUNS)
    ]
    write_csv(FILE, rows)
    print(table(rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Ratios to SB3 as Markdown; absolute times belong to one machine and stay in the results file.

    :param rows: of the results file
    """
    lines = ["| engine | method | time / SB3's, median | min to max | times as fast |", "|---|---|---:|---:|---:|"]
    for row in rows:
        ratio = float(row["ratio_to_sb3_median"])
        spread = f"{float(row['ratio_min']):.3f} to {float(row['ratio_max']):.3f}"
        lines.append(f"| {row['engine']} | `{row['method']}` | {ratio:.3f} | {spread} | {1 / ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
