"""An audit: what was measured, what it means in words, and all of it as rows."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_fp16.audit.mismatch import CorrectionRow, Mismatch, as_trained, between_formats
from sb3_fp16.audit.optimizer import RootRow, RootWatch, Shadow, ShadowRow, StateRow, state_rows
from sb3_fp16.audit.ranges import ADVICE, GradientRange, GradientRow, RangeRow, range_rows
from sb3_fp16.audit.statistics import StepStatistics
from sb3_fp16.audit.sticking import LayerSticking, OwnSticking, WritebackRow, WritebackSimulation
from sb3_fp16.audit.twin import SINGLE, Step, parameters_of, replay, same_random_numbers, twin_of
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.sharp import SHARP

Level = Literal["fine", "watch", "hurts"]

# Where "fine" ends and where "hurts" begins. Of the movement that was due, what must take place:
RETAINED = (0.9, 0.5)
# of mixed precision's copies of weights, what must have moved over the replayed steps:
COPIES_MOVED = 0.5
# of Adam's second moments, what may be zero:
ZERO_STATE = (0.01, 0.1)
# of SHARP's step, how far its size may be off Adam's, and how far its direction:
STEP_RATIO, STEP_COSINE = 2.0, 0.7
# of root second moments, what may be frozen:
DEAD_BAND = 0.5
# of PPO's clip bound log(1 + ε), what the noise of a log-ratio may take:
RATIO_NOISE = (0.01, 0.1)
# of FP16's range, what may be used:
RANGE = (0.25, 1.0)
# of the gradients, what may flush to zero:
FLUSHED = (0.1, 0.5)


class Verdict(NamedTuple):
    """
    One answer to whether precision is hurting a model.

    :param level: ``fine``, ``watch`` or ``hurts``
    :param section: what was looked at
    :param text: the answer, with its figures and, where there is one, a remedy
    """

    level: Level
    section: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<6}{self.section:<10}{self.text}"


@dataclass(frozen=True)
class Audit:
    """
    What the number format does to a model; sections that do not apply are empty.

    :param timesteps: environment steps that the model was trained for
    :param precision: its number format and protections
    :param clip_range: PPO's ε at that time
    :param layers: stuck updates of the weights that its layers see
    :param writebacks: the same FP32 updates written back in every way
    :param state: the optimizer's state
    :param shadows: optimizers beside Adam in FP32
    :param roots: SHARP's root second moments
    :param mismatches: between the policy that acts and the one a trainer evaluates, as trained first
    :param correction: what module B's c takes away
    :param ranges: largest numbers
    :param gradients: against FP16's lower end
    """

    timesteps: int
    precision: Precision
    clip_range: float
    layers: tuple[LayerSticking, ...]
    writebacks: tuple[WritebackRow, ...]
    state: tuple[StateRow, ...]
    shadows: tuple[ShadowRow, ...]
    roots: tuple[RootRow, ...]
    mismatches: tuple[Mismatch, ...]
    correction: CorrectionRow | None
    ranges: tuple[RangeRow, ...]
    gradients: tuple[GradientRow, ...]

    @property
    def unchanged(self) -> float:
        """Share of the nonzero updates of the model's own weights that changed nothing."""
        nonzero = sum(layer.nonzero for layer in self.layers)
        return sum(layer.unchanged * layer.nonzero for layer in self.layers) / max(1, nonzero)

    @property
    def own_writeback(self) -> WritebackRow | None:
        """That of ``writebacks`` which is the model's own; None for FP32 weights and short significands."""
        wanted = _own_way(self.precision)
        return next((row for row in self.writebacks if (row.storage, row.writeback) == wanted), None)

    def verdicts(self) -> list[Verdict]:
        """Answers in words, a section each."""
        sections = (_on_sticking, _on_optimizer, _on_mismatch, _on_range, _on_gradients)
        return [verdict for section in sections for verdict in section(self)]

    def rows(self) -> list[dict[str, Any]]:
        """Everything as rows of ``timesteps``, ``section``, ``subject``, ``measure`` and ``value``, for a table."""
        return [
            {"timesteps": self.timesteps, "section": section, "subject": subject, "measure": name, "value": value}
            for section, subject, measures in _measures(self)
            for name, value in measures.items()
        ]

    def __str__(self) -> str:
        head = f"precision {self.precision.name}, after {self.timesteps:,} steps"
        return "\n".join([head, *map(str, self.verdicts()), "", *_tables(self)])


def audit(
    model: PPO, rollout: RolloutBuffer, minibatches: int = 32, samples: int = 1024, formats: bool = True
) -> Audit:
    """
    Measure what the number format does to a model, which stays as it is, as do all random number generators.

    :param model: of PPOFP16 or SB3's PPO
    :param rollout: complete, and collected with the weights that the model has now: of the last update it is not
    :param minibatches: of a replayed update, at most one epoch
    :param samples: of the rollout that activations and the log-ratio are evaluated at
    :param formats: also compare implementations and formats of the policy, over the whole rollout
    :raises ValueError: if the rollout is not complete, or the model's outputs or gradients are not finite
    """
    if not rollout.full:
        raise ValueError(f"The rollout holds {rollout.pos} of {rollout.buffer_size} steps; collect all of it first.")
    with same_random_numbers():
        own, single = twin_of(model), twin_of(model, SINGLE)
        mismatch, correction = as_trained(own, rollout, samples)
        others = between_formats(own, rollout) if formats else []
        ranges = range_rows(single, rollout, samples)
        state = state_rows(own)
        layers, shadow = OwnSticking(own), Shadow(model)
        roots = RootWatch(own) if isinstance(own.policy.optimizer, SHARP) else None
        replay(own, rollout, minibatches, _each_of([layers, shadow, *([] if roots is None else [roots])]))
        writebacks, gradients = WritebackSimulation(), GradientRange(*_scales(single))
        replay(single, rollout, minibatches, _each_of([writebacks, gradients]))
    return Audit(
        timesteps=model.num_timesteps,
        precision=own.precision,
        clip_range=own.update_settings().clip_range,
        layers=tuple(layers.rows()),
        writebacks=tuple(writebacks.rows()),
        state=tuple(state),
        shadows=tuple(shadow.rows()),
        roots=() if roots is None else tuple(roots.rows()),
        mismatches=(mismatch, *others),
        correction=correction,
        ranges=tuple(ranges),
        gradients=tuple(gradients.rows()),
    )


def _each_of(watchers: Sequence[Any]) -> Any:
    def observe(step: Step) -> None:
        for watcher in watchers:
            watcher.observe(step)

    return observe


def _scales(single: PPOFP16) -> tuple[list[str], list[float]]:
    """Parameters, and the scale that the preset ``fp16`` gives each one's loss."""
    half = twin_of(single, "fp16")
    scales = half.engine.state_dict()["scales"].tolist()
    network_of = {id(p): k for k, network in enumerate(half.policy.networks.values()) for p in network}
    return list(parameters_of(single)), [scales[network_of[id(p)]] for p in parameters_of(half).values()]


def _own_way(precision: Precision) -> tuple[str, str]:
    if precision.compute != "storage":
        rounding = "stochastic" if precision.compute.endswith("-sr") else "nearest"
        return precision.compute_format.name, f"copy, {rounding}"
    return precision.storage, "nearest" if precision.writeback == "swallowed" else precision.writeback


def _level(value: float, limits: tuple[float, float]) -> Level:
    """By limits that increase, or decrease."""
    watch, hurts = limits
    sign = 1 if hurts > watch else -1
    return "hurts" if sign * value > sign * hurts else "watch" if sign * value > sign * watch else "fine"


def _on_sticking(audit: Audit) -> Iterator[Verdict]:
    text = f"{_percent(audit.unchanged)} of the nonzero updates change no weight"
    way = audit.own_writeback
    if way is None:
        yield Verdict("fine" if audit.unchanged < 0.5 else "watch", "weights", text + ".")
        return
    if way.writeback.startswith("copy"):  # which lags behind; the FP32 weights lose nothing
        text = f"{_percent(audit.unchanged)} of the nonzero updates leave the 16-bit copy of a weight as it was"
        text += f"; {_percent(way.moved)} of the copies moved"
        yield Verdict("fine" if way.moved >= COPIES_MOVED else "watch", "weights", text + ".")
        return
    level = _level(way.retained, RETAINED) if way.writeback == "nearest" else "fine"  # the others are unbiased
    text += f"; {_percent(way.retained)} of the movement that is due takes place (noise {_percent(way.noise)})"
    remedy = "" if level == "fine" else "; use writeback stochastic, dithered or residual"
    yield Verdict(level, "weights", text + remedy + ".")


def _on_optimizer(audit: Audit) -> Iterator[Verdict]:
    hypothetical = audit.precision.optimizer != "sharp"
    own = [row for row in audit.state if not (hypothetical and row.storage == "fp16" != audit.precision.storage)]
    second = [row for row in own if "second" in row.name or row.name == "exp_avg_sq"]
    for row in second:
        text = f"{_percent(row.zero)} of the second moments are zero, {_percent(row.subnormal)} subnormal"
        level = _level(row.zero, ZERO_STATE)
        if row.saturated > 0:
            level, text = "hurts", f"{text}, {_percent(row.saturated)} saturated; lower state_scale"
        yield Verdict(level, "optimizer", text + ".")
    for shadow in audit.shadows[:1]:
        fits = 1 / STEP_RATIO <= shadow.ratio <= STEP_RATIO and shadow.cosine >= STEP_COSINE
        whose = "fp16's SHARP would take" if hypothetical else "SHARP takes"
        text = f"{whose} {shadow.ratio:.2f} times the step of Adam in FP32, cosine {shadow.cosine:.3f}."
        yield Verdict("fine" if fits else "watch", "optimizer", text)
    for root in audit.roots:
        frozen = audit.precision.root_rounding == "nearest" and root.dead_band > DEAD_BAND
        text = f"{_percent(root.clipped_rows)} of the rows are clipped"
        if audit.precision.root_rounding == "nearest":
            text += f"; {_percent(root.dead_band)} of the second moments are frozen by rounding to nearest"
        yield Verdict("watch" if frozen else "fine", "optimizer", text + (", use dithered." if frozen else "."))


def _on_mismatch(audit: Audit) -> Iterator[Verdict]:
    for mismatch in audit.mismatches[:1]:
        noise = mismatch.steps.std / math.log1p(audit.clip_range) if audit.clip_range > 0 else math.inf
        text = f"before an update the log-ratio is off by {mismatch.steps.mean_abs:.2g} on average, its spread "
        text += f"{_percent(noise)} of the clip bound"
        if audit.correction is not None:
            text += f"; without c it would be off by {audit.correction.without:.2g}"
        yield Verdict(_level(noise, RATIO_NOISE), "mismatch", text + ".")


def _on_range(audit: Audit) -> Iterator[Verdict]:
    def size(row: RangeRow) -> tuple[bool, float]:
        return row.saturated > 0, row.largest if math.isfinite(row.largest) else math.inf

    worst = max(audit.ranges, key=size)
    level = "hurts" if worst.saturated else _level(worst.used, RANGE)
    text = f"{worst.title} reaches {worst.largest:.4g}, {_percent(worst.used)} of FP16's range"
    if worst.saturated:
        text += f", and {worst.saturated:,} saturated"
    if audit.precision.storage != "fp16" and level == "hurts":
        level, text = "watch", text + "; FP16 would saturate"
    yield Verdict(level, "range", text + ("." if level == "fine" else f"; {ADVICE[worst.kind]}."))


def _on_gradients(audit: Audit) -> Iterator[Verdict]:
    if not audit.gradients:
        return
    scaled = audit.precision.gradient_scaling != "off" or audit.precision.storage != "fp16"
    row = max(audit.gradients, key=lambda row: row.flushed_when_scaled if scaled else row.flushed)
    flushed = row.flushed_when_scaled if scaled else row.flushed
    text = f"FP16 flushes {_percent(flushed)} of the gradients of {row.name}"
    text += f" at a scale of {row.scale:g}, {_percent(row.flushed)} without" if scaled else ""
    level = _level(flushed, FLUSHED)
    if audit.precision.storage != "fp16" and level == "hurts":
        level = "watch"
    yield Verdict(level, "gradients", text + ".")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _measures(audit: Audit) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Section, subject, and figures by name."""
    for layer in audit.layers:
        yield "layers", layer.name, _numbers(layer._asdict())
    for way in audit.writebacks:
        yield "writebacks", f"{way.storage}, {way.writeback}", _numbers(way._asdict())
    for state in audit.state:
        yield "state", f"{state.name}, {state.storage}", _numbers(state._asdict())
    for shadow in audit.shadows:
        yield "shadow", shadow.optimizer, _numbers(shadow._asdict())
    for root in audit.roots:
        yield "roots", "SHARP", _numbers(root._asdict())
    for mismatch in audit.mismatches:
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
    if audit.correction is not None:
        yield "correction", "c", _numbers(audit.correction._asdict())
    for extent in audit.ranges:
        yield "range", extent.title, {"largest": extent.largest, "saturated": extent.saturated}
    for gradient in audit.gradients:
        yield "gradients", gradient.name, _numbers(gradient._asdict())


def _numbers(figures: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not isinstance(value, str)}


def _tables(audit: Audit) -> Iterator[str]:
    """The sections as text for a terminal."""
    yield from _table(
        "writing 16-bit weights back",
        ("unchanged", "moved", "retained", "noise", "steps/half tick"),
        ((f"{r.storage}, {r.writeback}", *map(_percent, r[2:6]), f"{r[6]:.3g}") for r in audit.writebacks),
    )
    yield from _table(
        "updates of the model's own weights",
        ("weights", "unchanged", "moved"),
        ((r.name, f"{r.weights:,}", _percent(r.unchanged), _percent(r.moved)) for r in audit.layers),
    )
    yield from _table(
        "optimizer state",
        ("elements", "zero", "subnormal", "saturated"),
        ((f"{r.name}, {r.storage}", f"{r.elements:,}", *map(_percent, r[3:])) for r in audit.state),
    )
    yield from _table(
        "steps beside Adam in FP32",
        ("ratio", "cosine", "zeroed"),
        ((r.optimizer, f"{r.ratio:.4g}", f"{r.cosine:.4f}", _percent(r.zeroed)) for r in audit.shadows),
    )
    pairs = ((f"{m.acts} -> {m.trains}", m.steps) for m in audit.mismatches)
    yield from _table(
        "log-ratio at the same weights",
        ("mean |d|", "exactly 0", "KL", "k1", "k2", "k3", "E[e^d] - 1"),
        (
            (pair, f"{s.mean_abs:.3g}", _percent(s.zero_fraction), *map("{:.3g}".format, _estimates(s)))
            for pair, s in pairs
        ),
    )
    yield from _table(
        "largest numbers",
        ("largest", "of 65,504", "saturated"),
        ((r.title, f"{r.largest:.4g}", _percent(r.used), f"{r.saturated:,}") for r in audit.ranges),
    )
    yield from _table(
        "gradients that FP16 flushes or shortens",
        ("scale", "flushed", "subnormal", "scaled: flushed", "subnormal"),
        ((r.name, f"{r.scale:g}", *map(_percent, r[2:])) for r in audit.gradients),
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
