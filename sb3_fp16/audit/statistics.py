"""
What log-ratios say of a mismatch between two implementations of one policy.

d = log π(a|s) − log μ(a|s) of actions a that μ took. Where both are normalised and π covers μ, E[e^d] = 1 and
E[d] = −KL(μ‖π) at every step, whatever came before it, so that the log-ratio S_T = Σ d of T steps drifts by minus the
sum of their KL, with no assumption of independence. Its variance is Σ Var(d_t) only where covariances are small.
Source: "BF16 vs. FP16 in RL Fine-Tuning" (2026), sections "From states to token probabilities" and "Why sequence
mismatch develops a drift".

NumPy alone, in float64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

_NO_END = np.iinfo(np.int64).max


class Interval(NamedTuple):
    """
    A statistic and its confidence interval.

    :param value: of all the data
    :param low: end of the interval, NaN where there is none
    :param high: the other end
    """

    value: float
    low: float
    high: float


def bootstrap(
    values: ArrayLike,
    statistic: Callable[[Array], Any],
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Interval:
    """
    Percentile interval from resampling whole sequences, which leaves the dependence inside each of them as it is.

    :param values: shape (sequences, ...); one sequence alone gets an interval of NaN
    :param statistic: from an array like ``values`` to a number
    :param resamples: how many
    :param seed: of the draws
    :param level: share of the resamples inside the interval
    :raises ValueError: if there is no sequence, or a value is not finite
    """
    values = _finite("values", values)
    sequences = len(values) if values.ndim else 0
    if sequences == 0:
        raise ValueError(f"values has shape {values.shape}: there is no sequence to resample")
    value = float(statistic(values))
    if sequences == 1:
        return Interval(value, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    drawn = [float(statistic(values[rng.integers(sequences, size=sequences)])) for _ in range(resamples)]
    return _interval(value, drawn, level)


def _interval(value: float, drawn: Any, level: float = 0.95) -> Interval:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


@dataclass(frozen=True)
class StepStatistics:
    """
    Log-ratios of single steps.

    :param count: steps
    :param zero_fraction: share where d is exactly 0
    :param mean_abs: mean |d|
    :param kl: mean of the KL computed from both distributions, NaN where that is unknown
    :param k1: −mean d, unbiased for the KL, noisy where it is small
    :param k2: mean d²/2
    :param k3: mean (e^d − 1 − d), unbiased and never negative
    :param mean_ratio: mean e^d, which is 1 for normalised distributions
    :param mean_ratio_error: its standard error, NaN for a single step; since e^d − 1 has mean 0 at every step whatever
        came before, steps of one sequence are uncorrelated in it and count each for itself
    :param std: σ of d
    """

    count: int
    zero_fraction: float
    mean_abs: float
    kl: float
    k1: float
    k2: float
    k3: float
    mean_ratio: float
    mean_ratio_error: float
    std: float

    @classmethod
    def of(cls, d: ArrayLike, kl: ArrayLike | None = None) -> "StepStatistics":
        """
        From log-ratios of any shape, none of them padding.

        :param d: log-ratios
        :param kl: KL(μ‖π) at the same steps, computed from both distributions
        :raises ValueError: if there are none, or one is not finite
        """
        d = _finite("d", d)
        if d.size == 0:
            raise ValueError("d is empty: there are no steps")
        with np.errstate(over="ignore", invalid="ignore"):  # a ratio beyond float64 shows as inf, not as a warning
            change = np.expm1(d)
            error = change.std(ddof=1) / np.sqrt(d.size) if d.size > 1 else np.nan
        return cls(
            count=d.size,
            zero_fraction=float((d == 0).mean()),
            mean_abs=float(np.abs(d).mean()),
            kl=np.nan if kl is None else float(_finite("kl", kl).mean()),
            k1=float(-d.mean()),
            k2=float((d**2).mean() / 2),
            k3=float((change - d).mean()),
            mean_ratio=float(1 + change.mean()),
            mean_ratio_error=float(error),
            std=float(d.std()),
        )


@dataclass(frozen=True)
class SequenceRow:
    """
    Log-ratios S_T of the first T steps of sequences, beside what single steps predict.

    :param horizon: T, in steps
    :param sequences: how many were observed that far
    :param mean: E[S_T]
    :param std: SD(S_T)
    :param rms: sqrt(E[S_T²])
    :param predicted_mean: −Tκ, κ the KL per step
    :param predicted_rms: sqrt(Tσ² + T²κ²), which omits all covariance
    :param covariance_share: Var(S_T) / Σ_t Var(d_t): 1 where steps are uncorrelated, NaN where nothing varies
    :param cumulative_kl: mean of the KL summed over the first T steps, which is −E[S_T] exactly in expectation; NaN
        where the KL is unknown
    """

    horizon: int
    sequences: int
    mean: Interval
    std: Interval
    rms: Interval
    predicted_mean: float
    predicted_rms: float
    covariance_share: float
    cumulative_kl: float


def sequence_statistics(
    d: ArrayLike,
    horizons: Sequence[int],
    kl: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    available: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> list[SequenceRow]:
    """
    Log-ratios at fixed prefixes.

    A sequence may end by itself: a terminal state, an end-of-text token. From there on d counts as 0, and the sequence
    stays in the sample of every later horizon. To keep only sequences that lasted T steps, or to sort them by their
    final length, would select on a stopping event that depends on the actions, as d does; E[S_T] = −Σ KL does not
    hold in such a selection.

    Recording may also stop. A sequence is eligible for horizon T if ``available`` ≥ T, whether it ended before T or
    not. What recording leaves room for is settled when a sequence starts, so that it tells nothing of d.
    A sequence that ended before recording stopped, but has less room than T, is therefore left out although all of its
    S_T is known: its longer neighbours with as little room are not known, and short ones alone would be a selection.

    κ and σ of the predictions are those of all recorded steps; κ is the mean of ``kl``, or of e^d − 1 − d without it.
    Where sequences end by themselves, T and T² in the predictions are the means of min(T, length) and of its square.

    :param d: log-ratios, shape (sequences, steps); whatever stands after the recorded steps of a sequence is ignored
    :param horizons: T of each row, in steps; those with fewer than two eligible sequences are left out
    :param kl: KL(μ‖π) at the same steps, computed from both distributions, shape as ``d``
    :param lengths: steps until each sequence ended by itself, shape (sequences,); a number above ``available``, or None
        for all, where it did not
    :param available: steps that could have been observed from the start of each sequence before recording stopped,
        shape (sequences,); may exceed the steps of ``d`` where sequences ended earlier; None where it is those steps
    :param resamples: of whole sequences, for the intervals
    :param seed: of the resampling
    :raises ValueError: if shapes differ, a horizon is not positive, recorded steps are missing from ``d``, or one is
        not finite
    """
    d = np.asarray(d, dtype=np.float64)
    if d.ndim != 2:
        raise ValueError(f"d has shape {d.shape}, not (sequences, steps)")
    if min(horizons, default=1) < 1:
        raise ValueError(f"horizons are numbers of steps from 1 on, not {list(horizons)}")
    lengths = _step_counts("lengths", lengths, len(d), _NO_END)
    available = _step_counts("available", available, len(d), d.shape[1])
    recorded = np.minimum(lengths, available)
    if recorded.max(initial=0) > d.shape[1]:
        worst = int(recorded.argmax())
        raise ValueError(f"d has {d.shape[1]} steps, but {recorded[worst]} were recorded of sequence {worst}")
    seen = np.arange(d.shape[1]) < recorded[:, None]
    d = _finite("d", np.where(seen, d, 0))
    if kl is not None:
        kl = np.asarray(kl, dtype=np.float64)
        if kl.shape != d.shape:
            raise ValueError(f"kl has shape {kl.shape}, d has {d.shape}")
        kl = _finite("kl", np.where(seen, kl, 0))
    if not seen.any():
        return []
    steps = StepStatistics.of(d[seen], None if kl is None else kl[seen])
    rows = []
    for horizon in horizons:
        eligible = available >= horizon
        if eligible.sum() >= 2:
            prefix = d[eligible, :horizon]
            live = np.minimum(lengths[eligible], horizon).astype(np.float64)
            summed_kl = np.nan if kl is None else float(kl[eligible, :horizon].sum(axis=1).mean())
            rows.append(_sequence_row(horizon, prefix, live, summed_kl, steps, resamples, seed))
    return rows


def _sequence_row(
    horizon: int,
    prefix: Array,
    live: Array,
    cumulative_kl: float,
    steps: StepStatistics,
    resamples: int,
    seed: int,
) -> SequenceRow:
    """
    One horizon.

    :param prefix: d of eligible sequences, 0 after their end, shape (sequences, up to T)
    :param live: steps of each until its end or T, shape (sequences,)
    """
    sums = prefix.sum(axis=1)
    kappa = steps.k3 if np.isnan(steps.kl) else steps.kl
    variances = prefix.var(axis=0).sum()

    # As ``bootstrap`` does it, all three statistics from one set of resamples and without a loop over them.
    draws = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    resampled = sums[draws]

    def interval(statistic: Callable[..., Any]) -> Interval:
        return _interval(float(statistic(sums, axis=0)), statistic(resampled, axis=1))

    return SequenceRow(
        horizon=horizon,
        sequences=len(prefix),
        mean=interval(np.mean),
        std=interval(np.std),
        rms=interval(lambda s, axis: np.sqrt(np.mean(s**2, axis=axis))),
        predicted_mean=float(-live.mean() * kappa),
        predicted_rms=float(np.sqrt(live.mean() * steps.std**2 + (live**2).mean() * kappa**2)),
        covariance_share=float(sums.var() / variances) if variances > 0 else np.nan,
        cumulative_kl=cumulative_kl,
    )


@dataclass(frozen=True)
class SliceRow:
    """
    Log-ratios of actions that the behaviour policy thought about equally probable.

    :param low: least log-probability, in nats
    :param high: greatest; belongs to the next slice, except in the last
    :param count: steps
    :param mean_abs: mean |d|, NaN where there are none
    """

    low: float
    high: float
    count: int
    mean_abs: float


def probability_slices(d: ArrayLike, log_prob: ArrayLike, edges: Sequence[float] | int) -> list[SliceRow]:
    """
    Mean |d| by the log-probability that the behaviour policy gave the action; improbable ones tend to differ more.

    :param d: log-ratios of any shape, none of them padding
    :param log_prob: log μ(a|s) in nats, or log-density, shape as ``d``
    :param edges: log-probabilities from low to high between which the slices lie, infinite ones allowed, and what is
        outside left out; or the number of slices with as many steps in each, fewer where log-probabilities repeat
    :raises ValueError: if shapes differ, there are no steps, a value is not finite, or edges don't increase
    """
    d, log_prob = _finite("d", d), _finite("log_prob", log_prob)
    if d.shape != log_prob.shape or d.size == 0:
        raise ValueError(f"d has shape {d.shape}, log_prob {log_prob.shape}: they must be alike, with steps in them")
    if isinstance(edges, int):
        bounds = np.unique(np.quantile(log_prob, np.linspace(0, 1, edges + 1)))
        if len(bounds) == 1:  # one log-probability throughout
            bounds = np.repeat(bounds, 2)
    else:
        bounds = np.asarray(edges, dtype=np.float64)
        if len(bounds) < 2 or not (np.diff(bounds) > 0).all():
            raise ValueError(f"edges must be two or more, increasing, not {list(edges)}")
    rows = []
    for low, high in pairwise(bounds):
        below = log_prob <= high if high == bounds[-1] else log_prob < high
        chosen = np.abs(d[(log_prob >= low) & below])
        mean = float(chosen.mean()) if chosen.size else np.nan
        rows.append(SliceRow(float(low), float(high), chosen.size, mean))
    return rows


def _finite(name: str, values: ArrayLike) -> Array:
    """In float64; ValueError for what is not finite."""
    array = np.asarray(values, dtype=np.float64)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        first = tuple(map(int, bad[0]))
        raise ValueError(f"{name} has {len(bad)} values that are not finite, the first {array[first]} at {first}")
    return array


def _step_counts(name: str, counts: ArrayLike | None, sequences: int, default: int) -> Counts:
    """Numbers of steps, one per sequence."""
    if counts is None:
        return np.full(sequences, default, dtype=np.int64)
    array = np.asarray(counts)
    if array.shape != (sequences,) or not np.issubdtype(array.dtype, np.integer) or array.min(initial=0) < 0:
        raise ValueError(f"{name} must be {sequences} numbers of steps, one per sequence, not {counts}")
    return array.astype(np.int64)
