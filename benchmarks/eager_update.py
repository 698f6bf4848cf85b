"""
What an eager half-precision update costs next to SB3's own ``train()``: side by side in one process, one thread.

HalfCheetah-v5, SB3's defaults (2048 steps, 10 epochs of 32 minibatches, two 64x64 tanh networks).
``python -m benchmarks.eager_update``
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch as th
from stable_baselines3 import PPO

from benchmarks.runner import RESULTS, make_model, versions, write_csv

METHODS = ("sb3", "fp32", "fp16", "paper")
REPEATS = 15
FILE = RESULTS / "eager_update.csv"


def seconds_of_one_update(model: PPO) -> float:
    """One ``train()`` on the rollout that the model holds."""
    start = time.perf_counter()
    model.train()
    return time.perf_counter() - start


def main() -> None:
    """Measure, write one row per method, print the ratios."""
    th.set_num_threads(1)
    models = {method: make_model(method, "HalfCheetah-v5", seed=0) for method in METHODS}
    for model in models.values():
        model.learn(2048)  # fills the rollout and warms up
    # In turn, so that a machine that slows down slows down all of them.
    seconds = np.array([[seconds_of_one_update(model) for model in models.values()] for _ in range(REPEATS)])
    ratios = seconds / seconds[:, :1]
    rows: list[dict[str, Any]] = [
        {
            "method": method,
            "update_ms_median": round(1e3 * float(np.median(seconds[:, i])), 1),
            "ratio_to_sb3_median": round(float(np.median(ratios[:, i])), 3),
            "ratio_min": round(float(ratios[:, i].min()), 3),
            "ratio_max": round(float(ratios[:, i].max()), 3),
            "repeats": REPEATS,
            **versions(),
        }
        for i, method in enumerate(METHODS)
    ]
    write_csv(FILE, rows)
    print(table(rows))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Ratios to SB3 as Markdown; absolute times belong to one machine and stay in the results file.

    :param rows: of the results file
    """
    lines = ["| method | time / SB3's, median | min to max |", "|---|---:|---:|"]
    for row in rows:
        spread = f"{float(row['ratio_min']):.2f} to {float(row['ratio_max']):.2f}"
        lines.append(f"| `{row['method']}` | {float(row['ratio_to_sb3_median']):.2f} | {spread} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
