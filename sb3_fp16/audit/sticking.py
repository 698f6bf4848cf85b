"""
Weight sticking: updates that rounding turns into no change.

A weight that is rounded to nearest stays where it is until an update, or the sum of those that a higher precision
keeps, exceeds half a tick, the gap between neighbouring numbers of its format. Stochastic and dithered rounding move
it with the probability that the update has covered of the tick; a residual carries what rounding dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch as th
from torch import Tensor, nn

from sb3_fp16.audit.twin import Step, parameters_of
from sb3_fp16.layers import LayerRule
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.rounding import (
    FORMATS,
    Format,
    dither_key,
    dither_thresholds,
    random_key,
    random_thresholds,
    round_by_threshold,
)

WRITEBACKS = ("nearest", "residual", "stochastic", "dithered")
"""Of 16-bit weights."""
COPIES = ("copy, nearest", "copy, stochastic")
"""16-bit copies of FP32 weights, as mixed precision makes them."""
STORAGES = ("fp16", "bf16")

_SALT = 0x5851F42D


class LayerSticking(NamedTuple):
    """
    One parameter over some steps.

    :param name: of the parameter
    :param weights: its elements
    :param nonzero: updates that were not zero
    :param unchanged: share of those that changed nothing
    :param moved: share of the weights that lie elsewhere after the steps
    """

    name: str
    weights: int
    nonzero: int
    unchanged: float
    moved: float


class WritebackRow(NamedTuple):
    """
    All weights over some steps, written back in one way.

    :param storage: format of the weights that layers see
    :param writeback: how they are rounded to it
    :param unchanged: share of the nonzero updates that changed nothing
    :param moved: share of the weights that lie elsewhere after the steps
    :param retained: of the movement that was due over the steps, the part that took place: Σ Δθ·sign(U)/Σ|U| with U
        the sum of a weight's updates
    :param noise: distance from where the weights should be: Σ|Δθ − U|/Σ|U|
    :param steps_to_half_tick: median over the weights of the steps that cross half a tick, if all of them went one way
    """

    storage: str
    writeback: str
    unchanged: float
    moved: float
    retained: float
    noise: float
    steps_to_half_tick: float


class OwnSticking:
    """
    Watches the weights that a model's layers see: its parameters, or their 16-bit copies in mixed precision.

    :param twin: to be replayed
    """

    def __init__(self, twin: PPOFP16) -> None:
        self.twin = twin
        self.names = list(parameters_of(twin))
        self.first = self.last = self._seen(list(parameters_of(twin).values()))
        self.nonzero = [0] * len(self.names)
        self.unchanged = [0] * len(self.names)

    def observe(self, step: Step) -> None:
        """
        Look at one step.

        :param step: of the replay
        """
        before, self.last = self._seen(step.before), self._seen(step.after)
        for i, parameter in enumerate(step.after):
            nonzero = _is_updated(self.twin.policy.optimizer, parameter)
            self.nonzero[i] += int(nonzero.sum())
            self.unchanged[i] += int((nonzero & (before[i] == self.last[i])).sum())

    def _seen(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return seen_by_layers(self.twin.precision, self.names, parameters)

    def rows(self) -> list[LayerSticking]:
        """What was seen, one row per parameter."""
        counts = zip(self.names, self.first, self.last, self.nonzero, self.unchanged, strict=True)
        return [
            LayerSticking(
                name, first.numel(), nonzero, unchanged / max(1, nonzero), float((first != last).double().mean())
            )
            for name, first, last, nonzero, unchanged in counts
        ]


def seen_by_layers(precision: Precision, names: Sequence[str], parameters: Sequence[Tensor]) -> list[Tensor]:
    """
    Copies of the weights as layers compute with them: in mixed precision, their 16-bit copies.

    :param precision: of the model
    :param names: of the parameters
    :param parameters: of the model
    """
    if precision.compute == "storage":
        return [parameter.detach().clone() for parameter in parameters]
    rule = LayerRule(precision.compute_format, stochastic=precision.compute.endswith("-sr"))
    # log_std is no layer's, and stays in FP32.
    return [
        parameter.detach().clone() if name == "log_std" else rule.parameter(parameter.detach()).clone()
        for name, parameter in zip(names, parameters, strict=True)
    ]


def _is_updated(optimizer: th.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """Where an update is not zero: where the moment that it is a multiple of is not, at a learning rate above 0."""
    state = optimizer.state[parameter]
    moment = cast(Tensor, state.get("first_moment", state.get("exp_avg", parameter.grad)))
    return cast(Tensor, (moment != 0) & (optimizer.param_groups[0]["lr"] > 0))  # a replay gives all groups the same


@dataclass
class _Simulated:
    """Weights that are written back in one way."""

    kind: Format
    writeback: str
    first: Tensor
    weights: Tensor
    carry: Tensor
    unchanged: int = 0


class WritebackSimulation:
    """
    What each way of writing back makes of one stream of FP32 updates: every way is given the same ones.

    :param storage: a format to look at beside FP16 and BF16
    """

    def __init__(self, storage: str = "fp32") -> None:
        self.storages = dict.fromkeys((*STORAGES, storage))
        self.storages.pop("fp32", None)
        self.ways: list[_Simulated] = []
        self.steps = self.nonzero = 0

    def observe(self, step: Step) -> None:
        """
        Apply one update.

        :param step: of the replay of an FP32 twin
        """
        before = th.cat([parameter.reshape(-1) for parameter in step.before])
        update = before - th.cat([parameter.detach().reshape(-1) for parameter in step.after])
        if self.steps == 0:
            self._start(before)
        self.steps += 1
        self.due += update
        self.magnitude += update.abs()
        nonzero = update != 0
        self.nonzero += int(nonzero.sum())
        for way in self.ways:
            new = _written(way, update, self.index, self.steps)
            way.unchanged += int((nonzero & (new == way.weights)).sum())
            way.weights = new

    def _start(self, weights: Tensor) -> None:
        self.index = th.arange(len(weights), dtype=th.int32, device=weights.device)
        self.due, self.magnitude = th.zeros_like(weights), th.zeros_like(weights)
        for storage in self.storages:
            kind = FORMATS[storage]
            for writeback in (*WRITEBACKS, *COPIES):
                carry = weights.clone() if writeback in COPIES else th.zeros_like(weights)
                first = _copied(carry, writeback, kind) if writeback in COPIES else kind.store(weights).float()
                self.ways.append(_Simulated(kind, writeback, first, first, carry))

    def rows(self) -> list[WritebackRow]:
        """One row per format and way; none before the first step."""
        return list(self._rows())

    def _rows(self) -> Iterator[WritebackRow]:
        moving = self.magnitude > 0 if self.steps else th.zeros(0)
        if not moving.any():
            return
        due = -self.due[moving].double()
        total = due.abs().sum().clamp_min(th.finfo(th.float64).tiny)
        mean_update = self.magnitude[moving] / self.steps
        for way in self.ways:
            change = (way.weights - way.first)[moving].double()
            yield WritebackRow(
                storage=way.kind.name,
                writeback=way.writeback,
                unchanged=way.unchanged / max(1, self.nonzero),
                moved=float((change != 0).double().mean()),
                retained=float((change * due.sign()).sum() / total),
                noise=float((change - due).abs().sum() / total),
                steps_to_half_tick=float((way.kind.tick(way.weights[moving]) / 2 / mean_update).median()),
            )


def _written(way: _Simulated, update: Tensor, index: Tensor, t: int) -> Tensor:
    """The weights that layers see after an update, FP32."""
    if way.writeback in COPIES:
        way.carry = way.carry - update
        return _copied(way.carry, way.writeback, way.kind)
    if way.writeback == "residual":
        due = way.carry - update
        new = way.kind.store(way.weights + due).float()
        way.carry = due - (new - way.weights)
        return new
    new = way.weights - update
    if way.writeback != "nearest":
        new = round_by_threshold(new, _THRESHOLDS[way.writeback](index, th.tensor(t, device=index.device)), way.kind)
    return way.kind.store(new).float()


def _copied(weights: Tensor, writeback: str, kind: Format) -> Tensor:
    """Mixed precision's copy of FP32 weights."""
    return LayerRule(kind, stochastic=writeback == "copy, stochastic").parameter(weights)


_THRESHOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stochastic": lambda index, t: random_thresholds(index, random_key(t, _SALT, 0)),
    "dithered": lambda index, t: dither_thresholds(index, dither_key(t, _SALT)),
}
