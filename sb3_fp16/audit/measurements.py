"""Everything that an audit measures, in one record."""

from dataclasses import dataclass

from sb3_fp16.audit.mismatch import CorrectionRow, Mismatch
from sb3_fp16.audit.optimizer import RootRow, ShadowRow, StateRow
from sb3_fp16.audit.ranges import GradientRow, RangeRow
from sb3_fp16.audit.sticking import LayerSticking, WritebackRow
from sb3_fp16.precision import Precision


@dataclass(frozen=True)
class Measurements:
    """
    What the number format does to a model; sections that do not apply are empty.

    :param timesteps: environment steps that the model was trained for
    :param precision: its number format and protections
    :param clip_range: PPO's ε at that time
    :param layers: stuck updates of the weights that its layers see
    :param writebacks: the same FP32 updates written back in every way
    :param state: the optimizer's state
    :param shadows: optimizers beside Adam in FP32
    :param roots: SHARP's root second moments
    :param mismatches: between the policy that acts and the one a trainer evaluates, as trained first
    :param correction: what module B's c takes away
    :param ranges: largest numbers
    :param gradients: against FP16's lower end
    """

    timesteps: int
    precision: Precision
    clip_range: float
    layers: tuple[LayerSticking, ...]
    writebacks: tuple[WritebackRow, ...]
    state: tuple[StateRow, ...]
    shadows: tuple[ShadowRow, ...]
    roots: tuple[RootRow, ...]
    mismatches: tuple[Mismatch, ...]
    correction: CorrectionRow | None
    ranges: tuple[RangeRow, ...]
    gradients: tuple[GradientRow, ...]

    @property
    def unchanged(self) -> float:
        """Share of the nonzero updates of the model's own weights that changed nothing."""
        nonzero = sum(layer.nonzero for layer in self.layers)
        return sum(layer.unchanged * layer.nonzero for layer in self.layers) / max(1, nonzero)

    @property
    def own_writeback(self) -> WritebackRow | None:
        """That of ``writebacks`` which is the model's own; None for FP32 weights."""
        wanted = _own_way(self.precision)
        return next((row for row in self.writebacks if (row.storage, row.writeback) == wanted), None)


def _own_way(precision: Precision) -> tuple[str, str]:
    if precision.compute != "storage":
        rounding = "stochastic" if precision.compute.endswith("-sr") else "nearest"
        return precision.compute_format.name, f"copy, {rounding}"
    return precision.storage, "nearest" if precision.writeback == "swallowed" else precision.writeback


def percent(share: float) -> str:
    """
    As text.

    :param share: of 1
    """
    return f"{100 * share:.3g} %"
