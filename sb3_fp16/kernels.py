"""
Compiled code (cuda/, cpu/) as torch code uses it: addresses of tensors, the current stream.

Nothing here reads the device, so all of it may be captured in a CUDA graph.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch as th
from torch import Tensor

MODULES: dict[str, Any] = {}
"""
What steps an optimizer, by the type of device: ``_cuda``, which has everything else that an update on a device needs,
and ``_cpu``, which has no more that works on tensors.
"""

with suppress(ImportError):  # no CUDA compiler where the package was installed
    from sb3_fp16 import _cuda

    MODULES["cuda"] = _cuda
with suppress(ImportError):  # no C++ compiler
    from sb3_fp16 import _cpu

    MODULES["cpu"] = _cpu

NAMES = {th.float16: "fp16", th.bfloat16: "bf16", th.float32: "fp32"}
_MOST_CORRECTIONS = 1 << 22


class KernelParameter(NamedTuple):
    """
    One parameter of an optimizer step; tensors are contiguous.

    :param data: the parameter
    :param gradient: of the same format
    :param first_moment: same shape
    :param second_moment: SHARP's root second moment, or Adam's second moment
    :param step: t, int64 scalar
    :param carry: FP32, for the writebacks that keep one
    :param rows: of elements that may share a second moment
    :param columns: likewise
    :param first_element: arena index, which threshold sequences start from
    :param coefficient: which of the coefficients is its κ: the number of its network, where a norm is taken
    :param sharing: of the second moment
    :param writeback: rounding of the parameter
    """

    data: Tensor
    gradient: Tensor
    first_moment: Tensor
    second_moment: Tensor
    step: Tensor
    carry: Tensor | None
    rows: int
    columns: int
    first_element: int
    coefficient: int
    sharing: str = "elementwise"
    writeback: str = "nearest"

    def addresses(self) -> tuple[int, ...]:
        """Of all but the gradient, which may move."""
        kept = (self.data, self.first_moment, self.second_moment, self.step, self.carry)
        return tuple(0 if x is None else x.data_ptr() for x in kept)

    def entry(self) -> dict[str, Any]:
        """As the module takes it."""
        addresses = dict(
            zip(("data", "first_moment", "root_second_moment", "step", "carry"), self.addresses(), strict=True)
        )
        names = ("rows", "columns", "coefficient", "sharing", "writeback")
        plain = {name: getattr(self, name) for name in names}
        return addresses | plain | {"first_element": self.first_element & 0xFFFFFFFF}


class OptimizerKernels:
    """
    Steps of SHARP over all parameters in a few launches, on a CPU in one call; of Adam where a GPU's moments are FP32.

    :param device: of the parameters
    """

    def __init__(self, device: th.device) -> None:
        self.device = device
        self.workspace = th.empty(0, dtype=th.uint8, device=device)
        """What steps need beside the state."""
        self._made_for: list[Any] | None = None

    def step(
        self,
        parameters: Sequence[KernelParameter],
        settings: Mapping[str, Any],
        lr: Tensor,
        coefficients: Tensor,
        skip: Tensor | None,
        counts: Tensor | None,
        norm: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Enqueue one step.

        :param parameters: those of one network after another, where a norm is taken
        :param settings: betas, eps, and SHARP's others
        :param lr: FP32 scalar
        :param coefficients: κ, FP32; computed here where a norm is taken
        :param skip: boolean scalar; where true, nothing is written. Computed here where a norm is taken
        :param counts: int64, shape (3,): nonzero updates, stuck ones and saturated numbers are added
        :param norm: what ``NormSettings`` of cuda/layout.h asks for
        """
        self._arrange(parameters)
        betas: tuple[float, float] = settings["betas"]
        corrections = bias_corrections(*betas, self.device)
        plain = {
            "coefficients": coefficients.data_ptr(),
            "lr": lr.data_ptr(),
            "skip": 0 if skip is None else skip.data_ptr(),
            "counts": 0 if counts is None else counts.data_ptr(),
            "unbias_first": corrections[0].data_ptr(),
            "unbias_root": corrections[1].data_ptr(),
            "unbias_steps": corrections.shape[1],
            "beta1": betas[0],
            "beta2": betas[1],
            "seed": settings["seed"] & 0xFFFFFFFF,
            "threads": th.get_num_threads(),  # of a CPU
        }
        names = ("eps", "weight_decay", "decoupled_weight_decay", "state_scale", "root_rounding")
        plain |= {name: settings[name] for name in (*names, "parameter_bits", "state_bits")}
        gradients = [parameter.gradient.data_ptr() for parameter in parameters]
        where = (self.device.index or 0, stream_of(self.device))
        self._plan.step(*where, self.workspace.data_ptr(), gradients, plain, norm)

    def _arrange(self, parameters: Sequence[KernelParameter]) -> None:
        """The module's own table of the parameters, made anew when anything has changed but gradients."""
        made_for: list[Any] = [(*parameter.addresses(), *parameter[6:]) for parameter in parameters]
        if made_for == self._made_for:
            return
        formats = (NAMES[parameters[0].data.dtype], NAMES[parameters[0].first_moment.dtype])
        self._plan = MODULES[self.device.type].Optimizer(*formats, [parameter.entry() for parameter in parameters])
        self.workspace = th.empty(self._plan.workspace, dtype=th.uint8, device=self.device)
        self._made_for = made_for


def stream_of(device: th.device) -> int:
    """
    The current stream.

    :param device: on which
    """
    return int(th.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def kernels_serve(
    device: th.device, parameters: th.dtype, state: th.dtype, betas: tuple[float, float], is_adam: bool = False
) -> bool:
    """
    Whether compiled code steps an optimizer on a device.

    :param device: where parameters are
    :param parameters: their format
    :param state: that of the moments
    :param betas: decay rates, which must not be too near 1
    :param is_adam: FP32 moments are Adam's, and not SHARP's
    """
    module = MODULES.get(device.type)
    if module is None or _corrected_steps(*betas) > _MOST_CORRECTIONS:
        return False
    return is_adam or (NAMES[parameters], NAMES[state]) in module.OPTIMIZER_FORMATS


@cache
def _corrected_steps(*betas: float) -> int:
    """Steps after which 1 − β^t is 1 in FP32."""
    return max(1 if beta == 0 else math.ceil(-25 * math.log(2) / math.log(beta)) for beta in betas)


@cache
def bias_corrections(beta1: float, beta2: float, device: th.device) -> Tensor:
    """
    1/(1 − β₁^t) and 1/sqrt(1 − β₂^t) for t = 1, 2, ... until they are 1: kernels compute nothing in FP64.

    :param beta1: decay rate of the first moment
    :param beta2: decay rate of the second
    :param device: where the result is
    :return: FP32, shape (2, steps)
    """
    t = th.arange(1, _corrected_steps(beta1, beta2) + 1, dtype=th.float64)
    return th.stack([1 / (1 - beta1**t), (1 - beta2**t).rsqrt()]).float().to(device)


def scalar_on(device: th.device, value: float | Tensor) -> Tensor:
    """
    A number in FP32.

    :param device: where it is made, as copying one there would wait for it
    :param value: the number
    """
    return (
        value.to(device, th.float32)
        if isinstance(value, Tensor)
        else th.full((), value, dtype=th.float32, device=device)
    )
