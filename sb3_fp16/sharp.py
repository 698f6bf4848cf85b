"""
Module C, SHARP (paper Sec. 3.3): Adam with a 16-bit root second moment shared per weight row, and a writeback that
does not lose small updates. A ``torch.optim.Optimizer`` for any model; it knows nothing of reinforcement learning.

Arithmetic is FP32 on 16-bit state. Parameters of a group are updated together: by compiled code where the device has
it (cuda/sharp.cuh, cpu/optimizers.inl), else in torch: there their elements lie one after another in a flat FP32
workspace, those with an elementwise second moment first, so that most operations run once per step and not once per
parameter.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, cast, overload

import torch as th
from torch import Tensor
from torch.optim.optimizer import ParamsT

from sb3_fp16.kernels import KernelParameter, OptimizerKernels, kernels_serve, scalar_on
from sb3_fp16.rounding import (
    FORMATS,
    Format,
    dither_key,
    dither_thresholds,
    format_of,
    random_key,
    random_thresholds,
    round_by_threshold,
)

SHARING = ("elementwise", "row", "rank1")
ROOT_ROUNDING = ("nearest", "stochastic", "dithered", "fp32")
CARRIED = ("residual", "swallowed")
WRITEBACK = ("nearest", "stochastic", "dithered", *CARRIED)

MIN_SHARED_COLUMNS = 16
"""Matrices with fewer columns keep an elementwise second moment: sharing would save little and cost accuracy."""

ROW_CLIP = 4.0
"""A row's root second moment stays within this factor of its layer's (paper Sec. 3.3)."""

# Salts keep the thresholds of a parameter and of its second moment apart.
_PARAMETER_SALT = 0x5851F42D
_ROOT_SALT = 0x14057B7E
_SMALLEST = th.finfo(th.float32).tiny
_THRESHOLDED = ("stochastic", "dithered")
_MAX_BUCKET_ELEMENTS = 1 << 22  # updated together
_SCRATCH = 8  # 4-byte numbers per element: θ, g, m, m̂, preconditioner, update, new θ, and the index, which is kept

_Coefficient = float | Tensor
_Skip = Tensor | bool | None
_Write = tuple[list[Tensor], Tensor, Tensor]  # tensors, what they hold, what they are to hold


class SHARP(th.optim.Optimizer):
    """
    Structured Half-precision Adam with Root-state Preconditioning (paper Sec. 3.3).

    For a gradient g, with S the state scale:

    - m ← β₁m + (1 − β₁)·S·g
    - w_r ← sqrt(β₂w_r² + (1 − β₂)·(S·rms_r)²), rms_r the root mean square of g over the group r of elements
    - m̂ = m/(1 − β₁^t), ŵ = w/sqrt(1 − β₂^t), ŵ_r clipped to [L/4, 4L], L the RMS of ŵ over the rows of the layer
    - θ ← θ − lr·m̂/(ŵ + S·eps)

    State per parameter: ``step`` (int64), ``first_moment`` (m, shape of the parameter), ``root_second_moment`` (w,
    shape of the parameter, or the rows, or the rows and then the columns), and ``carry`` (FP32) for the writebacks
    ``residual`` and ``swallowed``.

    :param params: parameters or parameter groups; FP16, BF16 or FP32
    :param lr: learning rate, a float or a tensor
    :param betas: decay rates of the two moments
    :param eps: added to the denominator, in units of the gradient
    :param weight_decay: coefficient λ of Adam's L2 penalty, added to the gradient after clipping
    :param sharing: which elements share a second moment, for matrices with at least 16 columns (trailing dimensions
        flattened): ``elementwise`` none, ``row`` those of an output unit, ``rank1`` r_i·c_j/L from rows and columns.
        Everything smaller is elementwise. One value, or one per parameter of the group
    :param root_rounding: rounding of w to storage, ``nearest``, ``stochastic``, ``dithered``; ``fp32`` stores it whole
    :param writeback: rounding of θ to storage, ``nearest``, ``stochastic``, ``dithered``; ``residual`` carries all that
        rounding dropped in FP32; ``swallowed`` only updates that changed nothing, the paper's rule. FP32 parameters
        are written as they are. One value, or one per parameter of the group
    :param decoupled_weight_decay: shrink the parameter instead, as AdamW does
    :param state_scale: S, a power of two that keeps moments of small gradients out of FP16's subnormal range
    :param state_dtype: format of m and w; by default the parameter's own if that is 16-bit, else FP16
    :param significand_bits: round parameters and state of 16 bits to a shorter significand, for studies of formats
    :param seed: of stochastic rounding
    :raises ValueError: for a setting outside its range, naming it
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        weight_decay: float = 0.0,
        *,
        sharing: str | Sequence[str] = "rank1",
        root_rounding: str = "dithered",
        writeback: str | Sequence[str] = "stochastic",
        decoupled_weight_decay: bool = False,
        state_scale: float = 2.0**12,
        state_dtype: th.dtype | None = None,
        significand_bits: int | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "sharing": sharing,
            "root_rounding": root_rounding,
            "writeback": writeback,
            "decoupled_weight_decay": decoupled_weight_decay,
            "state_scale": state_scale,
            "state_dtype": state_dtype,
            "significand_bits": significand_bits,
            "seed": seed,
        }
        super().__init__(params, defaults)
        self._reset_caches()

    def _reset_caches(self) -> None:
        self._buckets: dict[int, tuple[tuple[Any, ...], list[_Bucket]]] = {}
        self._statistics: dict[th.device, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_caches()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        Add parameters with settings of their own.

        :param param_group: as for any torch optimizer
        :raises ValueError: for a setting outside its range, or a parameter that is not real floating-point
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None, *, coefficient: _Coefficient = 1.0, skip: _Skip = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, coefficient: _Coefficient = 1.0, skip: _Skip = None) -> float: ...

    @th.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        coefficient: _Coefficient = 1.0,
        skip: _Skip = None,
    ) -> float | None:
        """
        Update every parameter that has a gradient.

        :param closure: re-evaluates the model and returns the loss
        :param coefficient: κ that gradients are multiplied by in FP32 before anything else: one number, or one per
            parameter in the order of the parameter groups
        :param skip: boolean scalar; where true, nothing is written and t does not advance
        :return: the closure's loss
        """
        loss = None
        if closure is not None:
            with th.enable_grad():
                loss = closure()
        if isinstance(skip, bool):
            if skip:
                return loss
            skip = None
        first_parameter = first_element = 0
        for number, group in enumerate(self.param_groups):
            for bucket in self._buckets_of(number, group, first_element):
                bucket.step(self, group, bucket.select(coefficient, first_parameter), skip)
            first_parameter += len(group["params"])
            first_element += sum(parameter.numel() for parameter in group["params"])
        return loss

    def _buckets_of(self, number: int, group: dict[str, Any], first_element: int) -> list["_Bucket"]:
        """Parameters of a group that are updated together, laid out anew when another set has gradients."""
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in group["params"]):
            raise RuntimeError("SHARP does not support sparse gradients.")
        present = tuple(
            (position, parameter.device, parameter.dtype, _is_served(parameter, group, self.state.get(parameter, {})))
            for position, parameter in enumerate(group["params"])
            if parameter.grad is not None and parameter.numel() > 0
        )
        key = (first_element, present, _one_each(group, "sharing"), _one_each(group, "writeback"))
        known, buckets = self._buckets.get(number, (None, []))
        if key != known:
            for parameter, sharing in zip(group["params"], _one_each(group, "sharing"), strict=True):
                _check_fits(self.state.get(parameter, {}), parameter, sharing)
            buckets = _buckets(group, present, first_element)
            self._buckets[number] = key, buckets
        return buckets

    def initialize_state(self) -> None:
        """Make the state of every parameter, which otherwise happens at its first step."""
        for group in self.param_groups:
            modes = zip(group["params"], _one_each(group, "sharing"), _one_each(group, "writeback"), strict=True)
            for parameter, sharing, writeback in modes:
                self.state_of(parameter, group, sharing, writeback)

    def state_of(self, parameter: Tensor, group: dict[str, Any], sharing: str, writeback: str) -> dict[str, Tensor]:
        """State of one parameter, made on first use."""
        state = cast(dict[str, Tensor], self.state[parameter])
        if not state:
            dtype, root_dtype = _state_dtypes(parameter, group)
            device, shape = parameter.device, parameter.shape
            state["step"] = th.zeros((), dtype=th.int64, device=device)
            state["first_moment"] = th.zeros(shape, dtype=dtype, device=device)
            state["root_second_moment"] = th.zeros(root_shape(shape, sharing), dtype=root_dtype, device=device)
        if writeback in CARRIED and parameter.dtype.itemsize == 2 and "carry" not in state:
            state["carry"] = th.zeros(parameter.shape, dtype=th.float32, device=parameter.device)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Take over a state, keeping the dtype of every tensor and sharing memory with none of them.

        :param state_dict: what ``state_dict`` gave
        :raises ValueError: if it is not SHARP's or does not fit the parameters; nothing has changed then
        """
        saved, groups = state_dict["state"], state_dict["param_groups"]
        if any("state_scale" not in group for group in groups):
            raise ValueError("This is the state of another optimizer than SHARP.")
        keys = [key for group in groups for key in group["params"]]
        sharing = [mode for group in groups for mode in _one_each(group, "sharing")]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter, mode in zip(keys, parameters, sharing, strict=False):
            _check_fits(saved.get(key, {}), parameter, mode)
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype and may alias it: put exact copies in its place.
        for key, parameter in zip(keys, parameters, strict=True):
            if key in saved:
                copies = {name: value.to(parameter.device, copy=True) for name, value in saved[key].items()}
                self.state[parameter] = copies

    def scratch(self) -> int:
        """4-byte numbers that steps need beside the state."""
        buckets = [bucket for _, buckets in self._buckets.values() for bucket in buckets]
        return max((bucket.scratch() for bucket in buckets), default=0)

    def counts_on(self, device: th.device) -> Tensor:
        """What ``pop_statistics`` describes, int64, shape (3,); steps add to it where it lies."""
        if device not in self._statistics:
            self._statistics[device] = th.zeros(3, dtype=th.int64, device=device)
        return self._statistics[device]

    def pop_statistics(self) -> tuple[int, int, int]:
        """
        Counts since the last call; reads the device once.

        :return: nonzero updates, those of them that changed nothing, values of state or parameters that saturated
        """
        counts = [total.tolist() for total in self._statistics.values()] or [[0, 0, 0]]
        for total in self._statistics.values():
            total.zero_()
        nonzero, stuck, saturated = (sum(column) for column in zip(*counts, strict=True))
        return nonzero, stuck, saturated


def state_scale_for(max_norm: float) -> float:
    """
    State scale for gradients clipped to a norm: the power of two that puts the largest moment just below 32768.

    :param max_norm: bound on the gradient norm; taken as at least 2^-8 and at most 8
    """
    return float(2.0 ** math.floor(math.log2(32768 / min(max(max_norm, 2.0**-8), 8.0))))


def shared_as(shape: Sequence[int], sharing: str) -> str:
    """
    Sharing that a parameter of this shape gets: vectors and narrow matrices are always elementwise.

    :param shape: of the parameter
    :param sharing: asked for
    """
    return sharing if len(shape) >= 2 and math.prod(shape[1:]) >= MIN_SHARED_COLUMNS else "elementwise"


def root_shape(shape: Sequence[int], sharing: str) -> tuple[int, ...]:
    """
    Shape of a parameter's root second moment.

    :param shape: of the parameter
    :param sharing: asked for
    """
    kind = shared_as(shape, sharing)
    if kind == "elementwise":
        return tuple(shape)
    return (shape[0],) if kind == "row" else (shape[0] + math.prod(shape[1:]),)


def _state_dtypes(parameter: Tensor, group: Mapping[str, Any]) -> tuple[th.dtype, th.dtype]:
    """Of m and of w."""
    moment: th.dtype = group["state_dtype"] or (parameter.dtype if parameter.dtype.itemsize == 2 else th.float16)
    return moment, th.float32 if group["root_rounding"] == "fp32" else moment


def _is_served(parameter: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor]) -> bool:
    """Whether compiled code, which goes by addresses and formats, can step a parameter that has a gradient."""
    kind = parameter.dtype
    moment, root = _state_dtypes(parameter, group)
    if not kernels_serve(parameter.device, kind, moment, group["betas"]):
        return False
    if not parameter.is_contiguous() or cast(Tensor, parameter.grad).dtype != kind:
        return False
    # The state may have been made under other settings, or elsewhere.
    wanted = (("step", th.int64), ("first_moment", moment), ("root_second_moment", root), ("carry", th.float32))
    found = [(state[name], dtype) for name, dtype in wanted if name in state]
    return all(x.dtype == dtype and x.is_contiguous() for x, dtype in found)


def _buckets(
    group: dict[str, Any], present: Sequence[tuple[int, th.device, th.dtype, bool]], first_element: int
) -> list["_Bucket"]:
    """Parameters of a group by device, dtype and who steps them, torch in portions with a small FP32 workspace."""
    buckets: list[_Bucket] = []
    for kind in dict.fromkeys(tuple(other) for _, *other in present):
        positions = [position for position, *other in present if tuple(other) == kind]
        if kind[-1]:
            buckets.append(_KernelBucket(group, positions, first_element))
            continue
        portions: list[list[int]] = []
        elements = _MAX_BUCKET_ELEMENTS
        for position in positions:
            elements += group["params"][position].numel()
            if elements > _MAX_BUCKET_ELEMENTS:
                portions.append([])
                elements = group["params"][position].numel()
            portions[-1].append(position)
        buckets += [_TorchBucket(group, portion, first_element) for portion in portions]
    return buckets


class _Member:
    """
    One parameter of a bucket and where it lies in the workspace.

    :param group: its parameter group
    :param position: in the group
    :param start: arena index of its first element; its root second moment counts from the same index
    """

    def __init__(self, group: dict[str, Any], position: int, start: int) -> None:
        shape = group["params"][position].shape
        self.position, self.start = position, start
        self.rows: int = shape[0] if shape else 1
        self.columns = math.prod(shape[1:])
        self.sharing = shared_as(shape, _one_each(group, "sharing")[position])
        self.is_shared = self.sharing != "elementwise"
        self.writeback = _one_each(group, "writeback")[position]
        self.size, self.root_size = math.prod(shape), math.prod(root_shape(shape, self.sharing))
        self.elements = self.roots = slice(0)  # given by the bucket


class _Run(NamedTuple):
    """Neighbouring members of a bucket with one writeback mode."""

    writeback: str
    members: slice
    elements: slice


class _Bucket(ABC):
    """
    Parameters that one step covers together: same group, device and dtype, all with a gradient.

    Those with an elementwise second moment come first, and parameters with one writeback mode lie together.

    :param group: their parameter group
    :param positions: of the parameters in the group
    :param first_element: arena index of the group's first element
    """

    def __init__(self, group: dict[str, Any], positions: list[int], first_element: int) -> None:
        starts = list(accumulate((p.numel() for p in group["params"]), initial=first_element))
        members = [_Member(group, position, starts[position]) for position in positions]
        self.members = sorted(members, key=lambda m: (m.is_shared, m.writeback))
        self.device: th.device = group["params"][positions[0]].device
        self.positions = th.tensor([m.position for m in self.members], device=self.device)

    def select(self, coefficient: float | Tensor, first_parameter: int) -> Tensor:
        """κ of each member, from one number or one per parameter of the optimizer."""
        coefficient = scalar_on(self.device, coefficient)
        if coefficient.ndim == 0:
            return coefficient.expand(len(self.members))
        return coefficient[self.positions + first_parameter]

    def states(self, optimizer: SHARP, group: dict[str, Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        """The members' parameters and their state."""
        parameters = [group["params"][m.position] for m in self.members]
        pairs = zip(parameters, self.members, strict=True)
        return parameters, [optimizer.state_of(p, group, m.sharing, m.writeback) for p, m in pairs]

    @abstractmethod
    def step(self, optimizer: SHARP, group: dict[str, Any], coefficient: Tensor, skip: Tensor | None) -> None:
        """One SHARP step of all members; ``coefficient`` holds κ of each."""

    def scratch(self) -> int:
        """4-byte numbers that a step needs beside the state."""
        return 0


class _KernelBucket(_Bucket):
    """By compiled code: a few launches or one call for all members, nothing read from a GPU."""

    def __init__(self, group: dict[str, Any], positions: list[int], first_element: int) -> None:
        super().__init__(group, positions, first_element)
        self.kernels = OptimizerKernels(self.device)

    def scratch(self) -> int:
        """See ``_Bucket.scratch``."""
        return self.kernels.workspace.nbytes // 4

    def step(self, optimizer: SHARP, group: dict[str, Any], coefficient: Tensor, skip: Tensor | None) -> None:
        """See ``_Bucket.step``."""
        parameters, states = self.states(optimizer, group)
        members = [
            kernel_parameter(parameter, cast(Tensor, parameter.grad).contiguous(), state, member, coefficient=i)
            for i, (parameter, state, member) in enumerate(zip(parameters, states, self.members, strict=True))
        ]
        settings = kernel_settings(group, parameters[0], states[0]["first_moment"])
        lr = scalar_on(self.device, group["lr"])
        counts = optimizer.counts_on(self.device)
        self.kernels.step(members, settings, lr, coefficient.contiguous(), skip, counts)
        for parameter in parameters:
            th.autograd.graph.increment_version(parameter)  # as torch's own operations do


def kernel_parameter(
    parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], member: "_Member", coefficient: int
) -> KernelParameter:
    """
    A parameter as kernels take it.

    :param parameter: of the optimizer
    :param gradient: contiguous
    :param state: the parameter's
    :param member: its shape and modes
    :param coefficient: which κ is its own
    """
    carry = state.get("carry") if parameter.dtype.itemsize == 2 and member.writeback in CARRIED else None
    return KernelParameter(
        data=parameter.data,
        gradient=gradient,
        first_moment=state["first_moment"],
        second_moment=state["root_second_moment"],
        step=state["step"],
        carry=carry,
        rows=member.rows,
        columns=member.columns,
        first_element=member.start,
        coefficient=coefficient,
        sharing=member.sharing,
        writeback=member.writeback if carry is not None or member.writeback not in CARRIED else "nearest",
    )


def kernel_parameters(
    optimizer: SHARP, group: dict[str, Any], gradients: Mapping[int, Tensor], coefficients: Sequence[int]
) -> list[KernelParameter]:
    """
    All parameters of an optimizer's only group as kernels take them.

    :param optimizer: with its state made
    :param group: its group
    :param gradients: by the parameters' ``id``, contiguous
    :param coefficients: which κ is whose
    """
    starts = accumulate((p.numel() for p in group["params"]), initial=0)
    return [
        kernel_parameter(p, gradients[id(p)], optimizer.state[p], _Member(group, i, start), coefficients[i])
        for i, (p, start) in enumerate(zip(group["params"], starts, strict=False))
    ]


def kernel_settings(group: Mapping[str, Any], parameter: Tensor, moment: Tensor) -> dict[str, Any]:
    """
    A group's settings as kernels take them.

    :param group: of parameters
    :param parameter: one of them
    :param moment: the first moment of that parameter
    """
    kinds = [stored_format(group, x).significand_bits for x in (parameter, moment)]
    return {**group, "parameter_bits": kinds[0], "state_bits": kinds[1]}


class _TorchBucket(_Bucket):
    """In torch, on any device; the definition of what compiled code computes."""

    def __init__(self, group: dict[str, Any], positions: list[int], first_element: int) -> None:
        super().__init__(group, positions, first_element)
        members = self.members
        end = root_end = 0
        for member in members:
            member.elements = slice(end, end := end + member.size)
            member.roots = slice(root_end, root_end := root_end + member.root_size)
        self.matrices = [m for m in members if m.is_shared]
        self.elementwise = sum(m.size for m in members if not m.is_shared)
        self.runs: list[_Run] = []
        for writeback, numbers in groupby(range(len(members)), key=lambda i: members[i].writeback):
            run = list(numbers)
            elements = slice(members[run[0]].elements.start, members[run[-1]].elements.stop)
            self.runs.append(_Run(writeback, slice(run[0], run[-1] + 1), elements))
        device = self.device
        self.sizes = th.tensor([m.size for m in members], device=device)
        self.root_sizes = th.tensor([m.root_size for m in members], device=device)
        self.index = th.cat([th.arange(m.start, m.start + m.size) for m in members]).to(device, th.int32)
        self.root_index = th.cat([th.arange(m.start, m.start + m.root_size) for m in members]).to(device, th.int32)

    def scratch(self) -> int:
        """See ``_Bucket.scratch``."""
        return _SCRATCH * len(self.index)

    def step(self, optimizer: SHARP, group: dict[str, Any], coefficient: Tensor, skip: Tensor | None) -> None:
        """See ``_Bucket.step``."""
        parameters, states = self.states(optimizer, group)
        steps, moments, roots = ([s[name] for s in states] for name in ("step", "first_moment", "root_second_moment"))
        old, old_m, old_w, old_t = _flatten(parameters), _flatten(moments), _flatten(roots), th.stack(steps)
        (beta1, beta2), lr, scale, decay = group["betas"], group["lr"], group["state_scale"], group["weight_decay"]

        t = old_t + 1
        theta = old.float()
        g = _flatten([cast(Tensor, p.grad) for p in parameters]).float() * self._spread(coefficient)
        if decay and not group["decoupled_weight_decay"]:
            g = g + decay * theta
        m = beta1 * old_m.float() + (1 - beta1) * scale * g
        w = _hypot(old_w.float(), scale * self._root_mean_squares(g), beta2)
        m_hat = m * self._spread((1 / (1 - beta1 ** t.double())).float())
        w_hat = w * self._spread_roots((1 - beta2 ** t.double()).rsqrt().float())
        update = lr * m_hat / (self._preconditioner(w_hat) + scale * group["eps"])
        if decay and group["decoupled_weight_decay"]:
            update = update + lr * decay * theta

        new, carries = self._write_back(group, states, old, update, t)
        kinds = [stored_format(group, stored) for stored in (old, old_m, old_w)]
        new_m = kinds[1].store(m)
        new_w = self._round_root(group, w, kinds[2], t)
        writes = [(steps, old_t, t), (parameters, old, new), (moments, old_m, new_m), (roots, old_w, new_w), *carries]
        for tensors, before, after in writes:
            _store(tensors, after if skip is None else th.where(skip, before, after))

        moved = update != 0
        overflows = th.stack(
            [(x.abs() > kind.max).sum() for x, kind in zip((theta - update, m, w), kinds, strict=True)]
        )
        counts = th.stack([moved.sum(), (moved & (new == old)).sum(), overflows.sum()])
        optimizer.counts_on(counts.device).add_(counts if skip is None else counts * ~skip)

    def _root_mean_squares(self, g: Tensor) -> Tensor:
        """RMS of the gradient over the elements that share a second moment, in the order of w."""
        parts = [g[: self.elementwise].abs()]
        for member in self.matrices:
            block = g[member.elements].view(member.rows, member.columns)
            parts.append(_root_mean_square(block, dim=1))
            if member.sharing == "rank1":
                parts.append(_root_mean_square(block, dim=0))
        return th.cat(parts)

    def _preconditioner(self, w_hat: Tensor) -> Tensor:
        """ŵ of every element: its own, its row's, or r̂_i·ĉ_j/L, rows clipped to [L/4, 4L] (paper Sec. 3.3)."""
        result = th.empty(self.index.shape, dtype=th.float32, device=w_hat.device)
        result[: self.elementwise] = w_hat[: self.elementwise]
        for member in self.matrices:
            rows = w_hat[member.roots][: member.rows]
            layer = _root_mean_square(rows, dim=0)
            rows = rows.clamp(layer / ROW_CLIP, layer * ROW_CLIP)
            block = result[member.elements].view(member.rows, member.columns)
            if member.sharing == "rank1":
                columns = w_hat[member.roots][member.rows :]
                th.outer(rows / layer.clamp_min(_SMALLEST), columns, out=block)
            else:
                block.copy_(rows.unsqueeze(1))
        return result

    def _round_root(self, group: dict[str, Any], w: Tensor, kind: Format, t: Tensor) -> Tensor:
        """w as it is stored."""
        mode = group["root_rounding"]
        if mode in _THRESHOLDED:
            thresholds = _thresholds(mode, self.root_index, t, self.root_sizes, _ROOT_SALT, group["seed"])
            w = round_by_threshold(w, thresholds, kind)
        return kind.store(w)

    def _write_back(
        self, group: dict[str, Any], states: list[dict[str, Tensor]], old: Tensor, update: Tensor, t: Tensor
    ) -> tuple[Tensor, list[_Write]]:
        """θ − u as it is stored, and what becomes of the carries."""
        theta, kind = old.float(), stored_format(group, old)
        new = theta - update
        carries: list[_Write] = []
        for mode, members, part in self.runs if old.dtype.itemsize == 2 else ():
            if mode in CARRIED:
                tensors = [state["carry"] for state in states[members]]
                carry = _flatten(tensors)
                due = carry - update[part]
                new[part] = kind.store(theta[part] + due).float()
                written = new[part] - theta[part]
                left = due - written if mode == "residual" else th.where(written == 0, due, 0.0)
                carries.append((tensors, carry, left))
            elif mode in _THRESHOLDED:
                sizes, index = self.sizes[members], self.index[part]
                thresholds = _thresholds(mode, index, t[members], sizes, _PARAMETER_SALT, group["seed"])
                new[part] = round_by_threshold(new[part], thresholds, kind)
        return kind.store(new), carries

    def _spread(self, per_member: Tensor) -> Tensor:
        """One number per member to one per element."""
        return per_member.repeat_interleave(self.sizes, output_size=len(self.index))

    def _spread_roots(self, per_member: Tensor) -> Tensor:
        """One number per member to one per element of w."""
        return per_member.repeat_interleave(self.root_sizes, output_size=len(self.root_index))


def _thresholds(mode: str, index: Tensor, t: Tensor, sizes: Tensor, salt: int, seed: int) -> Tensor:
    """Rounding thresholds of elements ``index`` of parameters that are at steps ``t``."""
    key = dither_key(t, salt) if mode == "dithered" else random_key(t, salt, seed)
    key = key.repeat_interleave(sizes, output_size=len(index))
    return dither_thresholds(index, key) if mode == "dithered" else random_thresholds(index, key)


def _root_mean_square(block: Tensor, dim: int) -> Tensor:
    """sqrt(mean x²) along a dimension as s·sqrt(mean (x/s)²), s = max|x|: no square over- or underflows."""
    largest = block.abs().amax(dim, keepdim=True)
    ratios = block / largest.clamp_min(_SMALLEST)
    return largest.squeeze(dim) * ratios.square().mean(dim).sqrt()


def _hypot(w: Tensor, rms: Tensor, beta2: float) -> Tensor:
    """sqrt(β₂w² + (1 − β₂)rms²), scaled by the larger of the two as the norm is."""
    largest = th.maximum(w, rms).clamp_min(_SMALLEST)
    return largest * (beta2 * (w / largest).square() + (1 - beta2) * (rms / largest).square()).sqrt()


def stored_format(group: Mapping[str, Any], stored: Tensor) -> Format:
    """
    The format of a parameter, or of a tensor of its state.

    :param group: its parameter group
    :param stored: the tensor
    """
    return format_of(stored.dtype, group["significand_bits"] if stored.dtype.itemsize == 2 else None)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return th.cat([tensor.reshape(-1) for tensor in tensors])


def _store(tensors: list[Tensor], flat: Tensor) -> None:
    pieces = th.split(flat, [tensor.numel() for tensor in tensors])
    th._foreach_copy_(tensors, [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)])


def _one_each(group: dict[str, Any], name: str) -> tuple[str, ...]:
    """A setting that is one value, or one per parameter of the group, as the latter."""
    value = group[name]
    return (value,) * len(group["params"]) if isinstance(value, str) else tuple(value)


def _check_fits(state: Mapping[str, Tensor], parameter: Tensor, sharing: str) -> None:
    """:raises ValueError: if a state is not that of such a parameter"""
    wanted = {"first_moment": tuple(parameter.shape), "root_second_moment": root_shape(parameter.shape, sharing)}
    for name, shape in wanted.items():
        found = tuple(state[name].shape) if name in state else None
        if state and found != shape:
            raise ValueError(
                f"SHARP: {name} of a parameter of shape {tuple(parameter.shape)} with sharing={sharing!r} "
                f"has shape {found}; expected {shape}. State and settings must belong together."
            )


def _check_group(group: dict[str, Any]) -> None:
    """:raises ValueError: for a setting outside its range, naming it and its value"""

    def require(condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise ValueError(f"SHARP: {name}={group[name]!r}; expected {expected}.")

    lr, scale = group["lr"], group["state_scale"]
    require(0 <= float(lr) < math.inf, "lr", "a finite number that is not negative")
    require(isinstance(group["seed"], int), "seed", "an integer")
    require(len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"]), "betas", "two numbers in [0, 1)")
    require(0 < group["eps"] < math.inf, "eps", "a positive number")
    require(0 <= group["weight_decay"] < math.inf, "weight_decay", "a finite number that is not negative")
    require(scale > 0 and math.frexp(scale)[0] == 0.5, "state_scale", "a power of two")
    require(group["state_dtype"] in (None, th.float16, th.bfloat16, th.float32), "state_dtype", "a torch float dtype")
    widths = {kind.significand_bits for kind in FORMATS.values() if kind.dtype == th.float16}
    require(group["significand_bits"] in {None, *widths}, "significand_bits", f"None or one of {sorted(widths)}")
    require(group["root_rounding"] in ROOT_ROUNDING, "root_rounding", f"one of {', '.join(ROOT_ROUNDING)}")
    if group["significand_bits"] is not None:
        held = {group["state_dtype"], *(parameter.dtype for parameter in group["params"])}
        require(th.bfloat16 not in held, "significand_bits", "None with bfloat16")
    for name, valid in (("sharing", SHARING), ("writeback", WRITEBACK)):
        values = _one_each(group, name)
        require(set(values) <= set(valid), name, f"one of {', '.join(valid)}")
        require(len(values) == len(group["params"]), name, f"one value, or {len(group['params'])}, one per parameter")
    for parameter in group["params"]:
        if parameter.dtype not in (th.float16, th.bfloat16, th.float32):
            raise ValueError(f"SHARP: a parameter is {parameter.dtype}; expected float16, bfloat16 or float32.")
