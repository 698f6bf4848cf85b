"""The CPU engine: one C++ call per update and one per action, with the results of the reference engine."""

import warnings
from contextlib import suppress
from typing import Any, TypeGuard, cast

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor, nn

from sb3_fp16.buffers import Array, RolloutBufferFP16
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine, diverged
from sb3_fp16.engines.native_actor import NativeActor
from sb3_fp16.engines.native_plan import HEADS, parts_of, plan_of, why_not_native
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.residuals import log_ratio_bounds
from sb3_fp16.sharp import SHARP, shared_as

with suppress(ImportError):  # no compiler where the package was installed
    from sb3_fp16 import _cpu

_ROLLOUT_METHODS = ("get", "minibatch_rows", "_get_samples")
ONE_THREAD_WIDTH = 256
"""Layers up to this width run on one thread: waking another would take longer."""


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
        self.isa = isa or _cpu.best()
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
        parts = parts_of(self.policy)
        reason = why_not_native(self.policy, parts)
        behaviour: tuple[Array, ...] = getattr(rollout, "behaviour", None) or ()
        if reason is None and len(behaviour) == 2 and behaviour[1].ndim == 3:
            return super().update(rollout, settings)  # a callback has changed log_std within the rollout
        if reason is None and not is_ours(rollout, self.policy):
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

        plan = plan_of(self.policy, parts_of(self.policy).parameters)
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
        """``plan_of`` with the optimizer's state."""
        plan = plan_of(self.policy, parameters)
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
            "root_second_moment": second.data_ptr(),
            "carry": 0 if carry is None else carry.data_ptr(),
            "step": step.data_ptr(),
            "first_element": first_element,
            "coefficient": self._networks_in_order[i],
            "sharing": shared_as(parameter.shape, sharing),
            "writeback": writeback,
        }


def is_ours(rollout: RolloutBuffer, policy: HalfPrecisionPolicy) -> TypeGuard[RolloutBufferFP16]:
    """
    Whether a rollout is complete, and in arrays as RolloutBufferFP16 makes them.

    :param rollout: to be read without torch
    :param policy: that it was collected with
    """
    if not isinstance(rollout, RolloutBufferFP16) or rollout.precision != policy.precision or not rollout.full:
        return False
    if any(getattr(type(rollout), name) is not getattr(RolloutBufferFP16, name) for name in _ROLLOUT_METHODS):
        return False
    steps, kind = (rollout.buffer_size, rollout.n_envs), rollout.precision.numpy_dtype
    behaviour, log_std = (*(rollout.behaviour or ()), None, None)[:2]
    gaussian = HEADS[type(policy.action_dist)] == "gaussian"
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
    is_categorical = HEADS[type(distribution)] == "categorical"
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
