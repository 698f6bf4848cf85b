"""
Module B, policy-change residuals (paper Sec. 3.2): log π(a|s)/π₀(a|s) from differences of policy parameters.

Subscript 0 is the behaviour policy, the one that acted and whose parameters the rollout stores. Subtracting two
absolute log-probabilities would lose a small change to rounding; differences taken first keep it.
"""

import math
from typing import Any, NamedTuple

import torch as th
from torch import Tensor
from torch.nn.functional import logsigmoid

from sb3_fp16.rounding import Format

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
MAX_STORED_LOGITS = 256
"""Behaviour logits are stored up to this many; beyond, the rollout keeps the FP32 log-probability alone."""

_LARGEST_EXPONENT = 80.0  # e^80 is finite in FP32 with room for the advantage
_LARGEST_LOGIT_CHANGE = 10.0  # beyond it the sum of expm1 terms loses what log-sum-exp keeps


class GaussianBehaviour(NamedTuple):
    """
    Behaviour policy of a diagonal Gaussian.

    :param mean: μ₀, shape (batch, dims)
    :param log_std: l₀, shape (dims,) or (batch, dims)
    """

    mean: Tensor
    log_std: Tensor


class LogitsBehaviour(NamedTuple):
    """
    Behaviour policy over discrete actions.

    :param logits: unnormalised, shape (batch, choices), heads side by side
    """

    logits: Tensor


Behaviour = GaussianBehaviour | LogitsBehaviour


def attach_behaviour(log_prob: Tensor, behaviour: Behaviour, correction: Tensor | None = None) -> None:
    """
    Let the log-probability of an action carry the parameters it was sampled with.

    SB3 hands that tensor from the policy to the rollout buffer, whatever callbacks do with the policy in between.

    :param log_prob: of the sampled actions, shape (envs,)
    :param behaviour: parameters of the policy that sampled them
    :param correction: c (paper Sec. 3.2), shape (envs,); None where it is 0
    """
    log_prob.behaviour = behaviour, correction  # type: ignore[attr-defined]


def behaviour_of(log_prob: Tensor) -> tuple[Behaviour | None, Tensor | None]:
    """
    Parameters and correction that ``attach_behaviour`` attached, if any.

    :param log_prob: as it reached the rollout buffer
    """
    return getattr(log_prob, "behaviour", (None, None))


def gaussian_log_prob(actions: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """
    log p = Σ_j −l − ½z² − C with z = (a − μ)e^{−l} (paper Sec. 3.2), in FP32.

    :param actions: shape (batch, dims)
    :param mean: shape (batch, dims)
    :param log_std: shape (dims,) or (batch, dims)
    :return: FP32, shape (batch,)
    """
    z = (actions - mean) * th.exp(-log_std)
    return (-log_std - 0.5 * z.square() - LOG_SQRT_2PI).sum(dim=-1)


def gaussian_log_ratio(
    mean: Tensor, log_std: Tensor, actions: Tensor, behaviour: GaussianBehaviour, two_sum: Format | None = None
) -> Tensor:
    """
    d̃ = Σ_j Δlog p of a diagonal Gaussian, differentiable in ``mean`` and ``log_std``.

    With a reference correction c (paper Sec. 3.2) the log-ratio to the policy that acted is d̃ − c.

    :param mean: μ, FP32, shape (batch, dims)
    :param log_std: l, FP32, shape (dims,)
    :param actions: shape (batch, dims)
    :param behaviour: μ₀ and l₀ as stored
    :param two_sum: round every operation to this format and compensate the sums, as the paper does in FP16
    :return: FP32, shape (batch,)
    """
    result: Tensor = _GaussianLogRatio.apply(  # type: ignore[no-untyped-call]
        mean, log_std, actions.float(), behaviour.mean.float(), behaviour.log_std.float(), two_sum
    )
    return result


class _GaussianLogRatio(th.autograd.Function):
    """Forward in the chosen arithmetic, backward in closed form: ∂d/∂μ = z e^{−l}, ∂d/∂l = z² − 1."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        log_std: Tensor,
        actions: Tensor,
        mean0: Tensor,
        log_std0: Tensor,
        two_sum: Format | None,
    ) -> Tensor:
        per_dim, z = _log_density_change(mean, log_std, actions, mean0, log_std0)
        ctx.save_for_backward(z, log_std)
        d = per_dim.sum(dim=-1)
        if two_sum is not None:
            compensated = _compensated_change(two_sum, mean, log_std, actions, mean0, log_std0)
            d = th.where(th.isfinite(compensated), compensated, d)  # in FP16 ½Δz² overflows from |Δz| = 362 on
        return d

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        z, log_std = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-1)
        grad_mean = gradient * z * th.exp(-log_std)
        grad_log_std = (gradient * (z.square() - 1)).sum_to_size(log_std.shape)
        return grad_mean, grad_log_std, None, None, None, None


def _log_density_change(
    mean: Tensor, log_std: Tensor, actions: Tensor, mean0: Tensor, log_std0: Tensor
) -> tuple[Tensor, Tensor]:
    """Δlog p per dimension and z, in FP32."""
    inverse_std0 = th.exp(-log_std0)
    z0 = (actions - mean0) * inverse_std0
    dl = log_std - log_std0
    t = th.expm1(-dl)
    q = (mean - mean0) * inverse_std0
    dz = z0 * t - q * (1 + t)  # Δz = z₀t − q(1 + t)
    return -dl - z0 * dz - 0.5 * dz.square(), z0 + dz  # Δlog p = −Δl − z₀Δz − ½Δz²


def _compensated_change(
    kind: Format, mean: Tensor, log_std: Tensor, actions: Tensor, mean0: Tensor, log_std0: Tensor
) -> Tensor:
    """
    Σ Δlog p with every operation rounded to a format, compensated by TwoSum.

    High and low parts are reduced separately over the dimensions in FP32 (paper Sec. 3.2).
    """

    def r(value: Tensor) -> Tensor:
        # Torch's own formats round in each operation. For others, an FP32 operation on numbers of at most 11
        # significant bits, rounded to the format, is the format's own operation.
        return value if kind.is_native else kind.round(value).float()

    stored = (x.to(kind.dtype) if kind.is_native else r(x) for x in (mean, log_std, actions, mean0, log_std0))

    def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """a + b = high + low exactly (Ogita et al. 2005)."""
        high = r(a + b)
        b_part = r(high - a)
        return high, r(r(a - r(high - b_part)) + r(b - b_part))

    mean, log_std, actions, mean0, log_std0 = stored
    inverse_std0 = r(th.exp(-log_std0))
    z0 = r(r(actions - mean0) * inverse_std0)
    dl = r(log_std - log_std0)
    t = r(th.expm1(-dl))
    q = r(r(mean - mean0) * inverse_std0)
    dz, dz_low = two_sum(r(z0 * t), -r(q + r(q * t)))
    d, low1 = two_sum(-dl.expand_as(dz), -r(z0 * dz))
    d, low2 = two_sum(d, -r(0.5 * r(dz.square())))
    low = r(r(low1 + low2) - r(r(z0 + dz) * dz_low))
    return d.float().sum(dim=-1) + low.float().sum(dim=-1)


def categorical_log_ratio(logits: Tensor, actions: Tensor, logits0: Tensor) -> Tensor:
    """
    d of one categorical distribution, differentiable in ``logits``.

    With δ = logits − logits₀ and e_k = δ_k − δ_a:  d = −log1p(Σ_{k≠a} p₀_k·expm1(e_k)), the analogue of the paper's
    Gaussian residual. Where an e_k or d exceeds 10, d = δ_a − (LSE(logits) − LSE(logits₀)).

    :param logits: FP32, shape (batch, choices)
    :param actions: integers, shape (batch,)
    :param logits0: as stored, shape (batch, choices)
    :return: FP32, shape (batch,)
    """
    result: Tensor = _CategoricalLogRatio.apply(  # type: ignore[no-untyped-call]
        logits, actions.long(), logits0.float()
    )
    return result


class _CategoricalLogRatio(th.autograd.Function):
    """Backward in closed form: ∂d/∂logit_k = 1[k=a] − p_k."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, actions: Tensor, logits0: Tensor) -> Tensor:
        ctx.save_for_backward(logits, actions)
        change = logits - logits0
        change_of_action = change.gather(1, actions.unsqueeze(1))
        e = change - change_of_action  # e_a is 0, so its term of the sum vanishes
        near = -th.log1p((logits0.softmax(dim=1) * th.expm1(e.clamp_max(_LARGEST_LOGIT_CHANGE))).sum(dim=1))
        far = change_of_action.squeeze(1) - (logits.logsumexp(dim=1) - logits0.logsumexp(dim=1))
        # The sum also cancels towards −1 where the action's probability has grown from almost nothing.
        return th.where((e.amax(dim=1) > _LARGEST_LOGIT_CHANGE) | (near > _LARGEST_LOGIT_CHANGE), far, near)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, actions = ctx.saved_tensors
        gradient = -logits.softmax(dim=1)
        gradient.scatter_add_(1, actions.unsqueeze(1), th.ones_like(gradient[:, :1]))
        return gradient * gradients[0].unsqueeze(1), None, None


def bernoulli_log_ratio(logits: Tensor, actions: Tensor, logits0: Tensor) -> Tensor:
    """
    d of independent Bernoulli variables, differentiable in ``logits``.

    With u = (2a − 1)·logit:  d = Σ −log1p(σ(−u₀)·expm1(−Δu)). Where −Δu or d exceeds 10, the difference of absolute
    log-probabilities.

    :param logits: FP32, shape (batch, dims)
    :param actions: 0 or 1, shape (batch, dims)
    :param logits0: as stored, shape (batch, dims)
    :return: FP32, shape (batch,)
    """
    result: Tensor = _BernoulliLogRatio.apply(  # type: ignore[no-untyped-call]
        logits, actions.float(), logits0.float()
    )
    return result


class _BernoulliLogRatio(th.autograd.Function):
    """Backward in closed form: ∂d/∂logit = a − σ(logit)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, actions: Tensor, logits0: Tensor) -> Tensor:
        ctx.save_for_backward(logits, actions)
        sign = 2 * actions - 1
        u, u0 = sign * logits, sign * logits0
        shrink = u0 - u
        near = -th.log1p(th.sigmoid(-u0) * th.expm1(shrink.clamp_max(_LARGEST_LOGIT_CHANGE)))
        far = logsigmoid(u) - logsigmoid(u0)
        return th.where((shrink > _LARGEST_LOGIT_CHANGE) | (near > _LARGEST_LOGIT_CHANGE), far, near).sum(dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, actions = ctx.saved_tensors
        return (actions - th.sigmoid(logits)) * gradients[0].unsqueeze(1), None, None


def log_ratio_bounds(clip_range: float) -> tuple[float, float]:
    """
    b₋ = log(1 − ε) and b₊ = log(1 + ε) (paper Sec. 3.2); b₋ is −∞ from ε = 1 on.

    :param clip_range: ε, PPO's clip range, not negative
    """
    return (math.log1p(-clip_range) if clip_range < 1 else -math.inf), math.log1p(clip_range)


def clip_log_ratio(d: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """
    d̄ = min(d, b₊) where Â ≥ 0, max(d, b₋) where Â < 0 (paper Sec. 3.2): PPO's clipping before any exponential.

    For Â < 0 nothing bounds d from above; it is capped where e^d would leave FP32.

    :param d: log-ratio, FP32, shape (batch,)
    :param advantages: Â, shape (batch,)
    :param clip_range: ε
    :return: FP32, shape (batch,)
    """
    lower, upper = log_ratio_bounds(clip_range)
    return th.where(advantages >= 0, d.clamp_max(min(upper, _LARGEST_EXPONENT)), d.clamp(lower, _LARGEST_EXPONENT))


def policy_loss(d: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """
    PPO's clipped surrogate −mean(Â·e^{d̄}), FP32.

    :param d: log-ratio, shape (batch,)
    :param advantages: Â, shape (batch,)
    :param clip_range: ε
    :return: scalar
    """
    return -(advantages * clip_log_ratio(d, advantages, clip_range).exp()).mean()


def policy_loss_on_ratios(d: Tensor, advantages: Tensor, clip_range: float) -> Tensor:
    """
    The same surrogate as PPO writes it, on ratios, in the format of its arguments: what naive half precision does.

    :param d: log-ratio, shape (batch,)
    :param advantages: Â, shape (batch,)
    :param clip_range: ε
    :return: scalar
    """
    ratio = d.exp()
    return -th.min(advantages * ratio, advantages * ratio.clamp(1 - clip_range, 1 + clip_range)).mean()


def clip_fraction(d: Tensor, clip_range: float) -> Tensor:
    """
    Fraction of samples whose ratio lies outside [1 − ε, 1 + ε].

    :param d: log-ratio, shape (batch,)
    :param clip_range: ε
    :return: FP32 scalar
    """
    lower, upper = log_ratio_bounds(clip_range)
    return ((d > upper) | (d < lower)).float().mean()


def gaussian_kl(mean: Tensor, log_std: Tensor, behaviour: GaussianBehaviour) -> Tensor:
    """
    KL(π₀‖π) of diagonal Gaussians in closed form: Σ_j Δl + ½expm1(−2Δl) + ½(q(1 + t))², with the q and t of the
    log-ratio (paper Sec. 3.2); nothing cancels, however near the two are.

    :param mean: μ, shape (batch, dims)
    :param log_std: l, shape (dims,) or (batch, dims)
    :param behaviour: μ₀ and l₀
    :return: the arguments' format, shape (batch,)
    """
    dl = log_std - behaviour.log_std
    shift = (mean - behaviour.mean) * th.exp(-log_std)  # q(1 + t)
    series = dl.square() * (1 - 2 / 3 * dl + 1 / 3 * dl.square())
    spread = th.where(dl.abs() < 0.01, series, dl + 0.5 * th.expm1(-2 * dl))
    return (spread + 0.5 * shift.square()).sum(dim=-1)


def categorical_kl(logits: Tensor, logits0: Tensor) -> Tensor:
    """
    KL(p₀‖p) of categorical distributions in closed form: log1p(Σ_k p₀_k(expm1(x_k) − x_k)), x the change of the
    logits less its mean under p₀. All terms are positive.

    :param logits: shape (batch, choices)
    :param logits0: of the behaviour policy, same shape
    :return: the arguments' format, shape (batch,)
    """
    p0 = logits0.softmax(dim=-1)
    change = (logits - logits0).where(p0 > 0, 0.0)  # a masked action has no probability in either
    x = change - (p0 * change).sum(dim=-1, keepdim=True)
    return th.log1p((p0 * (th.expm1(x) - x)).sum(dim=-1))


def bernoulli_kl(logits: Tensor, logits0: Tensor) -> Tensor:
    """
    KL(p₀‖p) of independent Bernoulli variables: each is a choice between the logits 0 and ``logits``.

    :param logits: shape (batch, dims)
    :param logits0: of the behaviour policy, same shape
    :return: the arguments' format, shape (batch,)
    """
    pair, pair0 = (th.stack([th.zeros_like(x), x], dim=-1) for x in (logits, logits0))
    return categorical_kl(pair, pair0).sum(dim=-1)


def approx_kl(d: Tensor) -> Tensor:
    """
    mean(e^d − 1 − d) ≥ 0, the estimator SB3 logs and stops on, without cancellation at small d.

    :param d: log-ratio, shape (batch,)
    :return: FP32 scalar
    """
    return (th.expm1(d) - d).mean()
