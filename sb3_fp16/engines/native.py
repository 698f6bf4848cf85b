"""The CPU engine: one C++ call per update, with the results of the reference engine."""

from collections.abc import Iterator
from typing import Any, TypeGuard, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn

from sb3_fp16.buffers import Array, RolloutBufferFP16
from sb3_fp16.distributions import DiagGaussianFP16
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.residuals import log_ratio_bounds
from sb3_fp16.sharp import SHARP, shared_as

try:
    from sb3_fp16 import _cpu

    BUILT = True
except ImportError:  # no compiler where the package was installed
    BUILT = False

MAX_ACTION_DIMS = 4096  # what the C++ side has room for on its stack


def why_not_native(policy: HalfPrecisionPolicy) -> str | None:
    """
    The first reason, if any, why the native engine cannot train a policy.

    :param policy: with its optimizer
    """
    return next(_obstacles(policy), None)


def _obstacles(policy: HalfPrecisionPolicy) -> Iterator[str]:
    """Reasons in an order in which each check may rely on those before it."""
    observations = policy.observation_space
    if not BUILT:
        yield "sb3_fp16._cpu was not built"
    if policy.device.type != "cpu":
        yield f"the policy is on {policy.device}"
    if not _serves(policy):
        yield f"precision {policy.precision.name} is not native"
    if policy.overridden:
        yield f"{type(policy).__name__} overrides {', '.join(policy.overridden)}"
    if type(policy.action_dist) not in (DiagGaussianFP16, DiagGaussianDistribution):
        yield "the action distribution is no plain Gaussian"
    if not isinstance(observations, spaces.Box) or np.dtype(observations.dtype).kind != "f":
        yield "observations are no Box of floats"
    if type(policy.features_extractor) is not FlattenExtractor or type(policy.mlp_extractor) is not MlpExtractor:
        yield "the policy has an extractor of its own"
    heads = (policy.action_net, policy.value_net)
    if not all(isinstance(head, nn.Linear) and head.bias is not None for head in heads):
        yield "a head is no linear layer"
    layers = [*policy.mlp_extractor.policy_net, *policy.mlp_extractor.value_net]
    if not all(isinstance(layer, nn.Linear) or type(layer) is nn.Tanh for layer in layers):
        yield "an activation is not tanh"
    if not _is_plain(policy.optimizer, policy):
        yield f"{type(policy.optimizer).__name__} is not native, or not over all parameters"
    if policy.log_std.numel() > MAX_ACTION_DIMS:
        yield f"there are more than {MAX_ACTION_DIMS} action dimensions"


def _serves(policy: HalfPrecisionPolicy) -> bool:
    """FP16 with SHARP, or FP32 with Adam, all else as in the presets ``fp16`` and ``fp32``."""
    precision = policy.precision
    kinds = {"fp16": (("residual", "absolute"), "sharp"), "fp32": (("absolute",), "adam")}
    log_ratios, optimizer = kinds.get(precision.storage, ((), ""))
    as_presets = precision.compute == "storage" and precision.global_scalars and precision.optimizer == optimizer
    return as_presets and precision.log_ratio in log_ratios


def _is_plain(optimizer: th.optim.Optimizer, policy: HalfPrecisionPolicy) -> bool:
    """One group of all parameters, contiguous and trained, with settings that the C++ side knows."""
    groups, parameters = optimizer.param_groups, list(policy.parameters())
    in_order = [p for group in groups for p in group["params"]]
    if len(groups) != 1 or [id(p) for p in in_order] != [id(p) for p in parameters]:
        return False
    dtype = policy.precision.dtype
    if not all(p.requires_grad and p.is_contiguous() and p.dtype == dtype for p in parameters):
        return False
    if policy.precision.storage == "fp16":
        return isinstance(optimizer, SHARP) and groups[0]["state_dtype"] in (None, th.float16)
    unknown = ("amsgrad", "maximize", "decoupled_weight_decay")
    return type(optimizer) is th.optim.Adam and not any(groups[0].get(name, False) for name in unknown)


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
        self.isa = isa or next(name for name in ("avx512", "avx2", "portable") if _cpu.supports(name))
        self.reason = f"one C++ call per update, {self.isa}"

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """See ``Engine.update``."""
        # What was true when the engine was chosen may have changed: addresses must not be trusted to anything else.
        if not _is_ours(rollout, self.policy) or why_not_native(self.policy) is not None:
            return super().update(rollout, settings)
        random_state = np.random.get_state()
        order = np.stack([rollout.minibatch_rows() for _ in range(settings.n_epochs)])
        scale = self.gradient_scale
        scales = scale.scales.numpy().copy()
        counters = np.array([scale.good_steps, scale.skipped_steps, scale.skips_at_floor], dtype=np.int64)
        skipped_before = int(counters[1])
        stats = _cpu.update(
            self.isa, self._plan(), _addresses(rollout), self._settings(rollout, settings), order, scales, counters
        )
        scale.scales = th.from_numpy(scales)
        scale.good_steps, scale.skipped_steps, scale.skips_at_floor = (th.tensor(int(count)) for count in counters)
        if stats["stopped_at_kl"] is not None:  # take back the orders of the epochs that were not begun
            np.random.set_state(random_state)
            for _ in range(stats["epochs"]):
                rollout.minibatch_rows()
        scale.raise_if_unrecoverable()
        nonzero, stuck = stats.pop("nonzero"), stats.pop("stuck")
        return UpdateStats(
            **stats,
            loss_scale=float(scales.min()),
            skipped_steps=int(counters[1]) - skipped_before,
            stuck_fraction=stuck / max(1, nonzero),
        )

    def workspace(self) -> dict[str, int]:
        """See ``Engine.workspace``: what the C++ side reserves, columns padded to 16."""

        def padded(columns: int) -> int:
            return -(-columns // 16) * 16

        plan = self._plan()
        shapes = [shape[2:] for net in ("policy", "value") for shape in plan[net]]
        largest = max(p.numel() for p in self.policy.parameters())
        return {
            "weight tiles": sum(o * padded(i) + i * padded(o) for i, o in shapes),
            "gradients": sum(o * padded(i) + padded(o) for i, o in shapes),
            "activations and signals": self.batch_size * sum(2 * padded(o) for _, o in shapes),
            "SHARP scratch": 8 * (largest + 16),
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

    def _plan(self) -> dict[str, Any]:
        """Addresses and shapes of parameters, optimizer state and layers."""
        policy, parameters = self.policy, list(self.policy.parameters())
        position = {id(p): i for i, p in enumerate(parameters)}
        starts = np.cumsum([0, *(p.numel() for p in parameters)])
        entries = [self._entry(i, p, int(starts[i])) for i, p in enumerate(parameters)]

        def layers(net: nn.Module, head: nn.Module) -> list[tuple[int, int, int, int]]:
            linear = [m for m in [*net.children(), head] if isinstance(m, nn.Linear)]
            return [(position[id(m.weight)], position[id(m.bias)], m.in_features, m.out_features) for m in linear]

        mlp = policy.mlp_extractor
        return {
            "half": policy.precision.storage == "fp16",
            "parameters": entries,
            "log_std": position[id(policy.log_std)],
            "policy": layers(mlp.policy_net, policy.action_net),
            "value": layers(mlp.value_net, policy.value_net),
        }

    def _entry(self, i: int, parameter: nn.Parameter, first_element: int) -> dict[str, Any]:
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
        return {
            "data": parameter.data_ptr(),
            "first_moment": first.data_ptr(),
            "second_moment": second.data_ptr(),
            "carry": state["carry"].data_ptr() if "carry" in state else 0,
            "step": state["step"].data_ptr(),
            "rows": parameter.shape[0],
            "columns": parameter.numel() // parameter.shape[0],
            "first_element": first_element,
            "network": int(self._network_of_parameter[i]),
            "sharing": shared_as(parameter.shape, sharing),
            "writeback": writeback,
        }


def _is_ours(rollout: RolloutBuffer, policy: HalfPrecisionPolicy) -> TypeGuard[RolloutBufferFP16]:
    """A rollout whose memory the C++ side can read; one with log_std per step runs on the reference."""
    if not isinstance(rollout, RolloutBufferFP16) or rollout.precision != policy.precision:
        return False
    return rollout.behaviour is None or rollout.behaviour[1].ndim == 1


def _addresses(rollout: RolloutBufferFP16) -> dict[str, int]:
    def address(array: Array | None) -> int:
        return 0 if array is None else array.ctypes.data

    mean, log_std = rollout.behaviour or (None, None)
    return {
        "observations": address(rollout.observations),
        "actions": address(rollout.actions),
        "values": address(rollout.values),
        "advantages": address(rollout.advantages),
        "returns": address(rollout.returns),
        "mean": address(mean),
        "log_std": address(log_std),
        "correction": address(rollout.corrections),
        "old_log_prob": address(rollout.log_probs),
        "observation_size": int(np.prod(rollout.obs_shape)),
        "action_size": rollout.action_dim,
    }
