"""The reference engine: any policy, any device, in torch."""

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer, RolloutBufferSamples
from torch import Tensor, nn

from sb3_fp16.buffers import Minibatch
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.policies import Actor, HalfPrecisionPolicy
from sb3_fp16.precision import Precision
from sb3_fp16.residuals import approx_kl, clip_fraction, policy_loss, policy_loss_on_ratios
from sb3_fp16.rounding import Format, random_key, random_thresholds, round_by_threshold
from sb3_fp16.scalars import (
    GradientScale,
    clip_coefficients,
    gradient_norm,
    mean_squared_error,
    naive_clip_coefficient,
    normalize_advantages,
)
from sb3_fp16.sharp import SHARP

# Gradient scales S_k at the start, and the batch size they are meant for. Smaller minibatches have larger gradients
# per sample, and a smaller scale.
INITIAL_SCALES = {"policy": 2.0**12, "value": 2.0**7, "shared": 2.0**7}
FULL_SCALE_BATCH = 64
USERS_OPTIMIZER_SALT = 0x41C64E6D
GRAD_SCALER_INITIAL = 2.0**16
"""Where torch's ``GradScaler`` starts; it halves, and doubles after 2000 good steps, as ours does."""


class Losses(NamedTuple):
    """
    One minibatch before its backward pass.

    :param per_network: what each network minimises, shape (networks,)
    :param policy: clipped surrogate
    :param value: mean squared error
    :param entropy: minus the mean entropy
    :param clip_fraction: of ratios outside the clip range
    :param approx_kl: KL estimate
    """

    per_network: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    clip_fraction: Tensor
    approx_kl: Tensor


class EagerEngine:
    """
    PPO's update in torch, the definition that other engines are compared with. SHARP steps as it does alone: torch
    defines it, too, but runs it only where nothing compiled does.

    :param policy: to be trained, with its optimizer
    :param batch_size: minibatch size, which the initial gradient scales depend on
    :param reason: why this engine serves the policy
    """

    name = "eager"
    keeps_gradients = True

    def __init__(self, policy: HalfPrecisionPolicy, batch_size: int, reason: str = "the reference") -> None:
        self.reason = reason
        self.policy, self.optimizer = policy, policy.optimizer
        self.networks = policy.networks
        self.gradient_scale = self._initial_scale(policy.precision.gradient_scaling, batch_size)
        network_of = {id(p): k for k, network in enumerate(self.networks.values()) for p in network}
        in_order = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._network_of_parameter = th.tensor([network_of[id(p)] for p in in_order], device=policy.device)

    def _initial_scale(self, scaling: str, batch_size: int) -> GradientScale:
        device = self.policy.device
        if scaling == "grad-scaler":
            self.networks = {"shared": list(self.policy.parameters())}
            return GradientScale(th.tensor([GRAD_SCALER_INITIAL], device=device), ceiling=math.inf)
        factor = 2.0 ** -math.ceil(math.log2(max(1.0, FULL_SCALE_BATCH / batch_size)))
        adapt = scaling == "per-network"
        initial = [INITIAL_SCALES[name] * factor if adapt else 1.0 for name in self.networks]
        return GradientScale(th.tensor(initial, device=device), adapt=adapt)

    @property
    def actor(self) -> Actor | None:
        """See ``Engine.actor``: none, the policy's modules act."""
        return None

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """See ``Engine.update``."""
        skipped_before = self.gradient_scale.skipped_steps
        logs: list[Tensor] = []
        norms: list[Tensor] = []
        epoch = epoch_start = 0
        stopped_at_kl = None
        while epoch < settings.n_epochs and stopped_at_kl is None:
            epoch, epoch_start = epoch + 1, len(logs)
            for batch in self._minibatches(rollout, settings):
                losses = self._losses(batch, settings)
                logs.append(th.stack([x.float() for x in (*losses[1:], losses.per_network.sum())]).detach())
                if settings.target_kl is not None:
                    kl = self._summed(losses.approx_kl)
                    if kl > 1.5 * settings.target_kl:
                        stopped_at_kl = float(kl)
                        break
                norms.append(self._step(losses.per_network, settings.max_grad_norm))
        self.gradient_scale.raise_if_unrecoverable()

        log = self._summed(th.stack(logs)).cpu()
        policy, value, entropy, clipped = log[:, :4].mean(dim=0).tolist()
        nonzero, stuck, saturated = self._optimizer_statistics()
        return UpdateStats(
            entropy_loss=entropy,
            policy_loss=policy,
            value_loss=value,
            approx_kl=float(log[epoch_start:, 4].mean()),
            clip_fraction=clipped,
            loss=float(log[-1, 5]),
            grad_norm=float(th.stack(norms).nanmean()) if norms else math.nan,
            loss_scale=float(self.gradient_scale.scales.min()),
            skipped_steps=int(self.gradient_scale.skipped_steps - skipped_before),
            stuck_fraction=stuck / max(1, nonzero),
            saturated=saturated,
            epochs=epoch,
            stopped_at_kl=stopped_at_kl,
        )

    def _minibatches(
        self, rollout: RolloutBuffer, settings: UpdateSettings
    ) -> Iterator[Minibatch | RolloutBufferSamples]:
        """One epoch."""
        return rollout.get(settings.batch_size)

    def _summed(self, values: Tensor) -> Tensor:
        """Over all processes that train together; with this engine one trains alone."""
        return values

    def _losses(self, batch: Minibatch | RolloutBufferSamples, settings: UpdateSettings) -> Losses:
        """Forward pass: module A's statistics, module B's log-ratio, PPO's objective, all in FP32."""
        d, values, entropy = self.evaluate(batch)
        advantages, returns, old_values = batch.advantages, batch.returns, batch.old_values
        if self.policy.precision.global_scalars:
            advantages, returns, old_values = advantages.float(), returns.float(), old_values.float()
        else:  # every operation that follows is rounded to storage
            values, entropy = values.to(returns.dtype), entropy.to(returns.dtype)
        if settings.normalize_advantage:
            advantages = self._normalize(advantages)
        if settings.clip_range_vf is not None:
            values = old_values + (values - old_values).clamp(-settings.clip_range_vf, settings.clip_range_vf)

        on_ratios = self.policy.precision.log_ratio == "absolute-stored"
        surrogate = policy_loss_on_ratios if on_ratios else policy_loss
        policy = surrogate(d.to(advantages.dtype), advantages, settings.clip_range)
        value = mean_squared_error(values, returns)
        entropy = -entropy.mean()
        per_network = th.stack([policy + settings.ent_coef * entropy, settings.vf_coef * value])
        if len(self.networks) == 1:
            per_network = per_network.sum(dim=0, keepdim=True)
        with th.no_grad():
            d = d.float()
            return Losses(per_network, policy, value, entropy, clip_fraction(d, settings.clip_range), approx_kl(d))

    def _normalize(self, advantages: Tensor) -> Tensor:
        return normalize_advantages(advantages)

    def evaluate(self, batch: Minibatch | RolloutBufferSamples) -> tuple[Tensor, Tensor, Tensor]:
        """Log-ratio d, values and entropy, FP32, shape (batch,) each."""
        if isinstance(batch, Minibatch) and batch.behaviour is not None:
            distribution, values = self.policy.evaluate(batch.observations)
            d = distribution.log_ratio(batch.actions, batch.behaviour)
            if batch.correction is not None:
                d = d - batch.correction.float()
            entropy = distribution.entropy()
            return d, values, -distribution.log_prob(batch.actions) if entropy is None else entropy
        actions = batch.actions
        if isinstance(self.policy.action_space, spaces.Discrete):
            actions = actions.long().flatten()
        values, log_prob, entropy = self.policy.evaluate_actions(batch.observations, actions)
        old_log_prob = cast(Tensor, batch.old_log_prob)
        d = log_prob.to(old_log_prob.dtype) - old_log_prob
        return d, values.flatten().float(), -log_prob if entropy is None else entropy

    def _step(self, losses: Tensor, max_grad_norm: float) -> Tensor:
        """
        Backward pass on scaled losses, global norm, optimizer step.

        :param losses: per network
        :return: the global norm in true units; NaN where the step was skipped
        """
        optimizer, scales = self.optimizer, self.gradient_scale.scales
        optimizer.zero_grad()
        self._backward((losses * scales).sum())
        gradients = [[p.grad for p in network if p.grad is not None] for network in self.networks.values()]
        if not self.policy.precision.global_scalars:
            return self._naive_step([g for network in gradients for g in network], max_grad_norm)
        scaled_norms = th.stack([gradient_norm(g) if g else scales.new_zeros(()) for g in gradients])
        norm, coefficients = clip_coefficients(scaled_norms, scales, max_grad_norm)
        skip = self.gradient_scale.update(scaled_norms)
        if isinstance(optimizer, SHARP):
            optimizer.step(coefficient=coefficients[self._network_of_parameter], skip=skip)
        elif not skip:
            for network, coefficient in zip(gradients, coefficients, strict=True):
                th._foreach_mul_(network, coefficient)
            self._step_other_optimizer(optimizer)
        return norm.where(~skip, math.nan)

    def _backward(self, loss: Tensor) -> None:
        """Leave the gradients of a minibatch in the parameters."""
        loss.backward()  # type: ignore[no-untyped-call]

    def _naive_step(self, gradients: list[Tensor], max_grad_norm: float) -> Tensor:
        """Clip and step without module A: nothing is skipped."""
        norm, coefficient = naive_clip_coefficient(gradients, max_grad_norm)
        th._foreach_mul_(gradients, coefficient)
        if isinstance(self.optimizer, SHARP):
            self.optimizer.step()
        else:
            self._step_other_optimizer(self.optimizer)
        return norm

    def _step_other_optimizer(self, optimizer: th.optim.Optimizer) -> None:
        """Step an optimizer that was not made for 16-bit parameters, and take back what is not finite."""
        precision = self.policy.precision
        if precision.storage == "fp32":
            optimizer.step()
            return
        parameters = [p for p in self.policy.parameters() if p.grad is not None]
        before = [parameter.detach().clone() for parameter in parameters]
        if precision.optimizer == "adam":  # a study of what torch's Adam does to FP16 state
            optimizer.step()
        else:
            _step_in_fp32(optimizer, parameters, precision.format)
        if not all(bool(th.isfinite(parameter).all()) for parameter in parameters):
            for parameter, value in zip(parameters, before, strict=True):
                parameter.data = value
            raise diverged(optimizer, precision)

    def _optimizer_statistics(self) -> tuple[int, int, int]:
        optimizer = self.optimizer
        return optimizer.pop_statistics() if isinstance(optimizer, SHARP) else (0, 0, 0)

    def workspace(self) -> dict[str, int]:
        """See ``Engine.workspace``."""
        weights = {"FP32 weights in layers": sum(p.numel() for p in self.policy.parameters())}
        return weights | ({"SHARP scratch": self.optimizer.scratch()} if isinstance(self.optimizer, SHARP) else {})

    def state_dict(self) -> dict[str, Tensor]:
        """See ``Engine.state_dict``."""
        return self.gradient_scale.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """See ``Engine.load_state_dict``."""
        self.gradient_scale.load_state_dict(state)


def diverged(optimizer: th.optim.Optimizer, precision: Precision) -> ValueError:
    """
    The error that ends training when an optimizer leaves the format.

    :param optimizer: not made for 16-bit parameters
    :param precision: that it worked in
    """
    return ValueError(
        f"{type(optimizer).__name__} made parameters infinite or NaN in {precision.storage}; the last good "
        "ones are kept. Use SHARP, another learning_rate or other settings, or precision='fp32'."
    )


def _step_in_fp32(optimizer: th.optim.Optimizer, parameters: list[nn.Parameter], kind: Format) -> None:
    """
    Let a user's optimizer work in FP32, with FP32 state, and round what it makes stochastically to storage.

    Most optimizers fail on FP16 state: their eps is 0 there, their second moment underflows. Thresholds are a hash of
    the FP32 values' own bits, so that nothing needs to be kept.
    """
    for parameter in parameters:
        gradient = cast(Tensor, parameter.grad).float()
        parameter.grad = None  # torch ties its format to the parameter's
        parameter.data = parameter.data.float()
        parameter.grad = gradient
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
        values = parameter.data.contiguous()
        index = th.arange(values.numel(), dtype=th.int32, device=values.device).view(values.shape)
        thresholds = random_thresholds(index, random_key(values.view(th.int32), USERS_OPTIMIZER_SALT, 0))
        parameter.data = kind.store(round_by_threshold(values, thresholds, kind))
