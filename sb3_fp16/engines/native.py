"""The CPU engine: one C++ call per update and one per action, with the results of the reference engine."""

import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_not
from threading import get_ident
from typing import Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
)
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sb3_fp16.buffers import Acted, Array, RolloutBufferFP16
from sb3_fp16.distributions import BernoulliFP16, CategoricalFP16, DiagGaussianFP16, MultiCategoricalFP16
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine, diverged
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.precision import Precision
from sb3_fp16.residuals import log_ratio_bounds
from sb3_fp16.sharp import SHARP, root_shape, shared_as

try:
    from sb3_fp16 import _cpu

    BUILT = True
except ImportError:  # no compiler where the package was installed
    BUILT = False

_HEADS: dict[type[Distribution], str] = {
    DiagGaussianDistribution: "gaussian",
    DiagGaussianFP16: "gaussian",
    CategoricalDistribution: "categorical",
    CategoricalFP16: "categorical",
    MultiCategoricalDistribution: "categorical",
    MultiCategoricalFP16: "categorical",
    BernoulliDistribution: "bernoulli",
    BernoulliFP16: "bernoulli",
}
_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Tanh: "tanh",
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}
_OVERRIDES = ("extract_features", "get_distribution", "predict_values", "_predict")
MOST_DRAWS = 64
"""Threads and numbers of environments whose arrays of random numbers an actor keeps."""
LARGE = 1 << 22
"""Bytes of parameters beyond which an action does not look at them all."""
_ROLLOUT_METHODS = ("get", "minibatch_rows", "_get_samples")
ONE_THREAD_WIDTH = 256
"""Layers up to this width run on one thread: waking another would take longer."""
_NOT_FINITE, _SATURATED, _CHANGED = 1, 2, 4  # flags of an action


def best_isa() -> str:
    """The best instruction set of this processor that the native module knows."""
    return next(name for name in ("avx512", "avx2", "portable") if _cpu.supports(name))


def why_not_native(policy: HalfPrecisionPolicy) -> str | None:
    """
    The first reason, if any, why the native engine cannot train a policy.

    :param policy: with its optimizer
    """
    return _why_not(policy, _parts_of(policy))


def _why_not(policy: HalfPrecisionPolicy, parts: "_Parts") -> str | None:
    return next(_obstacles_to_acting(policy, parts), None) or next(_obstacles_to_training(policy, parts), None)


class _Parts(NamedTuple):
    """A policy's modules and parameters, each once and in torch's order; torch's own iterators are slow."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]


def _parts_of(policy: HalfPrecisionPolicy) -> _Parts:
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module] = [policy]
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    parameters = {id(p): p for module in modules.values() for p in module._parameters.values() if p is not None}
    return _Parts(list(modules.values()), list(parameters.values()))


def _obstacles_to_acting(policy: HalfPrecisionPolicy, parts: _Parts) -> Iterator[str]:
    """Reasons in an order in which each check may rely on those before it."""
    observations, overridden = policy.observation_space, policy.overridden_by_user(_OVERRIDES) or policy.overridden
    if not BUILT:
        yield "sb3_fp16._cpu was not built"
    if policy.device.type != "cpu":
        yield f"the policy is on {policy.device}"
    if not policy.precision.global_scalars and not _is_naive(policy.precision):
        yield "without module A only torch's Adam and log-probabilities in FP16 are native"
    if policy.precision.log_ratio == "absolute-stored" and not _is_naive(policy.precision):
        yield "log-probabilities in storage format are native without module A only"
    if overridden:
        yield f"{type(policy).__name__} overrides {', '.join(overridden)}"
    if type(policy.action_dist) not in _HEADS:
        yield f"the action distribution is {type(policy.action_dist).__name__}"
    if not isinstance(observations, spaces.Box) or np.dtype(observations.dtype).kind != "f":
        yield "observations are no Box of floats"
    if type(policy.features_extractor) is not FlattenExtractor or type(policy.mlp_extractor) is not MlpExtractor:
        yield "the policy has an extractor of its own"
    for net in (policy.mlp_extractor.policy_net, policy.mlp_extractor.value_net):
        if type(net) is not nn.Sequential:
            yield f"a network is a {type(net).__name__}"
        modules = list(net)
        known = (_is_linear(module) or _activation(module) is not None for module in modules)
        unknown = next(
            (type(module).__name__ for module, is_known in zip(modules, known, strict=True) if not is_known), None
        )
        if unknown is not None:
            yield f"{unknown} is no native layer or activation"
        if not all(map(_is_linear, modules[::2])) or any(map(_is_linear, modules[1::2])) or len(modules) % 2 != 0:
            yield "layers and activations do not alternate"
    if not _is_linear(policy.action_net) or not _is_linear(policy.value_net):
        yield "a head is no linear layer with a bias"
    if any(module._forward_hooks or module._forward_pre_hooks for module in parts.modules) or _hooked_globally():
        yield "a module has a hook"
    if any("forward" in module.__dict__ for module in parts.modules):
        yield "a module's forward was replaced"
    dtype = policy.precision.dtype
    if not all(p.is_contiguous() and p.dtype == dtype and p.data_ptr() for p in parts.parameters):
        yield "a parameter is not contiguous, empty, or of another format"
    if not _fits(policy):
        yield "layers do not fit each other, the observations or the actions"


def _obstacles_to_training(policy: HalfPrecisionPolicy, parts: _Parts) -> Iterator[str]:
    precision, optimizer = policy.precision, policy.optimizer
    if precision.optimizer != ("adam" if precision.storage == "fp32" or _is_naive(precision) else "sharp"):
        yield f"{precision.optimizer} on {precision.storage} storage is not native"
    if not _is_plain(optimizer, policy, parts.parameters):
        yield f"{type(optimizer).__name__} is not native, or not over all parameters"
    mlp = policy.mlp_extractor
    layers = [*mlp.policy_net, policy.action_net, *mlp.value_net, policy.value_net]
    of_layers = [id(p) for layer in layers for p in layer._parameters.values()]
    log_std = policy._parameters.get("log_std")
    if sorted([*of_layers, *([] if log_std is None else [id(log_std)])]) != sorted(map(id, parts.parameters)):
        yield "layers share parameters, or there are others than theirs"
    hooked = (module._backward_hooks or module._backward_pre_hooks for module in parts.modules)
    if any(hooked) or any(p._backward_hooks for p in parts.parameters):
        yield "gradients have a hook"


def _hooked_globally() -> bool:
    return cast(bool, cast(Any, torch_module)._has_any_global_hook())


def _fits(policy: HalfPrecisionPolicy) -> bool:
    """Whether shapes are as the C++ side takes them to be."""
    distribution, gaussian = policy.action_dist, _HEADS[type(policy.action_dist)] == "gaussian"
    outputs = int(np.sum(getattr(distribution, "action_dims", getattr(distribution, "action_dim", 0))))
    log_std = policy._parameters.get("log_std")
    if gaussian and (log_std is None or log_std.shape != (outputs,)):
        return False
    mlp = policy.mlp_extractor
    for net, head, last in ((mlp.policy_net, policy.action_net, outputs), (mlp.value_net, policy.value_net, 1)):
        size = policy.features_dim
        for layer in (*list(net)[::2], head):
            weight, bias = cast(Tensor, layer._parameters["weight"]), cast(Tensor, layer._parameters["bias"])
            if weight.shape[1] != size or bias.shape != weight.shape[:1]:
                return False
            size = weight.shape[0]
        if size != last:
            return False
    return True


def _is_naive(precision: Precision) -> bool:
    """Every operation rounded to FP16, as the preset ``naive-fp16`` has it."""
    parts = (precision.storage, precision.global_scalars, precision.log_ratio, precision.optimizer)
    return parts == ("fp16", False, "absolute-stored", "adam")


def _is_linear(module: nn.Module) -> bool:
    return getattr(module, "original", type(module)) is nn.Linear and isinstance(
        module._parameters.get("bias"), nn.Parameter
    )


def _activation(module: nn.Module) -> tuple[str, float] | None:
    """Name and slope of a native activation."""
    kind = getattr(module, "original", type(module))
    if kind not in _ACTIVATIONS or getattr(module, "inplace", False):
        return None
    name = _ACTIVATIONS[kind]
    if name == "gelu" and cast(nn.GELU, module).approximate == "tanh":
        name = "gelu_tanh"
    return name, float(next((slope for slope in _slopes(module) if slope is not None), 0.0))


def _slopes(module: nn.Module) -> tuple[Any, Any]:
    """Of LeakyReLU and ELU; torch is slow to say that a module has no such attribute."""
    return module.__dict__.get("negative_slope"), module.__dict__.get("alpha")


def _is_plain(optimizer: th.optim.Optimizer, policy: HalfPrecisionPolicy, parameters: list[nn.Parameter]) -> bool:
    """One group of all parameters, trained, with settings that the C++ side knows."""
    groups, dtype = optimizer.param_groups, policy.precision.dtype
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    in_order = [p for group in groups for p in group["params"]]
    if len(groups) != 1 or [id(p) for p in in_order] != [id(p) for p in parameters]:
        return False
    if not all(p.requires_grad for p in parameters):
        return False
    if policy.precision.optimizer == "sharp":
        kind = policy.precision.format
        bits = None if kind.is_native else kind.significand_bits
        as_planned = groups[0].get("state_dtype") in (None, dtype) and groups[0].get("significand_bits") == bits
        return type(optimizer) is SHARP and as_planned and _holds(optimizer, parameters)
    unknown = ("amsgrad", "maximize", "decoupled_weight_decay")
    if type(optimizer) is not th.optim.Adam or any(groups[0].get(name, False) for name in unknown):
        return False
    return _holds(optimizer, parameters)


def _holds(optimizer: th.optim.Optimizer, parameters: list[nn.Parameter]) -> bool:
    """Whether the state there is, of each parameter, is as the C++ side takes it to be."""
    (group,) = optimizer.param_groups
    for i, p in enumerate(parameters):
        state = optimizer.state.get(p)
        if not state:
            continue
        if isinstance(optimizer, SHARP):
            sharing = group["sharing"] if isinstance(group["sharing"], str) else group["sharing"][i]
            root = th.float32 if group["root_rounding"] == "fp32" else p.dtype
            wanted = {"step": ((), th.int64), "first_moment": (tuple(p.shape), p.dtype)}
            wanted |= {"root_second_moment": (root_shape(p.shape, sharing), root)}
            wanted |= {"carry": (tuple(p.shape), th.float32)} if "carry" in state else {}
        else:
            wanted = {"step": ((), th.float32), **dict.fromkeys(("exp_avg", "exp_avg_sq"), (tuple(p.shape), p.dtype))}
        for name, (shape, dtype) in wanted.items():
            x = state.get(name)
            if not isinstance(x, Tensor) or tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous():
                return False
    return True


def _plan_of(policy: HalfPrecisionPolicy, parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Addresses and shapes of parameters and layers, formats and the action distribution."""
    precision = policy.precision
    position = {id(p): i for i, p in enumerate(parameters)}

    def layers(net: nn.Module, head: nn.Module) -> list[tuple[int, int, int, int, str, float]]:
        modules = [*cast(nn.Sequential, net), head]
        activations = [cast("tuple[str, float]", _activation(module)) for module in modules[1::2]]
        return [
            (position[id(m.weight)], position[id(m.bias)], m.weight.shape[1], m.weight.shape[0], *activation)
            for m, activation in zip(modules[::2], [*activations, ("none", 0.0)], strict=True)
        ]

    head, distribution = _HEADS[type(policy.action_dist)], policy.action_dist
    dims = getattr(distribution, "action_dims", getattr(distribution, "action_dim", 0))
    return {
        "storage": precision.storage,
        "compute": precision.storage if precision.compute == "storage" else precision.compute.removesuffix("-sr"),
        "stochastic_copy": precision.compute.endswith("-sr"),
        "parameters": [
            {"data": x.data_ptr(), "rows": x.numel() // x.shape[-1], "columns": x.shape[-1], "held": [x]}
            for x in (p.data for p in parameters)
        ],
        "policy": layers(policy.mlp_extractor.policy_net, policy.action_net),
        "value": layers(policy.mlp_extractor.value_net, policy.value_net),
        "head": head,
        "choices": np.atleast_1d(dims).tolist() if head == "categorical" else [],
        "log_std": position[id(policy.log_std)] if head == "gaussian" else -1,
        "naive": _is_naive(precision),
        "two_sum": precision.log_ratio == "residual-twosum" and head == "gaussian",
        "round_actions": precision.round_actions,
        "networks": 1,
        "threads": 1,
        "compares": sum(p.nbytes for p in parameters) <= LARGE,
        "hands_on": policy.absolute_because is None,
        "corrects": policy.absolute_because is None and head == "gaussian" and not precision.round_actions,
    }


class NativeActor:
    """
    Acts for a policy in C++: a ``policies.Actor``. Copies and pickles as None, as it refers to memory.

    :param policy: to act for
    :param isa: instruction set
    """

    def __init__(self, policy: HalfPrecisionPolicy, isa: str) -> None:
        self.policy, self.isa = policy, isa
        self._seen: tuple[Any, ...] = ()
        self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def check(self) -> None:
        """See ``policies.Actor``."""
        seen = tuple(_traits(self.policy))
        if seen != self._seen:
            self._seen = seen
            self._prepare()

    def _prepare(self) -> None:
        policy = self.policy
        self._native: _cpu.Actor | None = None
        self.look()
        self._views: list[Any] = []
        self._parts: list[Any] = []
        parts = _parts_of(policy)
        if next(_obstacles_to_acting(policy, parts), None) is not None:
            return
        plan = _plan_of(policy, parts.parameters)
        self._native = _cpu.Actor(self.isa, plan)
        self._parameters = parts.parameters
        # Views stay up to date, so that `_moved` sees what was put in a place of a module or parameter.
        self._views = [table.values() for m in parts.modules for table in (m._modules, m._parameters) if table]
        self._parts = list(chain.from_iterable(self._views))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._head, self._hands_on = plan["head"], plan["hands_on"]
        in_half = plan["naive"] and type(policy.action_dist) in (DiagGaussianFP16, CategoricalFP16)
        self._log_prob_dtype = np.dtype(np.float16 if in_half else np.float32)
        self._choices: list[int] = plan["choices"] or [plan["policy"][-1][3]]
        self._noise: dict[tuple[int, int], tuple[Array, list[Callable[[], Any]]]] = {}
        self._action_shape = cast("tuple[int, ...]", policy.action_space.shape)
        self._obs_shape = cast("tuple[int, ...]", policy.observation_space.shape)
        self._is_large = not plan["compares"]
        self._read_log_std()

    def look(self) -> None:
        """Let the next action look at all weights: they were written to in a way that torch does not count."""
        self._versions: list[int] = []

    def act(self, obs: Array, deterministic: bool = False) -> tuple[Array, Acted] | None:
        """See ``policies.Actor``."""
        result = self._call(obs, True, True, deterministic)
        if result is None:
            return None
        _, actions, value, log_prob, output, correction = result
        behaviour = None
        if self._hands_on:
            behaviour = (output,) if self._log_std is None else (output, self._log_std)
        return self._shaped(actions), Acted(
            value, log_prob.astype(self._log_prob_dtype, copy=False), behaviour, correction
        )

    def predict(self, obs: Array, deterministic: bool) -> Array | None:
        """See ``policies.Actor``."""
        result = self._call(obs, True, False, deterministic)
        if result is None:
            return None
        return cast(Array, result[1]) if self._head == "gaussian" else self._shaped(result[1])

    def predict_values(self, obs: Array) -> Array | None:
        """See ``policies.Actor``."""
        result = self._call(obs, False, True, True)
        return None if result is None else result[2]

    def _call(self, obs: Array, actions: bool, values: bool, deterministic: bool) -> tuple[Any, ...] | None:
        if self._native is not None and self._moved():
            self._prepare()
        native = self._native
        if native is None or obs.dtype.char not in "fd" or obs.shape[1:] != self._obs_shape:
            return None
        noise = None if deterministic else self._draw(len(obs))
        result = native.act(np.ascontiguousarray(obs), noise, actions, values, self._must_look())
        if flags := result[0]:
            if flags & _CHANGED:
                self._read_log_std()
            if flags & _NOT_FINITE:
                return None  # torch's way says what is wrong
            if flags & _SATURATED:
                cast(Any, self.policy).warn_if_saturated(th.from_numpy(obs), "observation")
        return result

    def _moved(self) -> bool:
        """Whether a module or parameter was replaced, or a parameter's memory."""
        parts = list(chain.from_iterable(self._views))
        if len(parts) != len(self._parts) or any(map(is_not, parts, self._parts)):
            return True
        return list(map(Tensor.data_ptr, self._parameters)) != self._addresses

    def _must_look(self) -> bool:
        """
        Whether torch counted a change of any weight, or an update or a rollout has come between. The C++ side asks
        where weights are so many that looking at them at each step would take long.
        """
        if not self._is_large:
            return True
        versions = [p._version for p in self._parameters]
        changed, self._versions = versions != self._versions, versions
        return changed

    def _draw(self, envs: int) -> Array:
        """
        Random numbers for one step, drawn as torch's own distributions draw them: standard normal, or exponential for
        each categorical choice (``multinomial`` takes the largest p/e), or uniform.
        """
        mine = get_ident(), envs  # other threads may be acting, too
        if mine not in self._noise:
            noise = th.empty(envs * sum(self._choices), dtype=th.float32)
            kind = {"gaussian": "normal_", "categorical": "exponential_", "bernoulli": "uniform_"}[self._head]
            parts = th.split(noise, [envs * n for n in self._choices])
            if len(self._noise) > MOST_DRAWS:
                self._noise.clear()
            self._noise[mine] = noise.numpy(), [getattr(part, kind) for part in parts]
        array, draws = self._noise[mine]
        for draw in draws:
            draw()
        return array

    def _read_log_std(self) -> None:
        self._log_std: Array | None = None
        if self._head == "gaussian":
            self._log_std = cast(Tensor, self.policy.log_std).detach().float().numpy().copy()

    def _shaped(self, actions: Array) -> Array:
        if self._head == "categorical":
            actions = actions.astype(np.int64)
        return actions if actions.shape[1:] == self._action_shape else actions.reshape(-1, *self._action_shape)


def _traits(policy: HalfPrecisionPolicy) -> Iterator[Any]:
    """What tells whether a policy may still be acted for as before, short of its weights."""
    yield from (type(policy.action_dist), _hooked_globally())
    waiting: list[nn.Module] = [policy]
    while waiting:
        module = waiting.pop()
        yield from (id(module), type(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        yield from ("forward" in module.__dict__, *_slopes(module))
        yield from ((id(p), p.data_ptr()) for p in module._parameters.values() if p is not None)
        waiting += [child for child in module._modules.values() if child is not None]


def _nothing() -> None:
    """What copies and pickles hold in an actor's place."""


class NativeEngine(EagerEngine):
    """
    PPO's update in C++; shares the reference's gradient scales and state.

    :param policy: one that ``why_not_native`` has no reason against
    :param batch_size: minibatch size, which the initial gradient scales depend on
    :param isa: instruction set, by default the best that the processor has
    """

    name = "native"
    keeps_gradients = False

    def __init__(self, policy: HalfPrecisionPolicy, batch_size: int, isa: str | None = None) -> None:
        super().__init__(policy, batch_size)
        self.batch_size = batch_size
        self.isa = isa or best_isa()
        self.reason = f"one C++ call per update and per action, {self.isa}"
        self._actor: NativeActor | None = None
        self._warned = False
        self._networks_in_order: list[int] = self._network_of_parameter.tolist()

    @property
    def actor(self) -> NativeActor:
        """See ``Engine.actor``; a copied engine makes its own."""
        if self._actor is None:
            self._actor = NativeActor(self.policy, self.isa)
        return self._actor

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """See ``Engine.update``."""
        # What was true when the engine was chosen may have changed: addresses must not be trusted to anything else.
        parts = _parts_of(self.policy)
        reason = _why_not(self.policy, parts)
        behaviour: tuple[Array, ...] = getattr(rollout, "behaviour", None) or ()
        if reason is None and len(behaviour) == 2 and behaviour[1].ndim == 3:
            return super().update(rollout, settings)  # a callback has changed log_std within the rollout
        if reason is None and not _is_ours(rollout, self.policy):
            reason = "the rollout is not complete, or not as RolloutBufferFP16 keeps it"
        if reason is not None:
            if not self._warned:
                self._warned = True
                warnings.warn(f"The native engine leaves updates to torch: {reason}.", stacklevel=2)
            return super().update(rollout, settings)
        assert isinstance(rollout, RolloutBufferFP16)
        random_state = None if settings.target_kl is None else np.random.get_state()
        order = np.stack([rollout.minibatch_rows() for _ in range(settings.n_epochs)])
        scale = self.gradient_scale
        scales = scale.scales.numpy().copy()
        counters = np.array([scale.good_steps, scale.skipped_steps, scale.skips_at_floor], dtype=np.int64)
        skipped_before = int(counters[1])
        addresses, kept = _addresses(rollout)
        held = rollout.arrays(), kept  # the GIL is released meanwhile: what another thread replaces must live on
        plan, numbers = self._plan(parts.parameters), self._settings(rollout, settings)
        try:
            stats = _cpu.update(self.isa, plan, addresses, numbers, order, scales, counters)
        finally:  # also where the user interrupts
            self.actor.look()
            scale.scales = th.from_numpy(scales)
            scale.good_steps, scale.skipped_steps, scale.skips_at_floor = (th.tensor(int(n)) for n in counters)
            del held
        if random_state is not None and stats["stopped_at_kl"] is not None:
            # Take back the orders of the epochs that were not begun.
            np.random.set_state(random_state)
            for _ in range(stats["epochs"]):
                rollout.minibatch_rows()
        scale.raise_if_unrecoverable()
        if stats.pop("diverged"):
            raise diverged(self.optimizer, self.policy.precision)
        nonzero, stuck = stats.pop("nonzero"), stats.pop("stuck")
        return UpdateStats(
            **stats,
            loss_scale=float(scales.min()),
            skipped_steps=int(counters[1]) - skipped_before,
            stuck_fraction=stuck / max(1, nonzero),
        )

    def workspace(self) -> dict[str, int]:
        """See ``Engine.workspace``: the larger part of what the C++ side reserves, columns padded to 16."""

        def padded(columns: int) -> int:
            return -(-columns // 16) * 16

        plan = _plan_of(self.policy, _parts_of(self.policy).parameters)
        shapes = [layer[2:4] for net in ("policy", "value") for layer in plan[net]]
        outputs = plan["policy"][-1][3]
        return {
            "weight tiles": sum(o * padded(i) + i * padded(o) + padded(o) for i, o in shapes),
            "gradients": sum(o * padded(i) + i * padded(o) + padded(o) for i, o in shapes),
            "activations and signals": padded(self.batch_size) * sum(2 * padded(o) for _, o in shapes),
            "samples": padded(self.batch_size) * (4 * outputs + 8 + padded(shapes[0][0])),
        }

    def _settings(self, rollout: RolloutBufferFP16, settings: UpdateSettings) -> dict[str, Any]:
        """Hyperparameters as plain numbers; a negative one stands for None."""
        (group,) = self.optimizer.param_groups
        lower, upper = log_ratio_bounds(settings.clip_range)
        return {
            "samples": rollout.buffer_size * rollout.n_envs,
            "batch_size": settings.batch_size,
            "n_epochs": settings.n_epochs,
            "clip_lower": lower,
            "clip_upper": upper,
            "clip_range_vf": -1.0 if settings.clip_range_vf is None else settings.clip_range_vf,
            "target_kl": -1.0 if settings.target_kl is None else settings.target_kl,
            "normalize_advantage": settings.normalize_advantage,
            "ent_coef": settings.ent_coef,
            "vf_coef": settings.vf_coef,
            "max_grad_norm": settings.max_grad_norm,
            "lr": float(group["lr"]),
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled_weight_decay": group.get("decoupled_weight_decay", False),
            "state_scale": group.get("state_scale", 1.0),
            "root_rounding": group.get("root_rounding", "fp32"),
            "seed": group.get("seed", 0) & 0xFFFFFFFF,
            "scale_floor": self.gradient_scale.floor.tolist(),
            "scale_ceiling": self.gradient_scale.ceiling.tolist(),
        }

    def _plan(self, parameters: list[nn.Parameter]) -> dict[str, Any]:
        """``_plan_of`` with the optimizer's state."""
        plan = _plan_of(self.policy, parameters)
        starts = np.cumsum([0, *(p.numel() for p in parameters)])
        for i, (entry, parameter) in enumerate(zip(plan["parameters"], parameters, strict=True)):
            entry.update(self._entry(i, parameter, int(starts[i]), entry["held"]))
        width = max(layer[3] for net in ("policy", "value") for layer in plan[net])
        threads = th.get_num_threads() if width > ONE_THREAD_WIDTH else 1
        return plan | {"networks": len(self.networks), "threads": threads}

    def _entry(self, i: int, parameter: nn.Parameter, first_element: int, held: list[Tensor]) -> dict[str, Any]:
        (group,) = self.optimizer.param_groups
        sharing, writeback = "elementwise", "nearest"
        if isinstance(self.optimizer, SHARP):
            modes = (value if isinstance(value, str) else value[i] for value in (group["sharing"], group["writeback"]))
            sharing, writeback = modes
            state = self.optimizer.state_of(parameter, group, sharing, writeback)
            first, second = state["first_moment"], state["root_second_moment"]
        else:
            state = cast(dict[str, th.Tensor], self.optimizer.state[parameter])
            if not state:  # as Adam makes it at its first step
                state.update(step=th.zeros(()), exp_avg=th.zeros_like(parameter), exp_avg_sq=th.zeros_like(parameter))
            first, second = state["exp_avg"], state["exp_avg_sq"]
        step, carry = state["step"], state.get("carry")
        held += [first, second, step, *([] if carry is None else [carry])]
        return {
            "first_moment": first.data_ptr(),
            "second_moment": second.data_ptr(),
            "carry": 0 if carry is None else carry.data_ptr(),
            "step": step.data_ptr(),
            "first_element": first_element,
            "network": self._networks_in_order[i],
            "sharing": shared_as(parameter.shape, sharing),
            "writeback": writeback,
        }


def _is_ours(rollout: RolloutBuffer, policy: HalfPrecisionPolicy) -> TypeGuard[RolloutBufferFP16]:
    """A complete rollout whose memory the C++ side can read."""
    if not isinstance(rollout, RolloutBufferFP16) or rollout.precision != policy.precision or not rollout.full:
        return False
    if any(getattr(type(rollout), name) is not getattr(RolloutBufferFP16, name) for name in _ROLLOUT_METHODS):
        return False
    steps, kind = (rollout.buffer_size, rollout.n_envs), rollout.precision.numpy_dtype
    behaviour, log_std = (*(rollout.behaviour or ()), None, None)[:2]
    gaussian = _HEADS[type(policy.action_dist)] == "gaussian"
    outputs = cast(nn.Linear, policy.action_net).out_features
    if (behaviour is None) == (rollout.log_probs is None) or (gaussian and (behaviour is None) != (log_std is None)):
        return False
    if any(x is None for x in (rollout.observations, rollout.values, rollout.advantages, rollout.returns)):
        return False
    if not gaussian and not _within(rollout.actions, policy):
        return False
    log_prob_kind = kind if rollout.precision.log_ratio == "absolute-stored" else np.dtype(np.float32)
    wanted = [
        (rollout.observations, (*steps, *rollout.obs_shape), kind),
        (rollout.actions, (*steps, rollout.action_dim), kind if gaussian else rollout.actions.dtype),
        *((array, steps, kind) for array in (rollout.values, rollout.advantages, rollout.returns)),
        (behaviour, (*steps, outputs), kind),
        (log_std, (outputs,), kind),
        (rollout.corrections, steps, kind),
        (rollout.log_probs, steps, log_prob_kind),
    ]
    return all(x is None or (x.shape == shape and x.dtype == t and x.flags.c_contiguous) for x, shape, t in wanted)


def _within(actions: Array, policy: HalfPrecisionPolicy) -> bool:
    """Whether discrete actions are among the choices."""
    distribution = policy.action_dist
    is_categorical = _HEADS[type(distribution)] == "categorical"
    choices = getattr(distribution, "action_dims", getattr(distribution, "action_dim", 0)) if is_categorical else 2
    return bool((actions >= 0).all() and (actions < np.asarray(choices)).all())


def _addresses(rollout: RolloutBufferFP16) -> tuple[dict[str, int], Array]:
    """Where the rollout lies, and an array that must live as long: discrete actions in FP32."""

    def address(array: Array | None) -> int:
        return 0 if array is None else array.ctypes.data

    behaviour, log_std = (*(rollout.behaviour or ()), None, None)[:2]
    is_discrete = rollout.actions.dtype != rollout.precision.numpy_dtype
    actions = rollout.actions.astype(np.float32) if is_discrete else rollout.actions
    return {
        "observations": address(rollout.observations),
        "actions": address(actions),
        "values": address(rollout.values),
        "advantages": address(rollout.advantages),
        "returns": address(rollout.returns),
        "behaviour": address(behaviour),
        "log_std": address(log_std),
        "correction": address(rollout.corrections),
        "old_log_prob": address(rollout.log_probs),
    }, actions
