"""Number formats, and rounding an FP32 value to one: to nearest, stochastically, dithered.

Stochastic and dithered rounding compare the fraction of a grid step that the value
has covered with a threshold in [0, 1): a uniform draw makes the result right on average over draws (stochastic), a
low-discrepancy sequence makes it right on average over consecutive steps (dithered).

Both threshold sequences are functions of (step, element index) alone. They need no state, replay under a CUDA graph,
and give the same bits on every device.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch as th
from torch import Tensor

_EXPONENT_MASK = 0x7F800000  # of an FP32 word
_THRESHOLD_BITS = 24  # as many as an FP32 number holds exactly


def _int32(word: int) -> int:
    """Reinterpret a 32-bit word as the signed integer torch stores it in."""
    return word - (1 << 32) if word >= 1 << 31 else word


# Odd constants far from small rationals (the first is 2^32 divided by the golden ratio): along either axis the
# products modulo 2^32 fill [0, 2^32) evenly, which is what a dither needs.
_STEP_STRIDE = _int32(0x9E3779B9)
_INDEX_STRIDE = _int32(0xC13FA9A9)


@dataclass(frozen=True)
class Format:
    """
    A floating-point format, held in tensors of a torch dtype that contains it.

    :param name: as users write it
    :param dtype: of the tensors
    :param significand_bits: explicit ones; fewer than the dtype's own in the formats that torch doesn't know
    """

    name: str
    dtype: th.dtype
    significand_bits: int

    @property
    def is_native(self) -> bool:
        """Whether the dtype is the format itself."""
        return th.finfo(self.dtype).eps == 2.0**-self.significand_bits

    @property
    def max(self) -> float:
        """Largest finite number."""
        info = th.finfo(self.dtype)
        return float(info.max * (2 - 2.0**-self.significand_bits) / (2 - info.eps))

    @property
    def smallest_normal(self) -> float:
        """Smallest number with a full significand."""
        return float(th.finfo(self.dtype).smallest_normal)

    def saturate(self, values: Tensor) -> Tensor:
        """Clamp FP32 values to the finite range; NaN stays NaN."""
        return values.clamp(-self.max, self.max)

    def store(self, values: Tensor) -> Tensor:
        """Round FP32 values to nearest, saturating; no gradients."""
        return self._round(self.saturate(values))

    def round(self, values: Tensor) -> Tensor:
        """Round FP32 values to nearest, beyond the range to infinity; their gradients come back in FP32."""
        if self.is_native:
            return values.to(self.dtype)
        rounded: Tensor = _ShortRound.apply(values, self)  # type: ignore[no-untyped-call]
        return rounded

    def upcast(self, values: Tensor) -> Tensor:
        """FP32 copy of values of the format, or of FP32 values rounded to it; gradients are rounded to the format."""
        if self.is_native:
            return values.to(self.dtype).float()
        copy: Tensor = _ShortUpcast.apply(values, self)  # type: ignore[no-untyped-call]
        return copy

    def _round(self, values: Tensor) -> Tensor:
        if self.is_native:
            return values.to(self.dtype)
        values = values.float()
        tick = self.tick(values)
        rounded = (values / tick).round() * tick  # ties to even
        return rounded.masked_fill(rounded.abs() > self.max, th.inf).copysign(values).to(self.dtype)

    def tick(self, values: Tensor) -> Tensor:
        """Distance between neighbouring numbers of the format at FP32 values."""
        power_of_two = (values.abs().view(th.int32) & _EXPONENT_MASK).view(th.float32)
        return power_of_two.clamp_min(self.smallest_normal) * 2.0**-self.significand_bits


class _ShortRound(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: Format) -> Tensor:
        return kind._round(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].float(), None


class _ShortUpcast(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, kind: Format) -> Tensor:
        ctx.kind = kind
        return values.float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kind._round(gradients[0]), None


FORMATS = {
    "fp16": Format("fp16", th.float16, 10),
    "bf16": Format("bf16", th.bfloat16, 7),
    "fp32": Format("fp32", th.float32, 23),
    **{f"e5m{bits}": Format(f"e5m{bits}", th.float16, bits) for bits in (9, 8, 7, 6, 5)},
}


@cache
def format_of(dtype: th.dtype, significand_bits: int | None = None) -> Format:
    """
    The format that tensors of a dtype hold.

    :param dtype: float16, bfloat16 or float32
    :param significand_bits: explicit ones, where fewer than the dtype's own
    """
    matching = (kind for kind in FORMATS.values() if kind.dtype == dtype)
    return next(kind for kind in matching if significand_bits in (None, kind.significand_bits))


def check_finite(values: Tensor, name: str) -> None:
    """
    Refuse NaN and infinity before they reach a policy or a rollout.

    :param values: one row per environment
    :param name: what one of them is, for the message
    :raises ValueError: naming the value and, where there are several, the first environment with such a value
    """
    finite = th.isfinite(values)
    if not finite.all():
        first = tuple((~finite).nonzero()[0].tolist())
        where = f" in environment {first[0]}" if len(values) > 1 else ""
        raise ValueError(f"{name} is {float(values[first])}{where}; it must be finite.")


def round_by_threshold(values: Tensor, thresholds: Tensor, kind: Format) -> Tensor:
    """
    Round the magnitude up where the covered fraction of its grid step exceeds the threshold, else down.

    A value on the grid never moves. With a uniform threshold, P(up) is the covered fraction, to 2^-24.

    :param values: FP32, any shape
    :param thresholds: FP32 in [0, 1), same shape
    :param kind: format to round to
    :return: FP32 numbers on the grid of the format, same shape
    """
    tick = kind.tick(values)
    covered = values.abs() / tick  # exact: a division by a power of two
    whole = covered.floor()
    return ((whole + (covered - whole > thresholds)) * tick).copysign(values)


def dither_key(step: Tensor, salt: int) -> Tensor:
    """
    What one step contributes to ``dither_thresholds``.

    :param step: integers, any shape
    :param salt: 32-bit word that keeps two users of the sequence apart
    :return: int32, same shape
    """
    return step.to(th.int32) * _STEP_STRIDE + _int32(salt)


def dither_thresholds(index: Tensor, key: Tensor) -> Tensor:
    """
    A two-dimensional Weyl sequence: evenly spread over the steps of one element and over the elements of one step.

    :param index: int32, position of each element in its arena
    :param key: int32, ``dither_key`` of each element's step (same shape, or one number)
    :return: FP32 in [0, 1), shape of ``index``
    """
    return _unit_interval(index * _INDEX_STRIDE + key)


def random_key(step: Tensor, salt: int, seed: int) -> Tensor:
    """
    What one step contributes to ``random_thresholds``.

    :param step: integers, any shape
    :param salt: 32-bit word that keeps two users of the generator apart
    :param seed: 32-bit seed of the run
    :return: int32, same shape
    """
    return _mix(_mix(step.to(th.int32) * _STEP_STRIDE ^ _int32(seed)) ^ _int32(salt))


def random_thresholds(index: Tensor, key: Tensor) -> Tensor:
    """
    Counter-based pseudo-random thresholds: a hash of (seed, step, index) in place of a generator with state.

    :param index: int32, position of each element in its arena
    :param key: int32, ``random_key`` of each element's step (same shape, or one number)
    :return: FP32 in [0, 1), shape of ``index``
    """
    return _unit_interval(_mix(index * _INDEX_STRIDE ^ key))


def _mix(word: Tensor) -> Tensor:
    """Scramble 32-bit words so that each input bit flips each output bit half of the time (a Murmur-type finalizer)."""
    word = (word ^ _shift_right(word, 16)) * _int32(0x7FEB352D)
    word = (word ^ _shift_right(word, 15)) * _int32(0x846CA68B)
    return word ^ _shift_right(word, 16)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's own repeats the sign bit."""
    return (word >> bits) & ((1 << (32 - bits)) - 1)


def _unit_interval(word: Tensor) -> Tensor:
    return _shift_right(word, 32 - _THRESHOLD_BITS).float() * 2.0**-_THRESHOLD_BITS
