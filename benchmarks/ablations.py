"""
Modules A, B and C taken away and put back: HalfCheetah-v5, five seeds x 151,552 steps (paper Sec. 4.2).

A run that crashes within a gate of 20,480 steps is marked; others start anew. Once around ``paper``, as the paper
does, once around ``fp16``. Resumable: runs that are in the results file are not repeated.
``python -m benchmarks.ablations``
"""

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.comparison import Rows, spread_of
from benchmarks.learning import SEEDS, settings, trained
from benchmarks.runner import RESULTS, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.timing import Row
from sb3_fp16 import Precision

ENV = "HalfCheetah-v5"
GATE, STEPS, EVERY = 20_480, 151_552, 8_192
FILE = RESULTS / "ablations.csv"

WITHOUT: dict[str, dict[str, Any]] = {
    "A": {"global_scalars": False, "gradient_scaling": "off"},
    "B": {"log_ratio": "absolute-stored"},
    "C": {"optimizer": "adam"},
}
"""What a module's absence means: plain FP16 reductions, absolute log-probabilities in FP16, torch's Adam in FP16."""


def with_modules(base: str, modules: str) -> Precision:
    """
    A preset with some of its modules only.

    :param base: a preset that has all of them
    :param modules: of A, B and C
    """
    changes = {key: value for name in "ABC" if name not in modules for key, value in WITHOUT[name].items()}
    return replace(Precision.presets[base], **changes)


class Setting(NamedTuple):
    """
    What is trained.

    :param base: preset
    :param modules: of A, B and C, that it keeps
    """

    base: str
    modules: str


SETTINGS: dict[str, Setting] = {
    "none": Setting("paper", ""),  # without modules, nothing that the presets differ in has an effect
    **{
        f"{base} {modules}": Setting(base, modules)
        for base, modules in product(("paper", "fp16"), ("ABC", "C", "AC", "BC", "AB"))
    },
}
SUBTRACTIVE = {"ABC": "all", "BC": "without A", "AC": "without B", "AB": "without C"}
ADDITIVE = {"": "naive", "C": "C", "AC": "A and C", "ABC": "all"}


def run(setting: str, seed: int) -> Row:
    """The gate, and what comes after it, as one row; ``fp32`` is the reference."""
    precision: str | Precision = "fp32" if setting == "fp32" else with_modules(*SETTINGS[setting])
    gate = trained(precision, ENV, seed, GATE, EVERY, horizon=STEPS)
    last = gate if gate["crash"] else trained(precision, ENV, seed, STEPS, EVERY)
    return {"env": ENV, "setting": setting, "seed": seed, "passed_gate": not gate["crash"], **last, **versions()}


def table(rows: Rows, base: str) -> str:
    """
    Taken away, then put back, beside FP32, as Markdown.

    :param rows: of the results file
    :param base: preset
    """
    lines = ["| | modules | passed the gate | return AUC, each seed | mean ± SD | final return, mean ± SD |"]
    lines.append("|---|---|---:|---|---:|---:|")
    directions = (("reference", {"fp32": "FP32"}), ("taken away", SUBTRACTIVE), ("put back", ADDITIVE))
    for direction, words in directions:
        for modules, name in words.items():
            setting = modules if modules == "fp32" else f"{base} {modules}" if modules else "none"
            of_setting = [row for row in rows if row["setting"] == setting]
            if of_setting:
                lines.append(f"| {direction} | {name} | {_cells(of_setting)} |")
    return "\n".join(lines)


def paper_table(rows: Rows) -> str:
    """
    Around ``paper``.

    :param rows: of the results file
    """
    return table(rows, "paper")


def fp16_table(rows: Rows) -> str:
    """
    Around ``fp16``.

    :param rows: of the results file
    """
    return table(rows, "fp16")


def _cells(rows: Rows) -> str:
    passed = sum(str(row["passed_gate"]) == "True" for row in rows)
    auc, final = (np.array([float(row[key]) for row in rows]) for key in ("return_auc", "final_return"))
    each = " ".join("Crash" if np.isnan(value) else f"{value:.0f}" for value in auc)
    return f"{passed} of {len(rows)} | {each} | {spread_of(auc)} | {spread_of(final)}"


def main() -> None:
    """Run what is missing, then print the tables."""
    workers = workers_of(parser_of(__doc__).parse_args())
    runs = list(product(("fp32", *SETTINGS), SEEDS))
    # Not all rows have the same number of steps.
    evaluated = {"evaluated": settings(STEPS, EVERY)["evaluated"]}
    rows = run_missing(FILE, ("setting", "seed"), runs, run, workers, settings=evaluated)
    print(f"{paper_table(rows)}\n\n{fp16_table(rows)}")


if __name__ == "__main__":
    main()
