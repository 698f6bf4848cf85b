"""How near a model's numbers come to the ends of FP16's range, and what to do about it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor, nn

from sb3_fp16.audit.mismatch import samples_in_order
from sb3_fp16.audit.twin import Step, parameters_of
from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.rounding import FORMATS

_HALF = FORMATS["fp16"]

ADVICE = {
    "observation": "normalize observations (VecNormalize)",
    "activation": "normalize observations (VecNormalize), or lower the learning rate: weights have grown",
    "weight": "lower the learning rate, or train in fp32",
    "reward": "scale rewards (VecNormalize)",
    "value": "scale rewards (VecNormalize)",
    "return": "scale rewards (VecNormalize), or lower gamma",
}
"""By the kind of number, what to do where it comes near the end of the range."""


class RangeRow(NamedTuple):
    """
    The largest of some numbers.

    :param kind: what they are, a key of ``ADVICE``
    :param name: which of them
    :param largest: greatest magnitude, in FP32 where it does not come from a 16-bit rollout
    :param saturated: numbers of the rollout that exceeded its format
    """

    kind: str
    name: str
    largest: float
    saturated: int = 0

    @property
    def title(self) -> str:
        """Kind and name, the name once."""
        return self.name if self.name == self.kind else f"{self.kind} {self.name}"

    @property
    def used(self) -> float:
        """Share of FP16's range, 65,504."""
        return self.largest / _HALF.max


class GradientRow(NamedTuple):
    """
    The gradients of one parameter before any scaling, against FP16's lower end.

    :param name: of the parameter
    :param scale: S, what the preset ``fp16`` multiplies its network's loss by
    :param flushed: share of the nonzero gradients that FP16 would round to zero without it
    :param subnormal: share that would lose significant bits without it
    :param flushed_when_scaled: as ``flushed``, with it
    :param subnormal_when_scaled: likewise
    """

    name: str
    scale: float
    flushed: float
    subnormal: float
    flushed_when_scaled: float
    subnormal_when_scaled: float


def range_rows(twin: PPOFP16, rollout: RolloutBuffer, most: int) -> list[RangeRow]:
    """
    Largest observations, activations, weights, rewards, values and returns.

    :param twin: in FP32, so that nothing saturates in it
    :param rollout: complete
    :param most: samples to evaluate
    """
    saturated = rollout.saturated if isinstance(rollout, RolloutBufferFP16) else {}

    def row(kind: str, name: str, values: Any) -> RangeRow:
        return RangeRow(kind, name, _largest(values), saturated.get(f"{kind}s", 0))

    observations = rollout.observations if isinstance(rollout.observations, dict) else {"": rollout.observations}
    rows = [row("observation", key or "observation", values) for key, values in observations.items()]
    rows += [row(kind, kind, getattr(rollout, f"{kind}s")) for kind in ("reward", "value", "return")]
    rows += [RangeRow("weight", name, _largest(weights)) for name, weights in parameters_of(twin).items()]
    return rows + list(_activations(twin, rollout, most))


@th.no_grad()
def _activations(twin: PPOFP16, rollout: RolloutBuffer, most: int) -> Iterator[RangeRow]:
    """What each layer gives at the rollout's observations."""
    largest: dict[str, float] = {}
    hooks = []
    for name, module in twin.policy.named_modules():
        if not list(module.children()) and not isinstance(module, (nn.Flatten, nn.Identity)):

            def look(_: nn.Module, __: Any, output: Any, name: str = name) -> None:
                if isinstance(output, Tensor):
                    largest[name] = max(largest.get(name, 0.0), _largest(output))

            hooks.append(module.register_forward_hook(look))
    twin.policy.set_training_mode(False)
    stride = -(-rollout.buffer_size * rollout.n_envs // most)
    for batch in samples_in_order(rollout, twin.batch_size, stride):
        observations = batch.observations
        twin.policy.evaluate_actions(observations, _first_actions(twin, observations))
    for hook in hooks:
        hook.remove()
    yield from (RangeRow("activation", name, value) for name, value in largest.items())


def _first_actions(twin: PPOFP16, observations: Any) -> Tensor:
    """Any actions: layers do not see them."""
    count = len(next(iter(observations.values())) if isinstance(observations, dict) else observations)
    action = np.asarray(twin.action_space.sample())
    # As minibatches hold them: in FP32.
    return th.as_tensor(np.broadcast_to(action, (count, *action.shape)).astype(np.float32), device=twin.device)


def _largest(values: Any) -> float:
    if isinstance(values, Tensor):
        return float(values.detach().abs().max()) if values.numel() else 0.0
    return float(np.abs(np.asarray(values, dtype=np.float64)).max(initial=0.0))


class GradientRange:
    """
    Watches the gradients of an FP32 twin.

    :param scales: S per parameter, in the order of the optimizer
    :param names: of the parameters
    """

    def __init__(self, names: list[str], scales: list[float]) -> None:
        self.names, self.scales = names, scales
        self.counts = np.zeros((len(names), 5), dtype=np.int64)  # nonzero, and the four shares of ``GradientRow``

    def observe(self, step: Step) -> None:
        """
        Count the gradients of one step.

        :param step: of the replay
        """
        for i, gradient in enumerate(step.gradients):
            if gradient is None:
                continue
            magnitude = gradient.abs()
            magnitude = magnitude[magnitude > 0]
            counts = [len(magnitude)]
            for scale in (1.0, self.scales[i]):
                scaled = magnitude * scale
                flushed = int((scaled <= _HALF.smallest_normal * 2.0**-11).sum())  # half of the smallest subnormal
                counts += [flushed, int((scaled < _HALF.smallest_normal).sum()) - flushed]
            self.counts[i] += counts

    def rows(self) -> list[GradientRow]:
        """One row per parameter."""
        return [
            GradientRow(name, scale, *(count / max(1, total) for count in counts))
            for name, scale, (total, *counts) in zip(self.names, self.scales, self.counts.tolist(), strict=True)
        ]
