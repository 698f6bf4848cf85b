"""What measurements mean in words: is precision hurting this model?"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sb3_fp16.audit.measurements import Measurements, percent
from sb3_fp16.audit.ranges import ADVICE, RangeRow

Level = Literal["fine", "watch", "hurts"]

# Where "fine" ends and where "hurts" begins. Of the movement that was due, what must take place:
RETAINED = (0.9, 0.5)
# of mixed precision's copies of weights, what must have moved over the replayed steps:
COPIES_MOVED = 0.5
# of the second moments, what may be zero although its gradients were not:
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


def verdicts_on(found: Measurements) -> list[Verdict]:
    """
    Answers in words, one or more per section.

    :param found: by an audit
    """
    sections = (_on_sticking, _on_optimizer, _on_mismatch, _on_range, _on_gradients)
    return [verdict for section in sections for verdict in section(found)]


def _level(value: float, limits: tuple[float, float]) -> Level:
    """By limits that increase, or decrease."""
    watch, hurts = limits
    sign = 1 if hurts > watch else -1
    return "hurts" if sign * value > sign * hurts else "watch" if sign * value > sign * watch else "fine"


def _on_sticking(found: Measurements) -> Iterator[Verdict]:
    if not any(layer.nonzero for layer in found.layers):
        text = "the replay made no update (a learning rate of 0, no gradients, or all steps skipped): nothing is known."
        yield Verdict("watch", "weights", text)
        return
    text = f"{percent(found.unchanged)} of the nonzero updates change no weight"
    way = found.own_writeback
    if way is None:
        yield Verdict("fine" if found.unchanged < 0.5 else "watch", "weights", text + ".")
        return
    if way.writeback.startswith("copy"):  # which lags behind; the FP32 weights lose nothing
        text = f"{percent(found.unchanged)} of the nonzero updates leave the 16-bit copy of a weight as it was"
        text += f"; {percent(way.moved)} of the copies moved"
        yield Verdict("fine" if way.moved >= COPIES_MOVED else "watch", "weights", text + ".")
        return
    level = _level(way.retained, RETAINED) if way.writeback == "nearest" else "fine"  # the others are unbiased
    text += f"; {percent(way.retained)} of the movement that is due takes place (noise {percent(way.noise)})"
    remedy = "" if level == "fine" else "; use writeback stochastic, dithered or residual"
    yield Verdict(level, "weights", text + remedy + ".")


def _on_optimizer(found: Measurements) -> Iterator[Verdict]:
    hypothetical = found.precision.optimizer != "sharp"
    own = [row for row in found.state if not (hypothetical and row.storage == "fp16" != found.precision.storage)]
    second = [row for row in own if "second" in row.name or row.name == "exp_avg_sq"]
    for row in second:
        text = f"{percent(row.lost)} of the second moments are zero without cause, {percent(row.subnormal)} subnormal"
        level = _level(row.lost, ZERO_STATE)
        if row.saturated > 0:
            level, text = "hurts", f"{text}, {percent(row.saturated)} saturated; lower state_scale"
        yield Verdict(level, "optimizer", text + ".")
    naive = hypothetical and found.precision.storage == "fp16"
    for shadow in found.shadows[naive:][:1]:
        if shadow.ratio == 0:  # there were no gradients
            continue
        fits = 1 / STEP_RATIO <= shadow.ratio <= STEP_RATIO and shadow.cosine >= STEP_COSINE
        whose = f"{shadow.optimizer} takes" if naive or not hypothetical else "fp16's SHARP would take"
        text = f"{whose} {shadow.ratio:.2f} times the step of Adam in FP32, cosine {shadow.cosine:.3f}."
        yield Verdict("fine" if fits else "hurts" if naive else "watch", "optimizer", text)
    for root in found.roots:
        frozen = found.precision.root_rounding == "nearest" and root.dead_band > DEAD_BAND
        text = f"{percent(root.clipped_rows)} of the rows are clipped"
        if found.precision.root_rounding == "nearest":
            text += f"; {percent(root.dead_band)} of the second moments are frozen by rounding to nearest"
        yield Verdict("watch" if frozen else "fine", "optimizer", text + (", use dithered." if frozen else "."))


def _on_mismatch(found: Measurements) -> Iterator[Verdict]:
    for mismatch in found.mismatches[:1]:
        noise = mismatch.steps.std / math.log1p(found.clip_range) if found.clip_range > 0 else math.inf
        text = f"before an update the log-ratio is off by {mismatch.steps.mean_abs:.2g} on average, its spread "
        text += f"{percent(noise)} of the clip bound"
        if found.correction is not None:
            text += f"; without c it would be off by {found.correction.without:.2g}"
        yield Verdict(_level(noise, RATIO_NOISE), "mismatch", text + ".")


def _on_range(found: Measurements) -> Iterator[Verdict]:
    def size(row: RangeRow) -> tuple[bool, float]:
        return row.saturated > 0, row.largest if math.isfinite(row.largest) else math.inf

    worst = max(found.ranges, key=size)
    level = "hurts" if worst.saturated else _level(worst.used, RANGE)
    text = f"{worst.title} reaches {worst.largest:.4g}, {percent(worst.used)} of FP16's range"
    if worst.saturated:
        text += f", and {worst.saturated:,} saturated"
    if found.precision.storage != "fp16" and level == "hurts":
        level, text = "watch", text + "; FP16 would saturate"
    yield Verdict(level, "range", text + ("." if level == "fine" else f"; {ADVICE[worst.kind]}."))


def _on_gradients(found: Measurements) -> Iterator[Verdict]:
    if not found.gradients:
        return
    scaled = found.precision.gradient_scaling != "off" or found.precision.storage != "fp16"
    row = max(found.gradients, key=lambda row: row.flushed_when_scaled if scaled else row.flushed)
    flushed = row.flushed_when_scaled if scaled else row.flushed
    text = f"FP16 flushes {percent(flushed)} of the gradients of {row.name}"
    text += f" at a scale of {row.scale:g}, {percent(row.flushed)} without" if scaled else ""
    level = _level(flushed, FLUSHED)
    if found.precision.storage != "fp16" and level == "hurts":
        level = "watch"
    yield Verdict(level, "gradients", text + ".")
