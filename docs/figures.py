"""
The pictures of guide/numerics.md, computed with the package's own arithmetic.

``python -m docs.figures`` draws them into docs/images, in seconds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from torch import Tensor

from benchmarks.runner import pyplot
from benchmarks.stress import log_ratio_errors
from sb3_fp16 import SHARP
from sb3_fp16.residuals import GaussianBehaviour
from sb3_fp16.rounding import FORMATS
from sb3_fp16.scalars import gradient_norm, naive_clip_coefficient

IMAGES = Path(__file__).parent / "images"
START, STEP = 0.025, 1e-6  # the weight and the update of docs/precision.md's worked example
WRITEBACKS = ("nearest", "stochastic", "dithered", "residual", "swallowed")
ELEMENTS = 4096  # of the gradient whose norm is taken
SHRINKS_AFTER = 1000  # steps after which the gradients of ``decay`` are a tenth


def half_ticks(storage: str, weights: Tensor) -> Tensor:
    """
    The smallest update that moves a weight when it is rounded to nearest.

    :param storage: a format's name
    :param weights: FP32
    """
    return FORMATS[storage].tick(weights) / 2


def written_back(writeback: str, steps: int, elements: int = 1) -> Tensor:
    """
    FP16 weights under SHARP that get the same update at each step.

    :param writeback: how they are rounded
    :param steps: how many
    :param elements: how many weights
    :return: weights before each step and after the last, less their start, shape (steps + 1, elements)
    """
    weight = th.full((elements,), START).half().requires_grad_()
    weight.grad = -th.ones(elements).half()
    optimizer = SHARP([weight], lr=STEP, eps=1e-8, writeback=writeback)
    start, path = weight.detach().float(), [th.zeros(elements)]
    for _ in range(steps):
        optimizer.step()
        path.append(weight.detach().float() - start)
    return th.stack(path)


def norms(magnitude: float) -> tuple[float, float]:
    """
    Norm of an FP16 gradient with elements of one magnitude, over the true one: squared in FP16, and by module A.

    :param magnitude: of each element
    """
    gradient = th.full((ELEMENTS,), magnitude).half()
    true = float(gradient.double().norm())
    return float(naive_clip_coefficient([gradient], 0.5)[0]) / true, float(gradient_norm([gradient])) / true


def log_ratio_error(size: float, seed: int = 0) -> dict[str, float]:
    """
    Rms of log π/π₀ and the errors of three ways to form it, see ``log_ratio_errors``.

    :param size: how far the policy has moved, in standard deviations
    :param seed: of policies and actions
    """
    g = th.Generator().manual_seed(seed)
    mean0, log_std0 = th.randn(20_000, 6, generator=g).half(), (0.2 * th.randn(6, generator=g)).half()
    noise, moved = th.randn(20_000, 6, generator=g), th.randn(20_000, 6, generator=g)
    actions = (mean0.float() + log_std0.float().exp() * noise).half()
    mean = (mean0.float() + size * log_std0.float().exp() * moved).half()
    log_std = (log_std0.float() + 0.3 * size * th.randn(6, generator=g)).half()
    return log_ratio_errors(actions, mean, log_std, GaussianBehaviour(mean0, log_std0))


def stored_size(magnitude: float, scale: float | None) -> float:
    """
    The denominator that a constant gradient leaves in FP16 over its true size.

    :param magnitude: of the gradient
    :param scale: of a root second moment; None for Adam's second moment
    """
    if scale is None:
        return float(th.tensor(magnitude**2).half().float().sqrt()) / magnitude
    return float(FORMATS["fp16"].store(th.tensor(magnitude * scale)).float()) / scale / magnitude


def decay(rounding: str, steps: int, large: float = 1e-2) -> list[float]:
    """
    The denominator as gradients shrink to a tenth.

    :param rounding: of the root second moment; ``adam`` for the second moment of Adam, in FP16
    :param steps: how many
    :param large: size of the gradients before
    :return: after each step
    """
    size = [large if step < SHRINKS_AFTER else large / 10 for step in range(steps)]
    if rounding == "adam":
        v, path = th.tensor(large**2).half(), []
        for g in size:
            v = (0.999 * v.float() + 0.001 * g**2).half()
            path.append(float(v.float().sqrt()))
        return path
    weight = th.zeros(1, dtype=th.float16, requires_grad=True)
    optimizer = SHARP([weight], lr=0.0, root_rounding=rounding)
    optimizer.initialize_state()
    scale, state = optimizer.param_groups[0]["state_scale"], optimizer.state[weight]
    state["root_second_moment"].fill_(large * scale)
    path = []
    for g in size:
        weight.grad = th.tensor([g]).half()
        optimizer.step()
        path.append(float(state["root_second_moment"]) / scale)
    return path


def draw_ticks(axes: Sequence[Any]) -> None:
    """Half a tick over the size of a weight."""
    weights = th.logspace(-6, 1, 2000)
    for storage in ("bf16", "fp16", "fp32"):
        axes[0].plot(weights, half_ticks(storage, weights), label=storage.upper())
    axes[0].axhline(3e-4, color="grey", linestyle="--", linewidth=0.8)
    axes[0].text(1.3e-6, 3.4e-4, "learning rate 3e-4: Adam's first step", fontsize=8)
    axes[0].axhline(STEP, color="grey", linestyle="--", linewidth=0.8)
    axes[0].text(1.3e-6, 1.15 * STEP, "an update of 1e-6", fontsize=8)
    axes[0].set(xscale="log", yscale="log", xlabel="|weight|", ylabel="half a tick", ylim=(1e-10, 1e-1))
    axes[0].set_title("updates below the line are lost when rounded to nearest")
    axes[0].legend()


def draw_writeback(axes: Sequence[Any]) -> None:
    """One weight, and the mean of many."""
    steps = 200
    due = STEP * np.arange(steps + 1)
    for panel, elements, title in zip(axes, (1, 4096), ("one weight", "mean of 4,096 weights"), strict=True):
        panel.plot(due, "k--", linewidth=1, label="due")
        for writeback in WRITEBACKS:
            panel.plot(written_back(writeback, steps, elements).mean(dim=1), label=writeback)
        panel.set(title=f"FP16, start {START}: {title}", xlabel="steps of 1e-6", ylabel="moved")
        panel.legend(fontsize=8)


def draw_norms(axes: Sequence[Any]) -> None:
    """Norm over the true one."""
    magnitudes = np.logspace(-7, 4.8, 600)
    naive, ours = np.array([norms(float(x)) for x in magnitudes]).T
    finite = np.isfinite(naive)
    axes[0].plot(magnitudes, np.where(finite, naive, np.nan), label="squares in FP16")
    axes[0].plot(magnitudes, ours, label="module A: s·sqrt(Σ(g/s)²)")
    axes[0].axvspan(magnitudes[~finite].min(), magnitudes.max(), color="C0", alpha=0.15, label="squares: infinite")
    axes[0].set(xscale="log", xlabel="size of the elements", ylabel="norm / true norm")
    axes[0].set_title(f"norm of {ELEMENTS:,} FP16 gradients")
    axes[0].legend(fontsize=8)


def draw_log_ratio(axes: Sequence[Any]) -> None:
    """Error over the size of the log-ratio."""
    rows = [log_ratio_error(float(size)) for size in np.logspace(-3, 0, 25)]
    rms = [row["rms"] for row in rows]
    names = {
        "absolute_fp16": "difference of two FP16 log-probabilities",
        "residual_twosum": "residual in FP16 with TwoSum (paper)",
        "residual_fp32": "residual in FP32 registers (fp16)",
    }
    for key, name in names.items():
        axes[0].plot(rms, [row[key] for row in rows], "o-", markersize=3, label=name)
    axes[0].plot(rms, rms, "k--", linewidth=0.8, label="as large as d itself")
    axes[0].set(xscale="log", yscale="log", xlabel="rms of d = log π/π₀", ylabel="mean absolute error")
    axes[0].set_title("six action dimensions, FP16 parameters and actions")
    axes[0].legend(fontsize=8)


def draw_moments(axes: Sequence[Any]) -> None:
    """What can be stored, and what follows gradients that shrink."""
    sizes = np.logspace(-9, 3, 1000)
    ways: dict[str, float | None] = {"Adam: v in FP16": None, "root, scale 1": 1.0, "root, scale 2^16": 2.0**16}
    for name, scale in ways.items():
        axes[0].plot(sizes, [stored_size(float(x), scale) for x in sizes], label=name)
    axes[0].axvline(0.5, color="grey", linestyle="--", linewidth=0.8)
    axes[0].text(0.6, 1.7, "max_grad_norm", fontsize=8)
    axes[0].set(xscale="log", xlabel="size of the gradient", ylabel="stored / true", ylim=(-0.05, 2))
    axes[0].set_title("denominator of a constant gradient in FP16")
    axes[0].legend(fontsize=8)
    steps = 8000
    exact = [0.01] * SHRINKS_AFTER
    for _ in range(steps - SHRINKS_AFTER):
        exact.append(float(np.sqrt(0.999 * exact[-1] ** 2 + 0.001 * 1e-6)))
    axes[1].plot(exact, "k--", label="exact")
    for rounding in ("nearest", "stochastic", "dithered"):
        axes[1].plot(decay(rounding, steps), label=f"root, {rounding}")
    axes[1].plot(decay("adam", steps), label="Adam: sqrt(v), v in FP16")
    axes[1].set(yscale="log", xlabel="steps", ylabel="denominator", title="gradients fall from 1e-2 to 1e-3")
    axes[1].legend(fontsize=8)


PICTURES: dict[str, tuple[Callable[[Sequence[Any]], None], int]] = {
    "ticks": (draw_ticks, 1),
    "writeback": (draw_writeback, 2),
    "norms": (draw_norms, 1),
    "log_ratio": (draw_log_ratio, 1),
    "moments": (draw_moments, 2),
}
"""What draws a picture, and its panels."""


def main(folder: Path = IMAGES) -> None:
    """
    Draw all.

    :param folder: to draw into
    """
    for name, (draw, panels) in PICTURES.items():
        figure, axes = pyplot().subplots(1, panels, figsize=(6.5 * panels, 4.2), layout="constrained", squeeze=False)
        draw(axes[0])
        for panel in axes[0]:
            panel.grid(alpha=0.3)
        figure.savefig(folder / f"numerics_{name}.png", dpi=90)
        pyplot().close(figure)


if __name__ == "__main__":
    main()
