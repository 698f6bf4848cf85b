"""
HalfCheetah-v5, 3 seeds x 51,200 steps: SB3's PPO against PPOFP16 in fp32, fp16 and paper.

Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.halfcheetah --jobs 2``
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import PAPER_SETTINGS, RESULTS, curve_of, make_model, pyplot, train, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.timing import Row

ENV, STEPS, EVERY = "HalfCheetah-v5", 51_200, 4_096
METHODS, SEEDS = ("sb3", "fp32", "fp16", "paper"), (0, 1, 2)
NAMES = {"sb3": "SB3's PPO", "fp32": "PPOFP16 `fp32`", "fp16": "PPOFP16 `fp16`", "paper": "PPOFP16 `paper`"}
FILE = RESULTS / "halfcheetah.csv"


def run(method: str, seed: int) -> Row:
    """One training run as one row."""
    model = make_model(method, ENV, seed, **PAPER_SETTINGS)
    evaluations, _ = train(model, ENV, seed, STEPS, EVERY)
    return {
        "env": ENV,
        "method": method,
        "seed": seed,
        "steps": STEPS,
        **evaluations.columns(),
        **versions(),
    }


def main() -> None:
    """Run what is missing, then print the table."""
    workers = workers_of(parser_of(__doc__).parse_args())
    print(table(run_missing(FILE, ("method", "seed"), list(product(METHODS, SEEDS)), run, workers)))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Return AUC and final return per method as Markdown, every seed shown.

    :param rows: of the results file
    """
    lines = [
        "| method | return AUC, seeds 0 1 2 | mean | final return, seeds 0 1 2 | mean |",
        "|---|---|---:|---|---:|",
    ]
    for method in METHODS:
        of_method = [row for row in rows if row["method"] == method]
        cells = [NAMES[method]]
        for key in ("return_auc", "final_return"):
            values = [float(row[key]) for row in of_method]
            cells += [" ".join(f"{value:.0f}" for value in values), f"{np.mean(values):.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """
    Mean learning curves, each seed thin behind.

    :param rows: of the results file
    :param path: of the picture
    """
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for colour, method in enumerate(METHODS):
        curves = np.array([curve_of(row) for row in rows if row["method"] == method])
        steps, returns = curves[0, 0], curves[:, 1]
        axes.plot(steps, returns.mean(axis=0), color=f"C{colour}", label=NAMES[method])
        axes.plot(steps, returns.T, color=f"C{colour}", alpha=0.25, linewidth=0.8)
    axes.set(
        xlabel="environment steps", ylabel="deterministic return", title=f"{ENV}, {len(SEEDS)} seeds and their mean"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
