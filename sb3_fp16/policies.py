"""Half-precision actor-critic policies: SB3's own, with 16-bit parameters, activations and backward signals."""

import copy
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch as th
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import (
    ActorCriticCnnPolicy,
    ActorCriticPolicy,
    BasePolicy,
    MultiInputActorCriticPolicy,
)
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, MlpExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from sb3_fp16.buffers import Acted, Array
from sb3_fp16.distributions import ResidualDistribution, with_residuals
from sb3_fp16.layers import apply_precision
from sb3_fp16.precision import Precision
from sb3_fp16.residuals import MAX_STORED_LOGITS, GaussianBehaviour, LogitsBehaviour, attach_behaviour
from sb3_fp16.rounding import check_finite
from sb3_fp16.sharp import SHARP


class _StorageObservations(BasePolicy):
    """
    Rounds preprocessed observations to storage.

    Stands between ActorCriticPolicy and BaseModel in the method resolution order: ``get_distribution`` and
    ``predict_values`` call ``super().extract_features`` and would pass an override in a subclass by.
    """

    precision: Precision
    _saturation_warned: set[str]

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor) -> Tensor:
        """
        Preprocess and round observations, then extract features.

        :param obs: observation tensor or dictionary of them
        :param features_extractor: reads the observations
        :return: features in storage format
        """
        observations = preprocess_obs(obs, self.observation_space, normalize_images=self.normalize_images)
        if isinstance(observations, dict):
            given = cast(dict[str, Tensor], obs)
            observations = {
                key: self._to_storage(part, given[key], f"observation[{key!r}]") for key, part in observations.items()
            }
        else:
            observations = self._to_storage(observations, cast(Tensor, obs), "observation")
        features: Tensor = features_extractor(observations)
        return features

    def _to_storage(self, observations: Tensor, given: Tensor, name: str) -> Tensor:
        """:raises ValueError: for NaN and infinity, outside minibatches: these were checked when they were stored"""
        if not self.training:
            check_finite(given, name)
            self.warn_if_saturated(observations, name)
        return self.precision.format.store(observations)

    def warn_if_saturated(self, observations: Tensor, name: str) -> None:
        """
        Warn, once, of observations beyond the format's range.

        :param observations: before they are rounded
        :param name: for the message
        """
        limit = self.precision.format.max
        if name not in self._saturation_warned and observations.abs().max() > limit:
            self._saturation_warned.add(name)
            storage = self.precision.storage
            warnings.warn(f"{name} exceeds ±{limit:g} and saturates in {storage}; use VecNormalize.", stacklevel=2)


def _check_range(weight: Tensor, name: str, precision: Precision) -> None:
    """:raises ValueError: for a weight that storage cannot hold, with its name and value"""
    limit = precision.format.max
    unusable = weight[~(weight.double().abs() <= limit)]
    if len(unusable) > 0:
        value = float(unusable[0])
        fix = "load it with precision='fp32'" if math.isfinite(value) else "load one saved before training diverged"
        raise ValueError(f"{name} holds {value:g}, beyond the ±{limit:g} of {precision.storage}; {fix}.")


class Evaluation(NamedTuple):
    """
    A policy on a minibatch, as an update needs it.

    :param distribution: the action distribution, whose FP32 parameters carry gradients
    :param values: FP32, shape (batch,)
    """

    distribution: ResidualDistribution
    values: Tensor


class Actor(Protocol):
    """What acts in a policy's place, faster than its modules; each method may leave it to them by returning None."""

    def check(self) -> None:
        """Look at the policy anew: any part of it may have been replaced."""
        ...

    def look(self) -> None:
        """Let the next action look at all weights, however they may have been written to."""
        ...

    def act(self, obs: Array, deterministic: bool = False) -> tuple[Array, Acted] | None:
        """
        Actions, and what else ``HalfPrecisionPolicy.forward`` gives.

        :param obs: observations, shape (envs, \\*obs)
        :param deterministic: take the mode of the distribution
        """
        ...

    def predict(self, obs: Array, deterministic: bool) -> Array | None:
        """
        Actions alone.

        :param obs: observations, shape (envs, \\*obs)
        :param deterministic: take the mode of the distribution
        """
        ...

    def predict_values(self, obs: Array) -> Array | None:
        """
        See ``HalfPrecisionPolicy.predict_values``.

        :param obs: observations, shape (envs, \\*obs)
        """
        ...


class HalfPrecisionPolicy(ActorCriticPolicy):
    """
    Turns an actor-critic policy of SB3 into one with 16-bit parameters; to be mixed in before the policy's class.

    :param precision: number format and protections, a preset's name or a ``Precision``
    """

    actor: Actor | None

    def __init__(self, *args: Any, precision: str | Precision | Mapping[str, Any] = "fp16", **kwargs: Any) -> None:
        self.precision = Precision.of(precision)
        self._saturation_warned: set[str] = set()
        self.__dict__["actor"] = None  # given by whoever trains the policy
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        """Build SB3's networks in FP32, as orthogonal initialisation has no half kernel on CPUs, then store them."""
        if self.precision.log_ratio != "absolute" or self.precision.compute_format.name != "fp32":
            self.action_dist = with_residuals(self.action_dist, self.precision)
        optimizer_class = self.optimizer_class
        if self.precision.optimizer == "sharp" and optimizer_class in (th.optim.Adam, SHARP):  # Adam is SB3's default
            self.optimizer_class = self._make_sharp  # type: ignore[assignment]
        super()._build(lr_schedule)
        self.optimizer_class = optimizer_class
        self.complete()

    def complete(self) -> None:
        """Apply the precision to what a user's class has added or replaced since the networks were built."""
        if self.precision.compute_format.name != "fp32":
            apply_precision(self.precision, self, heads=(self.action_net, self.value_net))
        if type(self.optimizer) is th.optim.Adam and self.precision.optimizer == "sharp":
            self.optimizer = self._make_sharp(self.parameters(), self.optimizer.defaults["lr"], **self.optimizer_kwargs)

    def _make_sharp(self, parameters: Iterable[nn.Parameter], lr: float, **users: Any) -> SHARP:
        """SHARP as the precision asks for: fine-grained heads (paper Sec. 3.3), their own rules for inputs and l."""
        for name in ("foreach", "fused", "capturable", "differentiable"):  # how Adam runs, not what it computes
            users.pop(name, None)
        for name in ("amsgrad", "maximize"):
            if users.pop(name, False):
                raise ValueError(f"SHARP, which stands in for Adam, has no {name}; use precision='fp32'.")
        settings = {
            "root_rounding": self.precision.root_rounding,
            "state_dtype": self.precision.dtype,
            "significand_bits": None if self.precision.format.is_native else self.precision.format.significand_bits,
            "seed": th.initial_seed() & 0xFFFFFFFF,
        }
        given: list[Any] = list(parameters)
        groups = [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
        for group in groups:
            group["params"] = list(group["params"])
        modes = [{k: v for k, v in self._modes(g["params"]).items() if k not in users} for g in groups]
        groups = [{**own, **g} for own, g in zip(modes, groups, strict=True)]
        return SHARP(groups, lr=lr, **{**settings, **users})

    def _modes(self, parameters: list[nn.Parameter]) -> dict[str, list[str]]:
        """Sharing and writeback of each parameter."""
        heads = {id(p) for head in (self.action_net, self.value_net) for p in head.parameters()}
        inputs = {id(p) for layer in self._input_layers() for p in layer.parameters()}
        log_std = getattr(self, "log_std", None)
        # gSDE's is a matrix: a carry for each element would be FP32 state of its size.
        carried = log_std if log_std is not None and log_std.ndim == 1 else None
        sharing: list[str] = [
            "elementwise"
            if id(p) in heads
            else (self.precision.input_sharing if id(p) in inputs else self.precision.hidden_sharing)
            for p in parameters
        ]
        writeback: list[str] = [
            self.precision.log_std_writeback if p is carried else self.precision.writeback for p in parameters
        ]
        return {"sharing": sharing, "writeback": writeback}

    def _input_layers(self) -> list[nn.Module]:
        """The first layer with parameters of each network that reads observations."""
        readers: list[nn.Module] = [self.pi_features_extractor, self.vf_features_extractor]
        if not any(True for reader in readers for _ in reader.parameters()):
            of_sb3 = type(self.mlp_extractor) is MlpExtractor
            mlp = self.mlp_extractor
            readers = [mlp.policy_net, mlp.value_net] if of_sb3 else [mlp]
        first = (next((m for m in reader.modules() if m._parameters), None) for reader in readers)
        return [layer for layer in first if layer is not None]

    @property
    def networks(self) -> dict[str, list[nn.Parameter]]:
        """Parameters by network: ``policy`` and ``value`` where no layer serves both, else ``shared``."""
        if type(self.mlp_extractor) is not MlpExtractor or self.overridden:
            return {"shared": list(self.parameters())}
        critic = [self.mlp_extractor.value_net, self.value_net]
        if self.vf_features_extractor is not self.pi_features_extractor:
            critic.append(self.vf_features_extractor)
        shares_features = self.vf_features_extractor is self.pi_features_extractor and any(
            True for _ in self.features_extractor.parameters()
        )
        if shares_features:
            return {"shared": list(self.parameters())}
        of_critic = {id(parameter) for module in critic for parameter in module.parameters()}
        return {
            "policy": [p for p in self.parameters() if id(p) not in of_critic],
            "value": [p for p in self.parameters() if id(p) in of_critic],
        }

    @property
    def overridden(self) -> list[str]:
        """Methods through which a user's class may define another policy than SB3's networks and distributions."""
        return self.overridden_by_user(("forward", "evaluate_actions", "_get_action_dist_from_latent"))

    def overridden_by_user(self, names: Iterable[str]) -> list[str]:
        """
        Those methods that a user's class defines.

        :param names: of methods of SB3's ``ActorCriticPolicy``
        """
        return [name for name in names if _defined_by_user(type(self), name)]

    @property
    def absolute_because(self) -> str | None:
        """Why the log-ratio is formed from absolute log-probabilities; None where residuals serve."""
        kind, reason = self.__dict__.get("_absolute", (None, None))
        if kind is not type(self.action_dist):  # a user's class may set another at any time
            reason = self._why_absolute()
            self.__dict__["_absolute"] = type(self.action_dist), reason
        return cast("str | None", reason)

    def _why_absolute(self) -> str | None:
        if self.precision.log_ratio.startswith("absolute"):
            return f"precision {self.precision.name} asks for it"
        if self.overridden:
            return f"{type(self).__name__} overrides {', '.join(self.overridden)}"
        if not isinstance(self.action_dist, ResidualDistribution):
            return f"{type(self.action_dist).__name__} has no residual form"
        if self.action_dist.behaviour_size > MAX_STORED_LOGITS:
            return f"{self.action_dist.behaviour_size} logits per step are too many to store"
        return None

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """
        Act.

        :param obs: observations
        :param deterministic: take the mode of the distribution
        :return: actions, values (FP32, finite) and log-probabilities (FP32), which carry the behaviour policy's
            parameters to the rollout buffer
        """
        actor = self._actor_in_charge(obs)
        result = None if actor is None else actor.act(obs.numpy(), deterministic)
        if result is not None:
            return th.from_numpy(result[0]), *_tensors(result[1])
        actions, values, log_prob = super().forward(obs, deterministic)
        if self.absolute_because is None:
            distribution = cast(ResidualDistribution, self.action_dist)
            correction = distribution.correction(actions.flatten(1), log_prob) if actions.ndim > 1 else None
            attach_behaviour(log_prob, distribution.behaviour(), correction)
        return actions, self.precision.format.saturate(values.float()), log_prob

    def _get_action_dist_from_latent(self, latent_pi: Tensor) -> Distribution:
        """:raises ValueError: for an output that is not finite, outside minibatches: there the step is skipped"""
        distribution = super()._get_action_dist_from_latent(latent_pi)
        if not self.training and hasattr(distribution, "behaviour"):
            outputs = distribution.behaviour()[0]
            if not (outputs < th.inf).all():  # NaN or infinite; -inf is how a user masks an action
                raise ValueError(
                    f"The policy's activations overflow {self.precision.storage}, its output is not finite. "
                    "Normalise observations and rewards (VecNormalize), or lower learning_rate."
                )
        return distribution

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """
        Estimate values.

        :param obs: observations
        :return: FP32, finite, shape (batch, 1)
        """
        actor = self._actor_in_charge(obs)
        values = None if actor is None else actor.predict_values(cast(Tensor, obs).numpy())
        if values is not None:
            return th.from_numpy(values)
        return self.precision.format.saturate(super().predict_values(obs).float())

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        actor = self._actor_in_charge(observation)
        actions = None if actor is None else actor.predict(cast(Tensor, observation).numpy(), deterministic)
        return super()._predict(observation, deterministic) if actions is None else th.from_numpy(actions)

    def _actor_in_charge(self, obs: PyTorchObs) -> Actor | None:
        """None in training mode, where the caller wants gradients, and for observations that are no plain array."""
        if self.actor is None or self.training or th.is_grad_enabled():
            return None
        return self.actor if isinstance(obs, Tensor) and obs.device.type == "cpu" else None

    def set_training_mode(self, mode: bool) -> None:
        """
        Switch between training and acting; ``predict`` and each rollout start with it.

        :param mode: true for training
        """
        super().set_training_mode(mode)
        if not mode and self.actor is not None:
            self.actor.check()

    def evaluate(self, obs: PyTorchObs) -> Evaluation:
        """
        What ``evaluate_actions`` computes, short of log-probabilities, for an update that needs none.

        :param obs: observations of a minibatch
        """
        features = self.extract_features(obs)
        if self.share_features_extractor:
            latent_pi, latent_vf = self.mlp_extractor(features)
        else:
            latent_pi, latent_vf = (
                self.mlp_extractor.forward_actor(features[0]),
                self.mlp_extractor.forward_critic(features[1]),
            )
        distribution = cast(ResidualDistribution, self._get_action_dist_from_latent(latent_pi))
        return Evaluation(distribution, self.value_net(latent_vf).flatten().float())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """
        Load weights, rounding them to storage.

        :param state_dict: weights of any float format; other arguments are torch's
        :raises ValueError: for a weight that storage cannot hold, naming it; nothing has changed then
        """
        rounded = cast(dict[str, Any], copy.copy(state_dict))  # keeps torch's versions of the modules
        for name, _ in self.named_parameters():
            if name in state_dict:
                _check_range(state_dict[name], name, self.precision)
                rounded[name] = self.precision.format.store(state_dict[name].float())
        return super().load_state_dict(rounded, strict, assign)

    def load_from_vector(self, vector: np.ndarray) -> None:
        """
        Load parameters from a vector, rounding them to storage.

        :param vector: float, shape (parameters,)
        :raises ValueError: for a value that storage cannot hold; nothing has changed then
        """
        values = th.as_tensor(vector, dtype=th.float32, device=self.device)
        _check_range(values, "the vector", self.precision)
        # torch would replace the parameters' dtype by the vector's.
        nn.utils.vector_to_parameters(self.precision.format.store(values), self.parameters())

    def parameters_to_vector(self) -> np.ndarray:
        """Parameters as one FP32 vector."""
        vector: np.ndarray = th.cat([p.detach().reshape(-1).float() for p in self.parameters()]).cpu().numpy()
        return vector

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "precision": self.precision.to_dict()}


def _tensors(acted: Acted) -> tuple[Tensor, Tensor]:
    """Values, and log-probabilities that carry the behaviour policy's parameters."""
    log_prob = th.from_numpy(acted.log_prob)
    if acted.behaviour is not None:
        kind = GaussianBehaviour if len(acted.behaviour) == 2 else LogitsBehaviour
        correction = None if acted.correction is None else th.from_numpy(acted.correction)
        attach_behaviour(log_prob, kind(*map(th.from_numpy, acted.behaviour)), correction)
    return th.from_numpy(acted.value), log_prob


def _defined_by_user(policy_class: type, name: str) -> bool:
    """Whether a method of a half-precision policy comes from neither SB3 nor this package."""
    owners = (cls for cls in policy_class.__mro__ if name in vars(cls) and cls is not HalfPrecisionPolicy)
    return next(owners) is not ActorCriticPolicy


class ActorCriticPolicyFP16(HalfPrecisionPolicy, ActorCriticPolicy, _StorageObservations):  # type: ignore[misc]
    """
    SB3's ``ActorCriticPolicy`` (``MlpPolicy``) in half precision.

    Takes all of its arguments, and:

    :param precision: number format and protections, a preset's name or a ``Precision``
    """


class ActorCriticCnnPolicyFP16(HalfPrecisionPolicy, ActorCriticCnnPolicy, _StorageObservations):  # type: ignore[misc]
    """
    SB3's ``ActorCriticCnnPolicy`` (``CnnPolicy``) in half precision.

    Takes all of its arguments, and:

    :param precision: number format and protections, a preset's name or a ``Precision``
    """


class MultiInputActorCriticPolicyFP16(  # type: ignore[misc]
    HalfPrecisionPolicy, MultiInputActorCriticPolicy, _StorageObservations
):
    """
    SB3's ``MultiInputActorCriticPolicy`` (``MultiInputPolicy``) in half precision.

    Takes all of its arguments, and:

    :param precision: number format and protections, a preset's name or a ``Precision``
    """


_OF_SB3: dict[type[BasePolicy], type[HalfPrecisionPolicy]] = {
    ActorCriticPolicy: ActorCriticPolicyFP16,
    ActorCriticCnnPolicy: ActorCriticCnnPolicyFP16,
    MultiInputActorCriticPolicy: MultiInputActorCriticPolicyFP16,
}


@cache
def half_precision(policy_class: type[BasePolicy]) -> type[HalfPrecisionPolicy]:
    """
    The half-precision form of an actor-critic policy class, a user's own included.

    :param policy_class: derived from SB3's ``ActorCriticPolicy``
    :raises ValueError: for any other class
    """
    if issubclass(policy_class, HalfPrecisionPolicy):
        return policy_class
    if policy_class in _OF_SB3:
        return _OF_SB3[policy_class]
    if not issubclass(policy_class, ActorCriticPolicy):
        raise ValueError(f"{policy_class.__name__} is no actor-critic policy; derive it from ActorCriticPolicy.")
    bases = (HalfPrecisionPolicy, policy_class, _StorageObservations)
    return type(f"{policy_class.__name__}FP16", bases, {"__module__": policy_class.__module__})
