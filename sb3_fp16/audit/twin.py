"""A copy of a model that an audit works on, and an update replayed on it with every step in sight."""

import copy
import io
import random
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure
from torch import Tensor, nn

from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.sharp import SHARP, state_scale_for

SINGLE = replace(Precision.presets["fp32"], log_ratio="residual")
"""FP32 whose log-ratio is formed as in 16 bits, so that it can train on a rollout of either."""


@contextmanager
def same_random_numbers() -> Generator[None]:
    """Put every global random number generator back: an audited run draws what it would have drawn unaudited."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(th.cuda.device_count()))
    with th.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def twin_of(model: PPO, precision: str | Precision | None = None) -> PPOFP16:
    """
    A copy with the model's weights, optimizer state and settings, as if it had been saved and loaded.

    :param model: of PPOFP16 or SB3's PPO; left as it is
    :param precision: in place of the model's own; that of SB3's PPO is ``fp32``
    """
    if precision is None:
        precision = model.precision if isinstance(model, PPOFP16) else "fp32"
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files that need sb3_fp16: this one is read here
        model.save(file)
    file.seek(0)
    twin = PPOFP16.load(file, device=model.device, precision=precision, verbose=0)
    twin.set_logger(configure(format_strings=[]))
    return twin


class Step(NamedTuple):
    """
    One optimizer step, tensors in the order of the optimizer's parameters.

    :param gradients: as the backward pass left them, times the scale of their network; None where there is none
    :param clipped: what the optimizer makes its step of: clipped, in true units, FP32
    :param before: parameters before the step, copies
    :param after: the parameters themselves
    """

    gradients: list[Tensor | None]
    clipped: list[Tensor | None]
    before: list[Tensor]
    after: list[nn.Parameter]


def parameters_of(model: PPO) -> dict[str, nn.Parameter]:
    """
    Parameters by name, in the order of the optimizer.

    :param model: whose policy
    """
    names = {id(parameter): name for name, parameter in model.policy.named_parameters()}
    return {names[id(p)]: p for group in model.policy.optimizer.param_groups for p in group["params"]}


def own_copy(rollout: RolloutBuffer) -> RolloutBuffer:
    """
    A rollout with the same arrays, which may be read as training reads it: SB3's buffers rearrange themselves then.

    :param rollout: left as it is
    """
    copied = copy.copy(rollout)
    observations: Any = rollout.observations
    if isinstance(observations, dict):
        copied.observations = cast(Any, dict(observations))
    return copied


def replay(twin: PPOFP16, rollout: RolloutBuffer, minibatches: int, observe: Callable[[Step], None]) -> None:
    """
    Train a twin by the reference engine on some minibatches of a rollout.

    :param twin: changed
    :param rollout: complete; read only
    :param minibatches: at most; no more than one epoch has
    :param observe: called after each step that was not skipped
    :raises ValueError: if training cannot recover from gradients that are not finite
    """
    optimizer = twin.policy.optimizer
    settings = replace(twin.update_settings(), n_epochs=1, target_kl=None)
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate
    parameters = list(parameters_of(twin).values())
    gradients: dict[nn.Parameter, Tensor] = {}
    before: list[Tensor] = []

    def keep(parameter: Tensor) -> None:
        gradients[cast(nn.Parameter, parameter)] = cast(Tensor, parameter.grad).clone()

    def start(*_: object) -> None:
        before[:] = [parameter.detach().clone() for parameter in parameters]

    def end(_: object, __: object, kwargs: dict[str, Any]) -> None:
        if not bool(kwargs.get("skip", False)):
            kappa = th.as_tensor(kwargs.get("coefficient", 1.0), dtype=th.float32).expand(len(parameters))
            pairs = zip(parameters, kappa, strict=True)
            clipped = [None if p.grad is None else p.grad.float() * k for p, k in pairs]
            observe(Step([gradients.get(p) for p in parameters], clipped, before, parameters))

    hooks: list[Any] = [p.register_post_accumulate_grad_hook(keep) for p in parameters]  # type: ignore[no-untyped-call]
    hooks += [optimizer.register_step_pre_hook(start), optimizer.register_step_post_hook(end)]
    engine = EagerEngine(twin.policy, twin.batch_size)
    engine.load_state_dict(twin.engine.state_dict())
    twin.policy.set_training_mode(True)
    try:
        engine.update(cast(RolloutBuffer, _Portion(rollout, minibatches)), settings)
    finally:
        for hook in hooks:
            hook.remove()


class _Portion:
    """The first minibatches of a rollout, for an engine."""

    def __init__(self, rollout: RolloutBuffer, minibatches: int) -> None:
        self.rollout, self.minibatches = rollout, minibatches

    def get(self, batch_size: int) -> Iterator[Any]:
        return islice(self.rollout.get(batch_size), self.minibatches)


def sharp_of(model: PPO) -> SHARP | None:
    """
    The model's optimizer, or the one that the preset ``fp16`` would give it; None where a user has chosen another.

    :param model: of PPOFP16 or SB3's PPO
    """
    optimizer = model.policy.optimizer
    if isinstance(optimizer, SHARP):
        return optimizer
    # Over FP32 weights, as they may be beyond FP16's range; the settings are those of the preset.
    optimizer = twin_of(model, replace(SINGLE, optimizer="sharp")).policy.optimizer
    if not isinstance(optimizer, SHARP):
        return None
    for group in optimizer.param_groups:
        group["state_dtype"], group["state_scale"] = th.float16, state_scale_for(model.max_grad_norm)
    return optimizer
