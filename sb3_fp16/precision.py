"""Which number format a run uses and which protections are on: one argument, one place that defines it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import ml_dtypes
import numpy as np
import torch as th

from sb3_fp16.rounding import FORMATS, Format

Storage = Literal["fp16", "bf16", "fp32", "e5m9", "e5m8", "e5m7", "e5m6", "e5m5"]
Compute = Literal["storage", "fp16", "bf16", "bf16-sr"]
LogRatio = Literal["absolute", "absolute-stored", "residual", "residual-twosum"]
Sharing = Literal["elementwise", "row", "rank1"]
RootRounding = Literal["nearest", "stochastic", "dithered", "fp32"]
Writeback = Literal["nearest", "stochastic", "dithered", "residual", "swallowed"]
GradientScaling = Literal["off", "per-network", "grad-scaler"]

_NUMPY_DTYPES: dict[th.dtype, Any] = {th.float16: np.float16, th.bfloat16: ml_dtypes.bfloat16, th.float32: np.float32}


@dataclass(frozen=True)
class Precision:
    """
    The number format of a PPO run and its numerical protections.

    ``PPOFP16(precision="fp16")`` takes a preset by name; ``PPOFP16(precision=Precision(...))`` varies any field of
    the default preset for an ablation.

    :param storage: format of parameters, gradients, optimizer state and rollout; ``e5m9`` to ``e5m5`` are FP16 with a
        shorter significand
    :param compute: format that layers compute in; other than ``storage`` it is mixed precision as autocast does it,
        with storage ``fp32``; ``bf16-sr`` rounds the 16-bit copy of the weights stochastically
    :param global_scalars: module A (paper Sec. 3.1): FP32 reductions and scaled norms, and steps that are not finite
        are skipped; without it every operation is rounded to storage
    :param log_ratio: how log π/π₀ is formed (paper Sec. 3.2): ``residual`` from differences of policy parameters in
        FP32 registers, ``residual-twosum`` in storage format with TwoSum as in the paper, ``absolute`` as the
        difference of two FP32 log-probabilities, ``absolute-stored`` of two that are computed in storage format
    :param optimizer: ``sharp`` (paper Sec. 3.3), or ``adam``: torch's, in storage format
    :param input_sharing: granularity of SHARP's second moment in layers that read observations
    :param hidden_sharing: the same in all other hidden layers
    :param root_rounding: how SHARP's root second moment is rounded to storage
    :param writeback: how updated parameters are rounded to storage
    :param log_std_writeback: the same for the Gaussian policy's log standard deviation
    :param round_actions: round a sampled action to storage before it is executed, so that the stored action is the
        executed one; otherwise the reference correction c (paper Sec. 3.2) accounts for the difference
    :param gradient_scaling: multiply losses by a power of two before the backward pass: one per network, or a single
        one by the rules of torch's ``GradScaler``
    :raises ValueError: for an unknown value, naming the valid ones, or a combination that cannot work
    """

    storage: Storage = "fp16"
    compute: Compute = "storage"
    global_scalars: bool = True
    log_ratio: LogRatio = "residual"
    optimizer: Literal["sharp", "adam"] = "sharp"
    input_sharing: Sharing = "rank1"
    hidden_sharing: Sharing = "rank1"
    root_rounding: RootRounding = "dithered"
    writeback: Writeback = "stochastic"
    log_std_writeback: Writeback = "residual"
    round_actions: bool = True
    gradient_scaling: GradientScaling = "per-network"

    presets: ClassVar[dict[str, "Precision"]]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, valid = getattr(self, field.name), get_args(hints[field.name]) or (False, True)
            if value not in valid:
                raise ValueError(f"Precision: {field.name}={value!r} is not one of {', '.join(map(repr, valid))}.")
        if self.storage == "fp32" and self.round_actions:
            raise ValueError("Precision: storage='fp32' stores actions as they are; set round_actions=False.")
        if self.compute != "storage" and self.storage != "fp32":
            raise ValueError(f"Precision: compute={self.compute!r} is mixed precision; it needs storage='fp32'.")
        if self.optimizer == "adam" and not self.format.is_native:
            raise ValueError(f"Precision: torch's Adam does not round to {self.storage}; use optimizer='sharp'.")
        if not self.global_scalars and self.gradient_scaling != "off":
            raise ValueError("Precision: gradient scales are part of module A; set gradient_scaling='off' without it.")

    @property
    def format(self) -> Format:
        """Storage format."""
        return FORMATS[self.storage]

    @property
    def compute_format(self) -> Format:
        """Format that layers compute in."""
        return self.format if self.compute == "storage" else FORMATS[self.compute.removesuffix("-sr")]

    @property
    def dtype(self) -> th.dtype:
        """Torch dtype of the storage format."""
        return self.format.dtype

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the storage format."""
        dtype: np.dtype[Any] = np.dtype(_NUMPY_DTYPES[self.dtype])
        return dtype

    @property
    def has_short_exponent(self) -> bool:
        """Whether small gradients and moments need scaling to stay out of the subnormal range."""
        return self.dtype == th.float16

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


_FP16 = Precision()
# The paper as written. It is silent on loss scaling and on the scale of the optimizer state; both are on here, as
# without them small FP16 gradients and moments flush to zero.
_PAPER = replace(
    _FP16,
    log_ratio="residual-twosum",
    input_sharing="row",
    hidden_sharing="row",
    root_rounding="nearest",
    writeback="nearest",
    log_std_writeback="swallowed",
    round_actions=False,
)
_FP32 = replace(
    _FP16, storage="fp32", log_ratio="absolute", optimizer="adam", round_actions=False, gradient_scaling="off"
)

Precision.presets = {
    "fp16": _FP16,
    "paper": _PAPER,
    "bf16": replace(_PAPER, storage="bf16", gradient_scaling="off"),
    "bf16-sr": replace(_FP16, storage="bf16", gradient_scaling="off", log_std_writeback="stochastic"),
    "fp32": _FP32,
    "amp-fp16": replace(_FP32, compute="fp16", gradient_scaling="grad-scaler"),
    "amp-bf16": replace(_FP32, compute="bf16"),
    "amp-bf16-sr": replace(_FP32, compute="bf16-sr"),
    # PyTorch's own half operations one by one, as a user would get by calling .half().
    "naive-fp16": replace(
        _FP16,
        global_scalars=False,
        log_ratio="absolute-stored",
        optimizer="adam",
        gradient_scaling="off",
    ),
    **{storage: replace(_PAPER, storage=storage) for storage in ("e5m9", "e5m8", "e5m7", "e5m6", "e5m5")},
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

    @classmethod
    def of_arrays(cls, name: str, arrays: Sequence[np.ndarray]) -> "ReportRow":
        """
        Count arrays.

        :param name: what they store
        :param arrays: any shapes and formats
        """
        single = (array.size for array in arrays if array.dtype in (np.float32, np.float64))
        return cls(name, sum(a.size for a in arrays), sum(a.nbytes for a in arrays), sum(single))


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
