"""
Module A, global scalars (paper Sec. 3.1): many-to-one reductions whose error would reach a whole minibatch or update.

Data stays 16-bit; the reductions accumulate in FP32. Gradients are scaled by a power of two per network so that FP16
can hold them, and the norm is taken of scaled ratios so that no square overflows.
"""

from collections.abc import Sequence

import torch as th
from torch import Tensor

_SMALLEST = th.finfo(th.float32).tiny
_ADVANTAGE_EPSILON = 1e-8  # ε_A of the paper, SB3's value; it would be 0 in FP16

SCALE_FLOOR = 2.0**-24
GOOD_STEPS_BEFORE_GROWTH = 2000
SKIPS_BEFORE_ERROR = 10


def normalize_advantages(advantages: Tensor) -> Tensor:
    """
    Â = (A − mean A) / (std A + ε_A), unbiased std, in the format of the argument: FP32, unless module A is off.

    One sample has no standard deviation and is returned as it is (SB3 issue 325).

    :param advantages: shape (batch,)
    :return: shape (batch,)
    """
    if len(advantages) < 2:
        return advantages
    return standardize(advantages, advantages.mean(), advantages.std())


def standardize(advantages: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """
    Â = (A − mean) / (std + ε_A), for statistics that are known.

    :param advantages: shape (batch,)
    :param mean: scalar
    :param std: unbiased standard deviation, scalar
    :return: shape (batch,)
    """
    return (advantages - mean) / (std + _ADVANTAGE_EPSILON)


def mean_squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """
    Mean of squared differences in the format of the arguments: FP32, unless module A is off (FP16 squares overflow
    from 256 on).

    :param predictions: shape (batch,)
    :param targets: shape (batch,)
    :return: scalar
    """
    return (targets - predictions).square().mean()


def explained_variance(predictions: Tensor, targets: Tensor) -> float:
    """
    1 − Var[targets − predictions] / Var[targets] in FP32; NaN where the targets are constant, as in SB3.

    :param predictions: any shape
    :param targets: same shape
    """
    predictions, targets = predictions.float().flatten(), targets.float().flatten()
    variance = targets.var(correction=0)
    return float("nan") if variance == 0 else float(1 - (targets - predictions).var(correction=0) / variance)


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """
    G = s·sqrt(Σ (g/s)²) with s = max|g| (paper Sec. 3.1): finite for finite gradients; NaN and infinity propagate.

    :param gradients: tensors of one network, any shapes and float format
    :return: FP32 scalar
    """
    flat = th.cat([gradient.reshape(-1) for gradient in gradients]).float()
    largest = flat.abs().amax()
    return largest * (flat / largest.clamp_min(_SMALLEST)).square().sum().sqrt()


def clip_coefficients(norms: Tensor, scales: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """
    Global norm in true units and, per network, the factor that unscales and clips in one multiplication.

    G = sqrt(Σ_k (G_k/S_k)²), κ_k = min(1, c/(G + 1e-6))/S_k.

    :param norms: G_k, norms of the scaled gradients, shape (networks,)
    :param scales: S_k, shape (networks,)
    :param max_norm: c, PPO's ``max_grad_norm``
    :return: G (scalar) and κ (networks,), FP32
    """
    norm = (norms / scales).square().sum().sqrt()
    return norm, (max_norm / (norm + 1e-6)).clamp_max(1.0) / scales


def naive_clip_coefficient(gradients: Sequence[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """
    Global norm and clip coefficient without protection: squares, sums and quotient in the gradients' own format.

    :param gradients: of all networks
    :param max_norm: c, PPO's ``max_grad_norm``
    :return: norm and coefficient, FP32 scalars
    """
    squares = th.stack([(gradient * gradient).sum() for gradient in gradients])
    norm = squares.sum().sqrt()
    return norm.float(), (max_norm / (norm + 1e-6)).clamp(max=1.0).float()


class GradientScale:
    """
    The powers of two S_k that losses are multiplied by before the backward pass, one per network.

    A step whose gradients are not finite is skipped for all networks and halves the scale of the offending ones;
    after 2000 good steps a reduced scale doubles again, up to its initial value. All state is on the device, so
    deciding needs no host synchronisation.

    :param initial: S_k at the start, powers of two, shape (networks,)
    :param adapt: whether scales move at all; without, steps are still skipped
    :param ceiling: what good steps may raise a scale to, by default its initial value
    """

    def __init__(self, initial: Tensor, adapt: bool = True, ceiling: float | None = None) -> None:
        self.initial = initial
        self.floor = initial.clamp_max(SCALE_FLOOR) if adapt else initial
        self.ceiling = initial if ceiling is None or not adapt else th.full_like(initial, ceiling)
        self.scales = initial.clone()
        self.good_steps = th.zeros((), dtype=th.int64, device=initial.device)
        self.skipped_steps = th.zeros_like(self.good_steps)
        self.skips_at_floor = th.zeros_like(self.good_steps)

    def update(self, norms: Tensor) -> Tensor:
        """
        Decide over one step and adapt the scales.

        :param norms: G_k, norms of the scaled gradients, shape (networks,)
        :return: boolean scalar, true where the step must be skipped
        """
        overflowed = ~th.isfinite(norms)
        skip = overflowed.any()
        at_floor = (overflowed & (self.scales <= self.floor)).any()
        self.skips_at_floor = (self.skips_at_floor + 1) * at_floor
        self.skipped_steps = self.skipped_steps + skip
        self.good_steps = (self.good_steps + 1) * ~skip

        grow = self.good_steps >= GOOD_STEPS_BEFORE_GROWTH
        self.good_steps = self.good_steps * ~grow
        halved = th.maximum(self.scales / 2, self.floor)
        grown = th.minimum(self.scales * (1.0 + grow.float()), self.ceiling)
        self.scales = th.where(overflowed, halved, grown)
        return skip

    def raise_if_unrecoverable(self) -> None:
        """
        Stop training that skips every step; reads the device once.

        :raises ValueError: after ten skips in a row with a scale at its floor
        """
        if self.skips_at_floor >= SKIPS_BEFORE_ERROR:
            raise ValueError(
                f"PPO's gradients were not finite in {int(self.skips_at_floor)} steps in a row, whatever the gradient "
                "scale; the parameters are the last good ones. Lower learning_rate, or normalise observations and "
                "rewards (VecNormalize)."
            )

    def state_dict(self) -> dict[str, Tensor]:
        """Scales and counters, to be saved with the model."""
        names = ("scales", "good_steps", "skipped_steps", "skips_at_floor")
        return {name: getattr(self, name).clone() for name in names}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""
        for name, value in state.items():
            setattr(self, name, value.to(self.initial.device, copy=True))
