"""Measurements as rows of a file, and as tables for a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sb3_fp16.audit.measurements import Measurements, percent
from sb3_fp16.audit.statistics import StepStatistics

COLUMNS = ("timesteps", "section", "subject", "measure", "value")


def rows_of(found: Measurements) -> list[dict[str, Any]]:
    """
    Everything as rows of ``COLUMNS``.

    :param found: by an audit
    """
    return [
        dict(zip(COLUMNS, (found.timesteps, section, subject, name, value), strict=True))
        for section, subject, measures in _measures(found)
        for name, value in measures.items()
    ]


def _measures(found: Measurements) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Section, subject, and figures by name."""
    for layer in found.layers:
        yield "layers", layer.name, _numbers(layer._asdict())
    for way in found.writebacks:
        yield "writebacks", f"{way.storage}, {way.writeback}", _numbers(way._asdict())
    for state in found.state:
        yield "state", f"{state.name}, {state.storage}", _numbers(state._asdict())
    for shadow in found.shadows:
        yield "shadow", shadow.optimizer, _numbers(shadow._asdict())
    for root in found.roots:
        yield "roots", "SHARP", _numbers(root._asdict())
    for mismatch in found.mismatches:
        pair = f"{mismatch.acts} -> {mismatch.trains}"
        yield "mismatch", pair, _numbers(vars(mismatch.steps))
        for sequence in mismatch.sequences:
            figures = {k: v for k, v in vars(sequence).items() if k != "horizon"}
            flat = {
                f"{name} {end}": number
                for name in ("mean", "std", "rms")
                for end, number in figures.pop(name)._asdict().items()
            }
            yield "sequences", f"{pair}, T={sequence.horizon}", _numbers({**figures, **flat})
        for part in mismatch.slices:
            yield "slices", f"{pair}, log p {part.low:.3g} to {part.high:.3g}", _numbers(vars(part))
    if found.correction is not None:
        yield "correction", "c", _numbers(found.correction._asdict())
    for extent in found.ranges:
        yield "range", extent.title, {"largest": extent.largest, "saturated": extent.saturated}
    for gradient in found.gradients:
        yield "gradients", gradient.name, _numbers(gradient._asdict())


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not isinstance(value, str)}


def lines_of(found: Measurements) -> Iterator[str]:
    """
    The sections as lines of text for a terminal.

    :param found: by an audit
    """
    yield from _table(
        "writing 16-bit weights back",
        ("unchanged", "moved", "retained", "noise", "steps/half tick"),
        ((f"{r.storage}, {r.writeback}", *map(percent, r[2:6]), f"{r[6]:.3g}") for r in found.writebacks),
    )
    yield from _table(
        "updates of the model's own weights",
        ("weights", "unchanged", "moved"),
        ((r.name, f"{r.weights:,}", percent(r.unchanged), percent(r.moved)) for r in found.layers),
    )
    yield from _table(
        "optimizer state",
        ("elements", "zero", "subnormal", "saturated", "lost"),
        ((f"{r.name}, {r.storage}", f"{r.elements:,}", *map(percent, r[3:])) for r in found.state),
    )
    yield from _table(
        "steps beside Adam in FP32",
        ("ratio", "cosine", "zeroed"),
        ((r.optimizer, f"{r.ratio:.4g}", f"{r.cosine:.4f}", percent(r.zeroed)) for r in found.shadows),
    )
    pairs = ((f"{m.acts} -> {m.trains}", m.steps) for m in found.mismatches)
    yield from _table(
        "log-ratio at the same weights",
        ("mean |d|", "exactly 0", "KL", "k1", "k2", "k3", "E[e^d] - 1"),
        (
            (pair, f"{s.mean_abs:.3g}", percent(s.zero_fraction), *map("{:.3g}".format, _estimates(s)))
            for pair, s in pairs
        ),
    )
    yield from _table(
        "largest numbers",
        ("largest", "of 65,504", "saturated"),
        ((r.title, f"{r.largest:.4g}", percent(r.used), f"{r.saturated:,}") for r in found.ranges),
    )
    yield from _table(
        "gradients that FP16 flushes or shortens",
        ("scale", "flushed", "subnormal", "scaled: flushed", "subnormal"),
        ((r.name, f"{r.scale:g}", *map(percent, r[2:])) for r in found.gradients),
    )


def _estimates(steps: StepStatistics) -> tuple[float, ...]:
    return steps.kl, steps.k1, steps.k2, steps.k3, steps.mean_ratio - 1


def _table(title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    if not rows:
        return
    first = max(len(title), *(len(row[0]) for row in rows)) + 2
    widths = [max(len(column), *(len(row[i + 1]) for row in rows)) + 2 for i, column in enumerate(columns)]
    for name, *cells in [(title, *columns), *rows]:
        yield f"{name:<{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    yield ""
