"""Which number format a run uses and which protections are on: one argument, one place that defines it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import numpy as np
import torch as th

Storage = Literal["fp16", "fp32"]
LogRatio = Literal["absolute", "residual", "residual-twosum"]
Sharing = Literal["elementwise", "row", "rank1"]
RootRounding = Literal["nearest", "stochastic", "dithered", "fp32"]
Writeback = Literal["nearest", "stochastic", "dithered", "residual", "swallowed"]

_DTYPES = {"fp16": th.float16, "fp32": th.float32}
_NUMPY_DTYPES = {"fp16": np.float16, "fp32": np.float32}


@dataclass(frozen=True)
class Precision:
    """
    The number format of a PPO run and its numerical protections.

    ``PPOFP16(precision="fp16")`` takes a preset by name; ``PPOFP16(precision=Precision(...))`` varies any field of
    the default preset for an ablation.

    :param storage: format of parameters, gradients, optimizer state and rollout
    :param log_ratio: how log π/π₀ is formed (paper Sec. 3.2): ``residual`` from differences of policy parameters in
        FP32 registers, ``residual-twosum`` in FP16 with TwoSum as in the paper, ``absolute`` as the difference of two
        FP32 log-probabilities
    :param optimizer: ``sharp`` (paper Sec. 3.3) or ``adam`` (FP32 storage only)
    :param input_sharing: granularity of SHARP's second moment in layers that read observations
    :param hidden_sharing: the same in all other hidden layers
    :param root_rounding: how SHARP's root second moment is rounded to storage
    :param writeback: how updated parameters are rounded to storage
    :param log_std_writeback: the same for the Gaussian policy's log standard deviation
    :param round_actions: round a sampled action to storage before it is executed, so that the stored action is the
        executed one; otherwise the reference correction c (paper Sec. 3.2) accounts for the difference
    :param gradient_scaling: multiply losses by a power of two before the backward pass (module A)
    :raises ValueError: for an unknown value, naming the valid ones, or a combination that cannot work
    """

    storage: Storage = "fp16"
    log_ratio: LogRatio = "residual"
    optimizer: Literal["sharp", "adam"] = "sharp"
    input_sharing: Sharing = "rank1"
    hidden_sharing: Sharing = "rank1"
    root_rounding: RootRounding = "dithered"
    writeback: Writeback = "stochastic"
    log_std_writeback: Writeback = "residual"
    round_actions: bool = True
    gradient_scaling: bool = True

    presets: ClassVar[dict[str, "Precision"]]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, valid = getattr(self, field.name), get_args(hints[field.name]) or (False, True)
            if value not in valid:
                raise ValueError(f"Precision: {field.name}={value!r} is not one of {', '.join(map(repr, valid))}.")
        if self.optimizer == "adam" and self.storage != "fp32":
            raise ValueError("Precision: optimizer='adam' needs storage='fp32'; its second moment underflows in FP16.")
        if self.round_actions and self.storage == "fp32":
            raise ValueError("Precision: storage='fp32' stores actions as they are; set round_actions=False.")

    @property
    def dtype(self) -> th.dtype:
        """Torch dtype of the storage format."""
        return _DTYPES[self.storage]

    @property
    def numpy_dtype(self) -> type[np.floating[Any]]:
        """Numpy dtype of the storage format."""
        return _NUMPY_DTYPES[self.storage]

    @property
    def name(self) -> str:
        """Name of the preset this equals, or ``custom``."""
        return next((name for name, preset in self.presets.items() if preset == self), "custom")

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for files that must be readable where sb3_fp16 is not installed."""
        return asdict(self)

    @classmethod
    def of(cls, precision: "str | Precision | Mapping[str, Any]") -> "Precision":
        """
        Resolve the ``precision`` argument of the public classes.

        :param precision: a preset's name, a ``Precision``, or the mapping that ``to_dict`` gives
        :raises ValueError: for an unknown name or field
        """
        if isinstance(precision, Precision):
            return precision
        if isinstance(precision, str):
            if precision not in cls.presets:
                raise ValueError(f"Unknown precision {precision!r}; choose one of {', '.join(cls.presets)}.")
            return cls.presets[precision]
        if isinstance(precision, Mapping):
            unknown = set(precision) - {field.name for field in fields(cls)}
            if unknown:
                raise ValueError(f"Unknown Precision field {sorted(unknown)[0]!r}.")
            return cls(**precision)
        raise ValueError(f"precision must be a preset's name or a Precision, not {precision!r}.")


Precision.presets = {
    "fp16": Precision(),
    # The paper as written. It is silent on loss scaling and on the scale of the optimizer state; both are on here,
    # as without them small FP16 gradients and moments flush to zero.
    "paper": Precision(
        log_ratio="residual-twosum",
        input_sharing="row",
        hidden_sharing="row",
        root_rounding="nearest",
        writeback="nearest",
        log_std_writeback="swallowed",
        round_actions=False,
    ),
    "fp32": Precision(
        storage="fp32", log_ratio="absolute", optimizer="adam", round_actions=False, gradient_scaling=False
    ),
}


@dataclass(frozen=True)
class ReportRow:
    """
    One line of a precision report.

    :param name: what is stored
    :param elements: number of elements
    :param bytes: their size
    :param fp32_elements: how many of the elements are FP32
    """

    name: str
    elements: int
    bytes: int
    fp32_elements: int

    @classmethod
    def of(cls, name: str, tensors: Sequence[th.Tensor]) -> "ReportRow":
        """
        Count tensors.

        :param name: what they store
        :param tensors: any shapes and formats
        """
        single = (tensor.numel() for tensor in tensors if tensor.dtype in (th.float32, th.float64))
        return cls(name, sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors), sum(single))


@dataclass(frozen=True)
class PrecisionReport:
    """
    What a model stores between updates, and in which format.

    :param precision: name of the precision
    :param state: persistent training state: parameters, gradients, optimizer state, rollout, scalars
    :param workspace: scratch that lives no longer than an update; not part of the FP32 share
    :param notes: what a reader of the table should know
    """

    precision: str
    state: tuple[ReportRow, ...]
    workspace: tuple[ReportRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fp32_share(self) -> float:
        """FP32 elements as a fraction of all persistent elements (paper Sec. 3: below 0.1 %)."""
        return sum(row.fp32_elements for row in self.state) / max(1, sum(row.elements for row in self.state))

    @property
    def total_bytes(self) -> int:
        """Size of the persistent state."""
        return sum(row.bytes for row in self.state)

    def __getitem__(self, name: str) -> ReportRow:
        return next(row for row in (*self.state, *self.workspace) if row.name == name)

    def __str__(self) -> str:
        def line(row: ReportRow) -> str:
            return f"{row.name:<22}{row.elements:>12,}{row.bytes:>14,}{row.fp32_elements:>12,}"

        head = f"precision {self.precision}\n{'state':<22}{'elements':>12}{'bytes':>14}{'of them FP32':>14}"
        lines = [head, *map(line, self.state), f"FP32 share of the elements: {100 * self.fp32_share:.3f} %"]
        lines += ["workspace", *map(line, self.workspace)] if self.workspace else []
        return "\n".join([*lines, *self.notes])
