"""What a format does to the state of an optimizer, and to its steps beside those of Adam in FP32."""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch as th
from torch import Tensor, nn

from sb3_fp16.audit.twin import Step
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.rounding import FORMATS, Format
from sb3_fp16.sharp import ROW_CLIP, SHARP, shared_as, stored_format

_RATE = 1e-3  # a learning rate that only scales steps, and keeps them inside FP16
FORMATS_OF = {kind.dtype: kind for kind in FORMATS.values() if kind.is_native}


class StateRow(NamedTuple):
    """
    One kind of optimizer state over all parameters.

    :param name: of the state
    :param storage: its format
    :param elements: numbers stored
    :param zero: share that is zero
    :param subnormal: share that is not, but has lost significant bits
    :param saturated: share at the format's largest number
    :param lost: share of second moments that are zero although their gradients were not: their first moments are not
    """

    name: str
    storage: str
    elements: int
    zero: float
    subnormal: float
    saturated: float
    lost: float = 0.0


class ShadowRow(NamedTuple):
    """
    An optimizer's steps against those of Adam in FP32, both given the same gradients from an empty state on.

    :param optimizer: what was compared
    :param ratio: mean |step| over Adam's
    :param cosine: of the angle between the steps
    :param zeroed: share of the second moments that are zero where Adam's are not
    """

    optimizer: str
    ratio: float
    cosine: float
    zeroed: float


class RootRow(NamedTuple):
    """
    SHARP's shared root second moments.

    :param clipped_rows: share of the rows outside [L/4, 4L] of their layer's (paper Sec. 3.3)
    :param dead_band: share of all root second moments that one more step would change, but not if rounded to nearest
    """

    clipped_rows: float
    dead_band: float


def state_rows(twin: PPOFP16) -> list[StateRow]:
    """
    The optimizer's state, and for Adam's second moment what it would be in FP16.

    :param twin: with its state; none before its first step
    """
    optimizer = twin.policy.optimizer
    found: dict[tuple[str, Format], list[tuple[Tensor, Tensor]]] = {}
    for group in optimizer.param_groups:
        for state in (optimizer.state[p] for p in group["params"] if p in optimizer.state):
            for name, value in state.items():
                if name in ("step", "carry") or not isinstance(value, Tensor):
                    continue
                kind = stored_format(group, value) if isinstance(optimizer, SHARP) else FORMATS_OF.get(value.dtype)
                if kind is not None:
                    found.setdefault((name, kind), []).append((value, _has_gradients(state, name)))
                if name == "exp_avg_sq" and kind == FORMATS["fp32"]:
                    half = FORMATS["fp16"]
                    found.setdefault((name, half), []).append((half.store(value), _has_gradients(state, name)))
    return [_state_row(name, kind, values) for (name, kind), values in found.items()]


def _has_gradients(state: dict[str, Tensor], name: str) -> Tensor:
    """For each second moment, whether any gradient that it is of was not zero; nothing for other states."""
    first = {"exp_avg_sq": "exp_avg", "root_second_moment": "first_moment"}.get(name)
    moment, value = state.get(first or ""), state[name]
    if moment is None:
        return th.zeros_like(value, dtype=th.bool)
    nonzero = moment != 0
    if moment.shape == value.shape:
        return nonzero
    matrix = nonzero.reshape(len(nonzero), -1)
    rows, columns = matrix.any(dim=1), matrix.any(dim=0)
    return rows if len(value) == len(rows) else th.cat([rows, columns])


def _state_row(name: str, kind: Format, values: list[tuple[Tensor, Tensor]]) -> StateRow:
    magnitude = th.cat([value.reshape(-1) for value, _ in values]).float().abs()
    has_gradients = th.cat([flags.reshape(-1) for _, flags in values])
    zero, small = magnitude == 0, magnitude < kind.smallest_normal

    def share(which: Tensor) -> float:
        return float(which.double().mean())

    parts = (zero, small & ~zero, magnitude >= kind.max, zero & has_gradients)
    return StateRow(name, kind.name, len(magnitude), *map(share, parts))


class Shadow:
    """
    Feeds the gradients of a replay to SHARP, to Adam in FP16 and to Adam in FP32, each with an empty state.

    Parameters are zeros in FP32, put back after each step: what moves them is the step itself, before any writeback.

    :param own: whose settings are taken
    :param device: to work on
    """

    def __init__(self, own: SHARP, device: th.device) -> None:
        settings = own.param_groups[0]
        shapes = [p.shape for group in own.param_groups for p in group["params"]]
        self.parameters = [[nn.Parameter(th.zeros(shape, device=device)) for shape in shapes] for _ in range(2)]
        half = [nn.Parameter(th.zeros(shape, dtype=th.float16, device=device)) for shape in shapes]
        self.parameters.append(half)
        betas, eps = settings["betas"], settings["eps"]
        sharing = [mode for group in own.param_groups for mode in _each(group, "sharing")]
        kept = ("root_rounding", "state_scale", "significand_bits", "seed")
        self.sharp = SHARP(
            self.parameters[1],
            _RATE,
            betas,
            eps,
            sharing=sharing,
            writeback="nearest",
            state_dtype=settings["state_dtype"] or th.float16,
            **{name: settings[name] for name in kept},
        )
        self.adam = th.optim.Adam(self.parameters[0], _RATE, betas, eps)
        self.adam_in_half = th.optim.Adam(half, _RATE, betas, eps)
        self.steps: list[Tensor] = []

    def observe(self, step: Step) -> None:
        """
        Let all take one step.

        :param step: of the replay
        """
        self.steps = []
        for parameters, optimizer in zip(self.parameters, (self.adam, self.sharp, self.adam_in_half), strict=True):
            with th.no_grad():
                for parameter, gradient in zip(parameters, step.clipped, strict=True):
                    parameter.grad = None if gradient is None else gradient.reshape_as(parameter).to(parameter.dtype)
                    parameter.zero_()
            optimizer.step()
            self.steps.append(th.cat([parameter.detach().double().reshape(-1) for parameter in parameters]))

    def rows(self) -> list[ShadowRow]:
        """The last step of each; none before the first."""
        if not self.steps:
            return []
        adam, sharp, half = self.steps
        exact = _second_moments(self.adam, "exp_avg_sq")
        in_half = _second_moments(self.adam_in_half, "exp_avg_sq")
        roots = _second_moments(self.sharp, "root_second_moment")
        return [
            _shadow_row("SHARP", sharp, adam, float((roots == 0).double().mean())),
            _shadow_row("Adam in FP16", half, adam, float(((in_half == 0) & (exact != 0)).double().mean())),
        ]


def _second_moments(optimizer: th.optim.Optimizer, name: str) -> Tensor:
    return th.cat([state[name].reshape(-1) for state in optimizer.state.values()])


def _shadow_row(name: str, step: Tensor, adam: Tensor, zeroed: float) -> ShadowRow:
    tiny = th.finfo(th.float64).tiny
    cosine = float(step @ adam / (step.norm() * adam.norm()).clamp_min(tiny))
    return ShadowRow(name, float(step.abs().sum() / adam.abs().sum().clamp_min(tiny)), cosine, zeroed)


class RootWatch:
    """
    Row clipping and dead band over a replay of a twin that SHARP trains.

    :param twin: to be replayed
    """

    def __init__(self, twin: PPOFP16) -> None:
        self.optimizer = cast(SHARP, twin.policy.optimizer)
        self.rows_seen = self.rows_clipped = self.roots_seen = self.roots_dead = 0

    def observe(self, step: Step) -> None:
        """
        Look at the state after one step, and at what one more with the same gradients would do.

        :param step: of the replay
        """
        for number, (group, parameter, sharing) in enumerate(_members(self.optimizer)):
            gradient = step.clipped[number]
            if gradient is None or parameter.numel() == 0:
                continue
            root = self.optimizer.state[parameter]["root_second_moment"]
            kind = shared_as(parameter.shape, sharing)
            if kind != "elementwise":
                rows = root[: len(parameter)].double()
                layer = rows.square().mean().sqrt()
                self.rows_seen += len(rows)
                self.rows_clipped += int(((rows < layer / ROW_CLIP) | (rows > layer * ROW_CLIP)).sum())
            due = _next_root(root, gradient.double(), kind, group)
            unchanged = stored_format(group, root).store(due.float()) == root
            self.roots_seen += root.numel()
            self.roots_dead += int((unchanged & (due != root.double())).sum())

    def rows(self) -> list[RootRow]:
        """One row; none before the first step."""
        if self.roots_seen == 0:
            return []
        return [RootRow(self.rows_clipped / max(1, self.rows_seen), self.roots_dead / self.roots_seen)]


def _next_root(root: Tensor, gradient: Tensor, sharing: str, group: dict[str, Any]) -> Tensor:
    """sqrt(β₂w² + (1 − β₂)rms²) in FP64, where no square over- or underflows."""
    squares = gradient.square()
    if sharing != "elementwise":
        matrix = squares.reshape(len(gradient), -1)
        squares = matrix.mean(dim=1) if sharing == "row" else th.cat([matrix.mean(dim=1), matrix.mean(dim=0)])
    beta2: float = group["betas"][1]
    scale: float = group["state_scale"]
    return (beta2 * root.double().square() + (1 - beta2) * scale**2 * squares).sqrt()


def _members(optimizer: SHARP) -> Iterator[tuple[dict[str, Any], nn.Parameter, str]]:
    for group in optimizer.param_groups:
        for parameter, sharing in zip(group["params"], _each(group, "sharing"), strict=True):
            yield group, parameter, sharing


def _each(group: dict[str, Any], name: str) -> list[str]:
    value = group[name]
    return [value] * len(group["params"]) if isinstance(value, str) else list(value)
