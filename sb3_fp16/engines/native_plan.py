"""What the native engine serves and why not, and a policy as the C++ side takes it: addresses, shapes, formats."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
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

from sb3_fp16.distributions import BernoulliFP16, CategoricalFP16, DiagGaussianFP16, MultiCategoricalFP16
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.precision import Precision
from sb3_fp16.sharp import SHARP, root_shape

try:
    from sb3_fp16 import _cpu  # noqa: F401  # a module that is there but does not load counts as missing

    BUILT = True
except ImportError:  # no compiler where the package was installed
    BUILT = False

_TREE = Path(__file__).parents[2]
MISSING = (
    f"{_TREE} is a source tree whose native CPU engine was not built: run Python in another folder to use what is "
    "installed, or install the tree with pip install --editable"
    if (_TREE / "setup.py").exists()
    else "sb3_fp16 was installed without its native CPU engine, as no C++ compiler was found: install one, and "
    "reinstall with SB3_FP16_CPU=1, which shows why a build fails"
)
"""Why there is no native engine where there is none."""

HEADS: dict[type[Distribution], str] = {
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
LARGE = 1 << 22
"""Bytes of parameters beyond which an action does not look at them all."""


def why_not_native(policy: HalfPrecisionPolicy, parts: "Parts | None" = None) -> str | None:
    """
    The first reason, if any, why the native engine cannot train a policy.

    :param policy: with its optimizer
    :param parts: of the policy, where they are known already
    """
    parts = parts_of(policy) if parts is None else parts
    return next(obstacles_to_acting(policy, parts), None) or next(obstacles_to_training(policy, parts), None)


class Parts(NamedTuple):
    """A policy's modules and parameters, each once and in torch's order; torch's own iterators are slow."""

    modules: list[nn.Module]
    parameters: list[nn.Parameter]


def parts_of(policy: HalfPrecisionPolicy) -> Parts:
    """
    Modules and parameters as they are now.

    :param policy: to be looked at
    """
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module] = [policy]
    while waiting:
        module = waiting.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
    parameters = {id(p): p for module in modules.values() for p in module._parameters.values() if p is not None}
    return Parts(list(modules.values()), list(parameters.values()))


def obstacles_to_acting(policy: HalfPrecisionPolicy, parts: Parts) -> Iterator[str]:
    """Reasons in an order in which each check may rely on those before it."""
    if not BUILT:
        yield "sb3_fp16._cpu was not built"
    if policy.device.type != "cpu":
        yield f"the policy is on {policy.device}"
    yield from obstacles_anywhere(policy, parts)


def obstacles_anywhere(policy: HalfPrecisionPolicy, parts: Parts) -> Iterator[str]:
    """Reasons against a policy that no engine but the reference's torch code serves, on whatever device."""
    observations, overridden = policy.observation_space, policy.overridden_by_user(_OVERRIDES) or policy.overridden
    if not policy.precision.global_scalars and not is_naive(policy.precision):
        yield "without module A only torch's Adam and log-probabilities in FP16 are native"
    if policy.precision.log_ratio == "absolute-stored" and not is_naive(policy.precision):
        yield "log-probabilities in storage format are native without module A only"
    if overridden:
        yield f"{type(policy).__name__} overrides {', '.join(overridden)}"
    if type(policy.action_dist) not in HEADS:
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
    if any(module._forward_hooks or module._forward_pre_hooks for module in parts.modules) or hooked_globally():
        yield "a module has a hook"
    if any("forward" in module.__dict__ for module in parts.modules):
        yield "a module's forward was replaced"
    dtype = policy.precision.dtype
    if not all(p.is_contiguous() and p.dtype == dtype and p.data_ptr() for p in parts.parameters):
        yield "a parameter is not contiguous, empty, or of another format"
    if not _fits(policy):
        yield "layers do not fit each other, the observations or the actions"


def obstacles_to_training(policy: HalfPrecisionPolicy, parts: Parts) -> Iterator[str]:
    """Reasons of the optimizer and the gradients."""
    precision, optimizer = policy.precision, policy.optimizer
    if precision.optimizer != ("adam" if precision.storage == "fp32" or is_naive(precision) else "sharp"):
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


def hooked_globally() -> bool:
    """Whether torch calls a hook for every module."""
    return cast(bool, cast(Any, torch_module)._has_any_global_hook())


def _fits(policy: HalfPrecisionPolicy) -> bool:
    """Whether shapes are as the C++ side takes them to be."""
    distribution, gaussian = policy.action_dist, HEADS[type(policy.action_dist)] == "gaussian"
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


def is_naive(precision: Precision) -> bool:
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
    return name, float(next((slope for slope in slopes_of(module) if slope is not None), 0.0))


def slopes_of(module: nn.Module) -> tuple[Any, Any]:
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


def plan_of(policy: HalfPrecisionPolicy, parameters: list[nn.Parameter]) -> dict[str, Any]:
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

    head, distribution = HEADS[type(policy.action_dist)], policy.action_dist
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
        "naive": is_naive(precision),
        "two_sum": precision.log_ratio == "residual-twosum" and head == "gaussian",
        "round_actions": precision.round_actions,
        "networks": 1,
        "threads": 1,
        "compares": sum(p.nbytes for p in parameters) <= LARGE,
        "hands_on": policy.absolute_because is None,
        "corrects": policy.absolute_because is None and head == "gaussian" and not precision.round_actions,
    }
