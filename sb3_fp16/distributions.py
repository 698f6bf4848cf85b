"""
SB3's action distributions over parameters that are stored in 16 bits and evaluated in FP32.

Each can hand its parameters to the rollout and form the log-ratio to such stored parameters. None validates its
arguments: a NaN in training must reach the gradients, where the step is skipped.
"""

from typing import Any, Protocol, runtime_checkable

import torch as th
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    StateDependentNoiseDistribution,
)
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal

from sb3_fp16.precision import Precision
from sb3_fp16.residuals import (
    LOG_SQRT_2PI,
    Behaviour,
    GaussianBehaviour,
    LogitsBehaviour,
    bernoulli_kl,
    bernoulli_log_ratio,
    categorical_kl,
    categorical_log_ratio,
    gaussian_kl,
    gaussian_log_prob,
    gaussian_log_ratio,
)
from sb3_fp16.rounding import Format


@runtime_checkable
class ResidualDistribution(Protocol):
    """A distribution that module B serves."""

    behaviour_size: int
    """Numbers per step, beyond those of the action, that describe the behaviour policy."""

    def behaviour(self) -> Behaviour:
        """Parameters for the rollout."""
        ...

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """
        d̃ to a behaviour policy, differentiable in the distribution's own parameters.

        :param actions: as stored, shape (batch, dims)
        :param behaviour: parameters of the policy that acted
        :return: FP32, shape (batch,)
        """
        ...

    def kl(self, behaviour: Behaviour) -> Tensor:
        """
        KL(π₀‖π) from a behaviour policy, in closed form.

        :param behaviour: parameters of the policy that acted
        :return: FP64, shape (batch,)
        """
        ...

    def correction(self, actions: Tensor, log_prob: Tensor) -> Tensor | None:
        """
        c = L₀ − L̃₀: log-probability when sampled, less the one rebuilt from storage (paper Sec. 3.2).

        :param actions: as executed, shape (batch, dims)
        :param log_prob: L₀, shape (batch,)
        :return: shape (batch,); None where storage changes nothing
        """
        ...

    def entropy(self) -> Tensor | None:
        """Shape (batch,); None without an analytical form."""
        ...

    def log_prob(self, actions: Tensor) -> Tensor:
        """Shape (batch,)."""
        ...


def with_residuals(distribution: Distribution, precision: Precision) -> Distribution:
    """
    The same distribution over 16-bit parameters; one of the user's own comes back as it is.

    :param distribution: made by SB3 for an action space
    :param precision: number format and protections
    """
    kind = type(distribution)
    if isinstance(distribution, DiagGaussianDistribution) and kind is DiagGaussianDistribution:
        return DiagGaussianFP16(distribution.action_dim, precision)
    if isinstance(distribution, StateDependentNoiseDistribution) and kind is StateDependentNoiseDistribution:
        return StateDependentNoiseFP16(distribution, precision)
    if isinstance(distribution, CategoricalDistribution) and kind is CategoricalDistribution:
        return CategoricalFP16(distribution.action_dim, precision)
    if isinstance(distribution, MultiCategoricalDistribution) and kind is MultiCategoricalDistribution:
        return MultiCategoricalFP16(distribution.action_dims)
    if isinstance(distribution, BernoulliDistribution) and kind is BernoulliDistribution:
        return BernoulliFP16(distribution.action_dims)
    return distribution


def _stored(values: Tensor, precision: Precision) -> Tensor:
    """FP32 numbers that storage keeps exactly."""
    return precision.format.store(values).float()


def _two_sum_format(precision: Precision) -> Format | None:
    return precision.format if precision.log_ratio == "residual-twosum" else None


class _Copyable:
    """Copies leave out the parameters of the last call, which may hang on a graph that cannot be copied."""

    def __getstate__(self) -> dict[str, Any]:
        of_last_call = {"distribution", "mean", "log_std", "logits", "_latent_sde"}
        return {name: value for name, value in vars(self).items() if name not in of_last_call}


class _Discrete(_Copyable):
    """What distributions over discrete actions share: storage keeps actions and logits as they are."""

    logits: Tensor

    def behaviour(self) -> Behaviour:
        """See ``ResidualDistribution``."""
        return LogitsBehaviour(self.logits)

    def correction(self, actions: Tensor, log_prob: Tensor) -> Tensor | None:
        """See ``ResidualDistribution``."""
        return None


class DiagGaussianFP16(_Copyable, DiagGaussianDistribution):
    """
    Diagonal Gaussian.

    :param action_dim: number of action dimensions
    :param precision: rounds sampled actions to storage where ``round_actions`` is set
    """

    behaviour_size = 0  # a mean per action dimension is no more than the action itself

    def __init__(self, action_dim: int, precision: Precision) -> None:
        super().__init__(action_dim)
        self.precision = precision

    def proba_distribution(self, mean_actions: Tensor, log_std: Tensor) -> "DiagGaussianFP16":
        """
        Set the parameters.

        :param mean_actions: μ, shape (batch, dims)
        :param log_std: l, shape (dims,)
        """
        self.mean, self.log_std = mean_actions.float(), self.precision.format.upcast(log_std)
        self.distribution = Normal(self.mean, self.log_std.exp().expand_as(self.mean), validate_args=False)
        return self

    def sample(self) -> Tensor:
        """Actions a = μ + e^l·ε, rounded to storage if that is how they are executed."""
        actions = super().sample()
        return _stored(actions, self.precision) if self.precision.round_actions else actions

    def log_prob(self, actions: Tensor) -> Tensor:
        """Σ log p, shape (batch,), FP32 or, in the study of naive half precision, in storage format."""
        if self.precision.log_ratio != "absolute-stored":
            return gaussian_log_prob(actions, self.mean, self.log_std)
        mean, log_std, actions = (x.to(self.precision.dtype) for x in (self.mean, self.log_std, actions))
        return gaussian_log_prob(actions, mean, log_std)

    def entropy(self) -> Tensor:
        """Σ l + ½ log 2πe, FP32, shape (batch,)."""
        return (self.log_std + (0.5 + LOG_SQRT_2PI)).sum(dim=-1).expand(len(self.mean))

    def behaviour(self) -> Behaviour:
        """See ``ResidualDistribution``."""
        return GaussianBehaviour(self.mean, self.log_std)

    def correction(self, actions: Tensor, log_prob: Tensor) -> Tensor | None:
        """See ``ResidualDistribution``; means and log standard deviations are 16-bit numbers already."""
        if self.precision.round_actions:
            return None
        return log_prob - gaussian_log_prob(_stored(actions, self.precision), self.mean, self.log_std)

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        return gaussian_log_ratio(
            self.mean, self.log_std, actions, GaussianBehaviour(*behaviour), _two_sum_format(self.precision)
        )

    def kl(self, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        return gaussian_kl(self.mean.double(), self.log_std.double(), GaussianBehaviour(*map(Tensor.double, behaviour)))


class StateDependentNoiseFP16(_Copyable, StateDependentNoiseDistribution):
    """
    gSDE: a Gaussian whose standard deviation depends on the state, optionally squashed by tanh.

    The squashing's Jacobian depends on the action alone and cancels in the log-ratio.

    :param stock: SB3's distribution, whose settings are taken over
    :param precision: rounds sampled actions to storage where ``round_actions`` is set
    """

    behaviour_size = 0

    def __init__(self, stock: StateDependentNoiseDistribution, precision: Precision) -> None:
        self.precision = precision
        super().__init__(
            stock.action_dim,
            full_std=stock.full_std,
            use_expln=stock.use_expln,
            squash_output=stock.bijector is not None,
            learn_features=stock.learn_features,
            epsilon=stock.epsilon,
        )

    def get_std(self, log_std: Tensor) -> Tensor:
        """Standard deviation of the noise matrix, FP32."""
        return super().get_std(self.precision.format.upcast(log_std))

    @th.no_grad()
    def sample_weights(self, log_std: Tensor, batch_size: int = 1) -> None:
        """
        Draw the noise matrices; without gradients, so that a policy can be copied.

        :param log_std: of the noise matrix
        :param batch_size: number of environments
        """
        super().sample_weights(log_std, batch_size)

    def proba_distribution(
        self, mean_actions: Tensor, log_std: Tensor, latent_sde: Tensor
    ) -> "StateDependentNoiseFP16":
        """
        Set the parameters.

        :param mean_actions: μ, shape (batch, dims)
        :param log_std: of the noise matrix, shape (features, dims) or (features,)
        :param latent_sde: features, shape (batch, features)
        """
        latent_sde = latent_sde.float()
        self._latent_sde = latent_sde if self.learn_features else latent_sde.detach()
        variance = th.mm(self._latent_sde.square(), self.get_std(log_std).square()) + self.epsilon
        self.mean, self.log_std = mean_actions.float(), 0.5 * variance.log()
        self.distribution = Normal(self.mean, variance.sqrt(), validate_args=False)
        return self

    def sample(self) -> Tensor:
        """Actions with the rollout's noise matrix, rounded to storage if that is how they are executed."""
        actions = super().sample()
        if self.precision.round_actions:
            actions = _stored(actions, self.precision)
        if self.bijector is None:
            return actions
        largest = 1 - 2.0 ** -(self.precision.format.significand_bits + 1)  # ±1 has no finite preimage under tanh
        return actions.clamp(-largest, largest)

    def behaviour(self) -> Behaviour:
        """See ``ResidualDistribution``; l₀ is per sample."""
        return GaussianBehaviour(self.mean, self.log_std)

    def correction(self, actions: Tensor, log_prob: Tensor) -> Tensor | None:
        """See ``ResidualDistribution``: l₀ is rounded in storage."""
        actions, mean, log_std = (_stored(x, self.precision) for x in (actions, self.mean, self.log_std))
        gaussian = actions if self.bijector is None else self.bijector.inverse(actions)
        rebuilt = gaussian_log_prob(gaussian, mean, log_std)
        if self.bijector is not None:
            rebuilt = rebuilt - self.bijector.log_prob_correction(gaussian).sum(dim=1)
        return log_prob - rebuilt

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        if self.bijector is not None:
            actions = self.bijector.inverse(actions)
        return gaussian_log_ratio(
            self.mean, self.log_std, actions, GaussianBehaviour(*behaviour), _two_sum_format(self.precision)
        )

    def kl(self, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        return gaussian_kl(self.mean.double(), self.log_std.double(), GaussianBehaviour(*map(Tensor.double, behaviour)))


class CategoricalFP16(_Discrete, CategoricalDistribution):
    """
    One choice out of several.

    :param action_dim: number of choices
    :param precision: number format and protections
    """

    def __init__(self, action_dim: int, precision: Precision) -> None:
        super().__init__(action_dim)
        self.precision = precision

    def log_prob(self, actions: Tensor) -> Tensor:
        """Shape (batch,), FP32 or, in the study of naive half precision, in storage format."""
        if self.precision.log_ratio != "absolute-stored":
            return super().log_prob(actions)
        log_p = self.logits.to(self.precision.dtype).log_softmax(dim=1)
        return log_p.gather(1, actions.long().view(-1, 1)).squeeze(1)

    @property
    def behaviour_size(self) -> int:
        """See ``ResidualDistribution``."""
        return self.action_dim

    def proba_distribution(self, action_logits: Tensor) -> "CategoricalFP16":
        """
        Set the parameters.

        :param action_logits: shape (batch, choices)
        """
        self.logits = action_logits.float()
        self.distribution = Categorical(logits=self.logits, validate_args=False)
        return self

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        return categorical_log_ratio(self.logits, actions.flatten(), behaviour[0])

    def kl(self, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``."""
        return categorical_kl(self.logits.double(), behaviour[0].double())


class MultiCategoricalFP16(_Discrete, MultiCategoricalDistribution):
    """Several independent choices; their logits lie side by side."""

    @property
    def behaviour_size(self) -> int:
        """See ``ResidualDistribution``."""
        return int(sum(self.action_dims))

    def proba_distribution(self, action_logits: Tensor) -> "MultiCategoricalFP16":
        """
        Set the parameters.

        :param action_logits: shape (batch, all choices)
        """
        self.logits = action_logits.float()
        self.distribution = [Categorical(logits=head, validate_args=False) for head in self._heads(self.logits)]
        return self

    def _heads(self, logits: Tensor) -> tuple[Tensor, ...]:
        return th.split(logits, list(self.action_dims), dim=1)

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``: Σ over the choices."""
        heads = zip(self._heads(self.logits), actions.unbind(dim=1), self._heads(behaviour[0]), strict=True)
        return th.stack([categorical_log_ratio(*head) for head in heads]).sum(dim=0)

    def kl(self, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``: Σ over the choices."""
        heads = zip(self._heads(self.logits.double()), self._heads(behaviour[0].double()), strict=True)
        return th.stack([categorical_kl(*head) for head in heads]).sum(dim=0)


class BernoulliFP16(_Discrete, BernoulliDistribution):
    """Independent yes-or-no choices."""

    @property
    def behaviour_size(self) -> int:
        """See ``ResidualDistribution``."""
        return self.action_dims

    def proba_distribution(self, action_logits: Tensor) -> "BernoulliFP16":
        """
        Set the parameters.

        :param action_logits: shape (batch, dims)
        """
        self.logits = action_logits.float()
        self.distribution = Bernoulli(logits=self.logits, validate_args=False)
        return self

    def log_ratio(self, actions: Tensor, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``: Σ over the choices."""
        return bernoulli_log_ratio(self.logits, actions, behaviour[0])

    def kl(self, behaviour: Behaviour) -> Tensor:
        """See ``ResidualDistribution``: Σ over the choices."""
        return bernoulli_kl(self.logits.double(), behaviour[0].double())
