"""
Exponent against significand (paper Sec. 4.5): BF16 over six tasks x five seeds x 512,000 steps, and FP16
with a significand of 10 down to 5 bits on HalfCheetah-v5, five seeds x 204,800 steps.

FP16's runs are those of ``benchmarks.learning``. Resumable: runs that are in the results file are not repeated.
``python -m benchmarks.boundary [--only significand]``
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from benchmarks import learning
from benchmarks.comparison import Rows, Scores, in_brackets, interquartile_mean, spread_of
from benchmarks.learning import SEEDS, TASKS, settings, trained
from benchmarks.runner import RESULTS, curve_of, pyplot, read_csv, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.timing import Row

ENV, STEPS = "HalfCheetah-v5", 204_800
EXPONENT_FILE, SIGNIFICAND_FILE = RESULTS / "boundary_exponent.csv", RESULTS / "boundary_significand.csv"

IN_BF16 = {"bf16": "paper", "bf16-sr": "fp16"}
"""Presets in BF16, and the ones that differ from them in the format only (``bf16-sr`` writes log_std back
stochastically, too)."""
FORMATS = {"E5M10": "paper", **{f"E5M{bits}": f"e5m{bits}" for bits in (9, 8, 7, 6, 5)}}


def run_of_format(kind: str, seed: int) -> Row:
    """One run of the paper's method in a shortened format as one row."""
    return {"env": ENV, "format": kind, "seed": seed, **trained(FORMATS[kind], ENV, seed, STEPS), **versions()}


def exponent_table(rows: Rows) -> str:
    """
    AUC in BF16 as a share of the same method's in FP16, as Markdown.

    :param rows: of the results file; FP16's are read
    """
    fp16 = read_csv(learning.FILE)
    lines = ["| task | method | AUC, mean ± SD | in FP16 | BF16 / FP16 | higher AUC in BF16 |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for method, half in IN_BF16.items():
        scores = Scores.of([*rows, *fp16], (method, half))
        for env in scores.tasks:
            brain, other = scores.of_task(env)
            wins = f"{scores.on(env).wins(method, half)} of {len(brain)}"
            sizes = f"{spread_of(brain)} | {spread_of(other)} | {retained(scores, env):.0f} %"
            lines.append(f"| {env} | `{method}`, `{half}` in FP16 | {sizes} | {wins} |")
        if scores.pairs:
            difference = in_brackets(scores.normalised_difference(method, half))
            lines.append(f"| all | `{method}` | normalised difference {difference} | | | |")
    return "\n".join(lines)


def retained(scores: Scores, env: str) -> float:
    """
    Mean AUC of the first method as a percentage of the second's, over the seeds on which neither crashed.

    :param scores: of two methods
    :param env: task
    """
    brain, half = scores.of_task(env)
    both = ~np.isnan(brain + half)
    return float(100 * brain[both].mean() / half[both].mean()) if both.any() else np.nan


def significand_table(rows: Rows) -> str:
    """
    AUC by format, each seed, as Markdown.

    :param rows: of the results file
    """
    lines = ["| format | return AUC, each seed | mean ± SD | final return, mean ± SD | updates stuck |"]
    lines.append("|---|---|---:|---:|---:|")
    for kind in FORMATS:
        of_format = [row for row in rows if row["format"] == kind]
        if of_format:
            auc, final, stuck = (
                np.array([float(row[key]) for row in of_format])
                for key in ("return_auc", "final_return", "stuck_fraction")
            )
            each = " ".join("Crash" if np.isnan(value) else f"{value:.0f}" for value in auc)
            sizes = f"{spread_of(auc)} | {spread_of(final)} | {100 * np.nanmean(stuck):.0f} %"
            lines.append(f"| {kind} | {each} | {sizes} |")
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """
    Learning curves by format.

    :param rows: of the significand's results file
    :param path: of the picture
    """
    figure, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for kind in FORMATS:
        curves = np.array([curve_of(row) for row in rows if (row["format"], row["crash"]) == (kind, "")])
        if len(curves):
            (line,) = axes.plot(curves[0, 0], interquartile_mean(curves[:, 1]), label=kind)
            axes.plot(curves[0, 0], curves[:, 1].T, color=line.get_color(), alpha=0.25, linewidth=0.7)
    axes.set(title=f"{ENV}, the paper's method", xlabel="environment steps", ylabel="deterministic return")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


class Part(NamedTuple):
    """
    One results file and one table.

    :param run: gives a row
    :param columns: what names a run
    :param wanted: all runs
    :param settings: that all rows share
    :param table: Markdown from the rows of the file
    :param file: where they are kept
    """

    run: Callable[..., Row]
    columns: tuple[str, ...]
    wanted: list[tuple[Any, ...]]
    settings: dict[str, Any]
    table: Callable[[Rows], str]
    file: Path


PARTS = {
    "exponent": Part(
        learning.run,
        ("env", "method", "seed"),
        [(env, method, seed) for seed, env, method in product(SEEDS, TASKS, IN_BF16)],
        settings(learning.STEPS),
        exponent_table,
        EXPONENT_FILE,
    ),
    "significand": Part(
        run_of_format,
        ("format", "seed"),
        [(kind, seed) for seed, kind in product(SEEDS, FORMATS)],
        settings(STEPS),
        significand_table,
        SIGNIFICAND_FILE,
    ),
}


def main() -> None:
    """Run what is missing, then print each part's table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    arguments = parser.parse_args()
    for name in cast(list[str], arguments.only):
        part = PARTS[name]
        workers = workers_of(arguments)
        rows = run_missing(part.file, part.columns, part.wanted, part.run, workers, settings=part.settings)
        print(f"{part.table(rows)}\n", flush=True)


if __name__ == "__main__":
    main()
