"""
One matrix product accumulated in two orders: how much of the difference survives rounding to 16 bits.

128x256 @ 256x8192 of normal numbers, both operands in the format: partial sums over chunks of 64 in FP32, added in
order, against one call of BLAS in FP32; the results of both are rounded to the format ("BF16 vs. FP16 in RL
Fine-Tuning", section "Rounding can erase a difference—or enlarge it"). The order of a BLAS is its own, so that another
one gives somewhat other numbers. ``python -m benchmarks.split_k``
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch as th
from torch import Tensor

from benchmarks.runner import RESULTS, versions, write_csv

ROWS, INNER, COLUMNS, CHUNK = 128, 256, 8192, 64
FORMATS = {"fp32": th.float32, "fp16": th.float16, "bf16": th.bfloat16}
SEEDS = range(5)
FILE = RESULTS / "split_k.csv"


def split_k(a: Tensor, b: Tensor) -> Tensor:
    """
    Product whose inner dimension is split: FP32 partial sums, added in order.

    :param a: FP32, shape (rows, inner)
    :param b: FP32, shape (inner, columns)
    """
    total = a[:, :CHUNK] @ b[:CHUNK]
    for start in range(CHUNK, len(b), CHUNK):
        total += a[:, start : start + CHUNK] @ b[start : start + CHUNK]
    return total


def difference(name: str, seed: int) -> dict[str, float]:
    """
    What two orders of accumulation leave between results in one format.

    :param name: of the format
    :param seed: of the operands
    :return: share of elements that differ, the median of their relative gaps, and the Frobenius norm of the difference
        relative to that of the product
    """
    storage = FORMATS[name]
    generator = th.Generator().manual_seed(seed)
    a = th.randn(ROWS, INNER, generator=generator).to(storage).float()
    b = (th.randn(INNER, COLUMNS, generator=generator) / INNER**0.5).to(storage).float()
    whole, split = (product(a, b).to(storage).double() for product in (th.mm, split_k))
    gap = (whole - split).abs()
    differs = gap > 0
    return {
        "differing": float(differs.double().mean()),
        "median_gap": float((gap / whole.abs())[differs].median()),
        "norm": float(gap.norm() / whole.norm()),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Means over the seeds as Markdown, with the range of the share.

    :param rows: of the results file
    """
    lines = [
        "| format | elements that differ | min to max | their median relative gap | relative Frobenius norm |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in FORMATS:
        of_format = [row for row in rows if row["format"] == name]
        share, gap, norm = (np.array([float(row[k]) for row in of_format]) for k in ("differing", "median_gap", "norm"))
        spread = f"{100 * share.min():.3g} to {100 * share.max():.3g} %"
        lines.append(
            f"| {name.upper()} | {100 * share.mean():.3g} % | {spread} | {gap.mean():.2e} | {norm.mean():.2e} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, write one row per format and seed, print the table."""
    th.set_num_threads(1)
    rows = []
    for name in FORMATS:
        for seed in SEEDS:
            numbers = {key: float(f"{value:.4g}") for key, value in difference(name, seed).items()}
            rows.append({"format": name, "seed": seed, **numbers, **versions()})
    write_csv(FILE, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
