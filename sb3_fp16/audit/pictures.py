"""An audit as one picture of four panels: weights, optimizer, mismatch, range."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sb3_fp16.audit.report import Audit

_MOST_BARS = 12


def draw(audits: Sequence[Audit], path: str | Path) -> None:
    """
    Draw one audit, or several of one run along its steps.

    :param audits: at least one, in order
    :param path: of the picture; its ending says the format
    :raises ValueError: if there is none
    """
    if not audits:
        raise ValueError("There is no audit to draw.")
    # Not through pyplot, which would choose a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    (weights, optimizer), (mismatch, extent) = figure.subplots(2, 2)
    along = len(audits) > 1
    (_layers_along if along else _writebacks)(weights, audits)
    (_steps_along if along else _state)(optimizer, audits)
    has_sequences = any(pair.sequences for pair in audits[-1].mismatches)
    (_sequences if has_sequences else _log_ratio_along)(mismatch, audits)
    _ranges(extent, audits)
    last = audits[-1]
    figure.suptitle(f"precision {last.precision.name}, {last.timesteps:,} steps")
    figure.savefig(path, dpi=110)


def _steps(audits: Sequence[Audit]) -> list[int]:
    return [audit.timesteps for audit in audits]


def _layers_along(axes: Any, audits: Sequence[Audit]) -> None:
    from matplotlib import colormaps

    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    for layer in audits[-1].layers:
        shares = [next(x.unchanged for x in audit.layers if x.name == layer.name) for audit in audits]
        axes.plot(_steps(audits), np.multiply(shares, 100), label=layer.name, linewidth=1)
    axes.plot(_steps(audits), [100 * audit.unchanged for audit in audits], "k", linewidth=2, label="all")
    axes.set(
        title="nonzero updates that change nothing", xlabel="environment steps", ylabel="% of updates", ylim=(0, 100)
    )
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def _writebacks(axes: Any, audits: Sequence[Audit]) -> None:
    rows = audits[-1].writebacks
    places = np.arange(len(rows))
    for shift, name, label in ((-0.2, "unchanged", "updates that change nothing"), (0.2, "retained", "movement kept")):
        axes.barh(places + shift, [100 * getattr(row, name) for row in rows], 0.38, label=label)
    own = audits[-1].own_writeback
    axes.set_yticks(places, [f"{row.storage}, {row.writeback}" + (" (own)" if row is own else "") for row in rows])
    axes.invert_yaxis()
    axes.set(title="the same updates, written back in every way", xlabel="%", xlim=(0, 150))
    axes.legend(fontsize=8, loc="lower right")


def _steps_along(axes: Any, audits: Sequence[Audit]) -> None:
    for i, shadow in enumerate(audits[-1].shadows):
        rows = [audit.shadows[i] for audit in audits]
        axes.plot(_steps(audits), [row.ratio for row in rows], label=f"{shadow.optimizer}: size")
        axes.plot(_steps(audits), [row.cosine for row in rows], "--", label=f"{shadow.optimizer}: cosine")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(title="steps beside those of Adam in FP32", xlabel="environment steps", yscale="log")
    axes.legend(fontsize=8)


def _state(axes: Any, audits: Sequence[Audit]) -> None:
    rows = [(f"{row.name}\n{row.storage}", row.zero, row.subnormal, row.saturated) for row in audits[-1].state]
    rows += [(f"{row.optimizer}: second moment\nof the replay", row.zeroed, 0, 0) for row in audits[-1].shadows]
    places, left = np.arange(len(rows)), np.zeros(len(rows))
    for i, name in enumerate(("zero", "subnormal", "saturated"), start=1):
        shares = np.array([100 * row[i] for row in rows])
        axes.barh(places, shares, left=left, label=name)
        left += shares
    for place, total in zip(places, left, strict=True):
        axes.text(total + 1, place, f"{total:.2g} %", va="center", fontsize=8)
    axes.set_yticks(places, [row[0] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set(title="optimizer state that the format has lost", xlabel="% of the numbers", xlim=(0, 112))
    axes.legend(fontsize=8, loc="lower right")


def _sequences(axes: Any, audits: Sequence[Audit]) -> None:
    pairs = [pair for pair in audits[-1].mismatches if pair.sequences and pair.steps.std > 0]
    for colour, pair in enumerate(pairs):
        horizons = [row.horizon for row in pair.sequences]
        axes.plot(
            horizons,
            [row.rms.value for row in pair.sequences],
            f"C{colour}o-",
            markersize=3,
            label=f"{pair.acts} -> {pair.trains}",
        )
        low, high = ([getattr(row.rms, end) for row in pair.sequences] for end in ("low", "high"))
        axes.fill_between(horizons, low, high, color=f"C{colour}", alpha=0.2)
        axes.plot(horizons, [row.predicted_rms for row in pair.sequences], f"C{colour}:")
    axes.set(
        title="log-ratio of T steps at the same weights: RMS (dotted: predicted)",
        xlabel="T, steps of an episode",
        xscale="log",
    )
    if pairs:
        axes.set_yscale("log")
        axes.legend(fontsize=7, loc="lower right")


def _log_ratio_along(axes: Any, audits: Sequence[Audit]) -> None:
    axes.plot(_steps(audits), [audit.mismatches[0].steps.mean_abs for audit in audits], "o-", label="mean |d|")
    if all(audit.correction is not None for audit in audits):
        without = [audit.correction.without for audit in audits if audit.correction is not None]
        axes.plot(_steps(audits), without, "o--", label="without c")
    axes.set(title="log-ratio before an update", xlabel="environment steps")
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.legend(fontsize=8)


def _ranges(axes: Any, audits: Sequence[Audit]) -> None:
    rows = sorted(audits[-1].ranges, key=lambda row: -row.largest)[:_MOST_BARS]
    colours = ["C3" if row.saturated or row.used > 1 else "C0" for row in rows]
    axes.barh(np.arange(len(rows)), [max(row.largest, 1e-8) for row in rows], color=colours)
    axes.set_yticks(np.arange(len(rows)), [row.title for row in rows], fontsize=7)
    axes.axvline(65504, color="k", linestyle="--", label="65,504")
    axes.invert_yaxis()
    axes.set(title="largest numbers against FP16's range", xscale="log")
    axes.legend(fontsize=8, loc="lower right")
