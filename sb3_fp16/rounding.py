"""Rounding an FP32 value to a 16-bit format: to nearest, stochastically, dithered, and what saturates.

Nearest rounding is what ``tensor.to(dtype)`` does. The other two compare the fraction of a grid step that the value
has covered with a threshold in [0, 1): a uniform draw makes the result right on average over draws (stochastic), a
low-discrepancy sequence makes it right on average over consecutive steps (dithered).

Both threshold sequences are functions of (step, element index) alone. They need no state, replay under a CUDA graph,
and give the same bits on every device.
"""

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


def saturate(values: Tensor, dtype: th.dtype) -> Tensor:
    """
    Clamp to the finite range of a format; NaN stays NaN.

    :param values: FP32, any shape
    :param dtype: the format that will store them
    :return: FP32, same shape
    """
    largest = th.finfo(dtype).max
    return values.clamp(-largest, largest)


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


def round_by_threshold(values: Tensor, thresholds: Tensor, dtype: th.dtype) -> Tensor:
    """
    Round the magnitude up where the covered fraction of its grid step exceeds the threshold, else down.

    A value on the grid never moves. With a uniform threshold, P(up) is the covered fraction, to 2^-24.

    :param values: FP32, any shape
    :param thresholds: FP32 in [0, 1), same shape
    :param dtype: ``torch.float16`` or ``torch.bfloat16``
    :return: FP32 numbers on the grid of ``dtype``, same shape
    """
    info = th.finfo(dtype)
    magnitude = values.abs()
    power_of_two = (magnitude.view(th.int32) & _EXPONENT_MASK).view(th.float32)
    tick = power_of_two.clamp_min(info.smallest_normal) * info.eps
    covered = magnitude / tick  # exact: a division by a power of two
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
