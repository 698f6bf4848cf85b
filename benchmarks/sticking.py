"""
Weight sticking at small learning rates: the worked example of "BF16 vs FP16 in RL post-training", and its remedies.

The example is computed from the number formats and simulated with the package's own rounding; the population repeats
it on weights of all sizes; the remedies train (``benchmarks.finetuning``), where runs that are in the results file are
not repeated. ``python -m benchmarks.sticking --jobs 2``
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch as th
from torch import Tensor

from benchmarks import finetuning
from benchmarks.runner import RESULTS, read_csv, versions, write_csv
from benchmarks.runs import Workers, parser_of, workers_of
from benchmarks.timing import Row
from sb3_fp16.layers import LayerRule
from sb3_fp16.rounding import FORMATS, Format

EXAMPLE_FILE, POPULATION_FILE = RESULTS / "sticking_example.csv", RESULTS / "sticking_population.csv"

WEIGHT, STEP = 0.025, 1e-6
"""Median magnitude of a 1.5B model's weights, and what one step of Adam moves them by (document: worked example)."""
STEPS_PER_ITERATION = 4
BF16, FP16 = FORMATS["bf16"], FORMATS["fp16"]

DRAWS = 1 << 22
"""Of stochastic rounding: the standard error of a probability of 0.8 % is 0.5 % of it."""
STARTS = 1 << 12
"""Weights spread evenly over one tick."""

WEIGHTS = 1 << 20
NORMAL_MEDIAN = 0.6744897501960817
"""Median magnitude of a standard normal variable."""
PERSISTENCES = (0.0, 0.5, 1.0)
COPIES = {"bf16": LayerRule(BF16), "fp16": LayerRule(FP16), "bf16-sr": LayerRule(BF16, stochastic=True)}
MEASURED = {"bf16": 1.16, "fp16": 9.21, "bf16-sr": None}
"""Percent of a 1.5B model's 16-bit weights that had moved after the first iteration (document: worked example)."""


def tick_at(kind: Format, weight: float = WEIGHT) -> float:
    """
    Distance between neighbouring numbers of a format.

    :param kind: the format
    :param weight: where
    """
    return float(kind.tick(th.tensor([weight])))


def first_move(kind: Format, weights: Tensor, step: float = STEP) -> Tensor:
    """
    The optimizer step at which the copy of a weight, rounded to nearest, first differs from the one it started with.

    :param kind: format of the copy
    :param weights: FP32 master weights, shape (weights,)
    :param step: what is added to each of them, every time, in FP32
    :return: int64, shape (weights,), counted from 1
    :raises ValueError: if a copy could never move, because FP32 itself cannot represent such a step
    """
    if not (weights + step != weights).all():
        raise ValueError(f"A step of {step:g} does not change FP32 weights of {float(weights.abs().max()):g}.")
    rule = LayerRule(kind)
    start, moved_at, count = rule.parameter(weights), th.zeros(len(weights), dtype=th.int64), 0
    while not moved_at.all():
        weights, count = weights + step, count + 1
        moved_at[(moved_at == 0) & (rule.parameter(weights) != start)] = count
    return moved_at


def stochastic_movement(steps: int, draws: int = DRAWS) -> tuple[float, float, float]:
    """
    How far a stochastically rounded BF16 copy is from where it started, over where its FP32 weight is.

    The weight starts on a tick. Exactly 1 is due on average.

    :param steps: of the optimizer, all of them upwards
    :param draws: of the rounding
    :return: mean ratio, its standard error, and the share of the draws that are elsewhere
    """
    start = BF16.store(th.tensor(WEIGHT)).float()
    weight = start
    for _ in range(steps):
        weight = weight + STEP
    moved = LayerRule(BF16, stochastic=True).parameter(weight.expand(draws).contiguous()).double() - start.double()
    due = float(weight.double() - start.double())
    return float(moved.mean()) / due, float(moved.std()) / draws**0.5 / due, float((moved != 0).double().mean())


def example() -> Iterator[Row]:
    """Rows: a quantity, the document's figure, ours, and what ours is within (none: exact)."""
    bf16, fp16 = tick_at(BF16), tick_at(FP16)
    on_tick = BF16.store(th.tensor([WEIGHT])).float()  # a number of FP16 as well
    between = on_tick + bf16 * (th.arange(STARTS) / STARTS - 0.5)
    yield _figure("BF16 tick at 0.025", 1.2e-4, bf16)
    yield _figure("half of it", 6.1e-5, bf16 / 2)
    yield _figure("half an FP16 tick", 7.6e-6, fp16 / 2)
    yield _figure("steps of 1e-6 in half a BF16 tick", 61, bf16 / 2 / STEP)
    yield _figure("steps of 1e-6 in half an FP16 tick", 8, fp16 / 2 / STEP)
    yield _figure("a step of 1e-6 as FP32 takes it there", 1e-6, float((on_tick + STEP).double() - on_tick.double()))
    for name, kind, steps, iterations in (("BF16", BF16, 61, 15), ("FP16", FP16, 8, 2)):
        first = float(first_move(kind, on_tick))
        yield _figure(f"{name} copy first moves at step, from a tick", steps, first)
        yield _figure(f"{name} iterations of 4 steps until then", iterations, first / STEPS_PER_ITERATION)
        for direction, sign in (("up", 1), ("down", -1)):
            at = float(first_move(kind, th.tensor([WEIGHT]), sign * STEP))
            yield _figure(f"{name} copy of 0.025 itself, which is on no tick, steps {direction}", None, at)
        moves = first_move(kind, between).double()
        spread = f"{moves.min():.0f} to {moves.max():.0f}"
        yield _figure(f"{name} copy, mean over starts between two ticks", steps, float(moves.mean()), spread)
    yield from _stochastic_figures(bf16)


def _stochastic_figures(tick: float) -> Iterator[Row]:
    """Probability of a move at the first step, and the mean movement after several."""
    yield _figure("stochastic: probability of a tick at the first step, percent", 0.8, 100 * STEP / tick)
    for steps in (1, STEPS_PER_ITERATION, 61):
        ratio, error, share = stochastic_movement(steps)
        name = f"stochastic: mean movement by step {steps}, over what is due"
        yield _figure(name, 1, ratio, f"±{4 * error:.2g} (4 standard errors)")
        if steps == 1:
            error = (share * (1 - share) / DRAWS) ** 0.5
            name = "stochastic: share of draws that moved at the first step, percent"
            yield _figure(name, 0.8, 100 * share, f"±{400 * error:.2g} (4 standard errors)")


def _figure(quantity: str, document: float | None, computed: float, within: str = "") -> Row:
    return {
        "quantity": quantity,
        "document": "" if document is None else f"{document:g}",
        "computed": float(f"{computed:.5g}"),
        "within": within,
    }


def example_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    The worked example as Markdown.

    :param rows: of the results file
    """
    lines = ["| at a weight of 0.025, steps of 1e-6 | document | here | |", "|---|---:|---:|---|"]
    lines += [
        f"| {row['quantity']} | {row['document'] or '–'} | {float(row['computed']):g} | {row['within']} |"
        for row in rows
    ]
    return "\n".join(lines)


def signed_steps(weights: int, steps: int, persistence: float, seed: int = 0) -> Tensor:
    """
    Steps of one size and random signs, each sign the one before it with probability (1 + persistence)/2.

    :param weights: how many weights
    :param steps: how many of each
    :param persistence: correlation of a sign with the next
    :param seed: of the draws
    :return: FP32, shape (steps, weights)
    """
    generator = th.Generator().manual_seed(seed)
    changes = th.rand(steps, weights, generator=generator) * 2 > 1 + persistence
    changes[0] = th.rand(weights, generator=generator) < 0.5
    return STEP * (1 - 2 * (changes.cumsum(0) % 2)).float()


def population(weights: int = WEIGHTS) -> Iterator[Row]:
    """
    Share of the copies that lie elsewhere after one iteration.

    Master weights are normal, their median magnitude that of the document. They start between ticks, or on ticks of
    BF16, as those of a model that was distributed in BF16 do.

    :param weights: how many
    """
    generator = th.Generator().manual_seed(1)
    drawn = th.randn(weights, generator=generator) * (WEIGHT / NORMAL_MEDIAN)
    for start, masters in (("on BF16 ticks", BF16.store(drawn).float()), ("between ticks", drawn)):
        for persistence in PERSISTENCES:
            after = masters
            for step in signed_steps(weights, STEPS_PER_ITERATION, persistence):
                after = after + step
            for name, rule in COPIES.items():
                share = float((rule.parameter(after) != rule.parameter(masters)).double().mean())
                yield {
                    "start": start,
                    "persistence": persistence,
                    "copy": name,
                    "moved_percent": round(100 * share, 3),
                    "standard_error": round(100 * (share * (1 - share) / weights) ** 0.5, 3),
                    "document_percent": MEASURED[name] or "",
                }


def population_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Shares of moved copies as Markdown.

    :param rows: of the results file
    """
    measured = " | ".join(f"{percent} %" if percent else "–" for percent in MEASURED.values())
    lines = [
        "| weights start | persistence of the sign | BF16 | FP16 | BF16, stochastic |",
        "|---|---:|---:|---:|---:|",
        f"| the document's measurement | – | {measured} |",
    ]
    shares: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cell = f"{float(row['moved_percent']):.2f} ±{2 * float(row['standard_error']):.2f} %"
        shares.setdefault((row["start"], str(row["persistence"])), {})[row["copy"]] = cell
    lines += [f"| {' | '.join(key)} | {' | '.join(of[name] for name in COPIES)} |" for key, of in shares.items()]
    return "\n".join(lines)


class Part(NamedTuple):
    """
    One results file and one table.

    :param measure: writes the rows, given who does the runs
    :param table: Markdown from the rows of the file
    :param file: where they are kept
    """

    measure: Callable[[Workers], object]
    table: Callable[[Sequence[Mapping[str, Any]]], str]
    file: Path


def _write(file: Path, rows: Iterator[Row]) -> None:
    write_csv(file, [row | versions() for row in rows])


PARTS = {
    "example": Part(lambda _: _write(EXAMPLE_FILE, example()), example_table, EXAMPLE_FILE),
    "population": Part(lambda _: _write(POPULATION_FILE, population()), population_table, POPULATION_FILE),
    "remedies": Part(finetuning.measure, finetuning.table, finetuning.FILE),
}


def main() -> None:
    """Measure what is asked for, print each part's table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    for name in arguments.only:
        part, start = PARTS[name], time.perf_counter()
        part.measure(workers_of(arguments))
        print(f"{name}, {time.perf_counter() - start:.0f} s\n{part.table(read_csv(part.file))}\n", flush=True)


if __name__ == "__main__":
    main()
