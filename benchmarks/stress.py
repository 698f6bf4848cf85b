"""
The paper's fixed-data numbers (Sec. 4.1): overflow of the gradient norm, and error of the log-ratio.

``python -m benchmarks.stress``
"""

from typing import Any

import numpy as np
import torch as th
from torch import Tensor

from benchmarks.runner import RESULTS, versions, write_csv
from sb3_fp16.residuals import LOG_SQRT_2PI, GaussianBehaviour, gaussian_log_ratio
from sb3_fp16.rounding import FORMATS
from sb3_fp16.scalars import gradient_norm

FILE = RESULTS / "stress.csv"
SEEDS = range(10)


def finite_norms() -> tuple[int, int, int]:
    """Of 24 finite FP16 gradients: how many norms are finite, squared in FP16 and by module A."""
    generator = th.Generator().manual_seed(0)
    gradients = [
        ((th.rand(size, generator=generator) * 0.5 + 0.5) * magnitude).half()
        for magnitude in (300.0, 1e3, 2e3, 1e4, 3e4, 6.5e4)
        for size in (64, 1024, 4096, 40_000)
    ]
    naive = sum(bool(th.isfinite(g.square().sum().sqrt())) for g in gradients)
    return len(gradients), naive, sum(bool(th.isfinite(gradient_norm([g]))) for g in gradients)


def synthetic_errors(seed: int) -> dict[str, float]:
    """
    ``log_ratio_errors`` of policies whose log-ratio has an rms near 0.1.

    :param seed: of the policies and actions
    """
    g = th.Generator().manual_seed(seed)
    mean0 = th.randn(20_000, 3, generator=g).half()
    log_std0 = (0.2 * th.randn(3, generator=g)).half()
    actions = (mean0.float() + log_std0.float().exp() * th.randn(20_000, 3, generator=g)).half()
    mean = (mean0.float() + 0.055 * log_std0.float().exp() * th.randn(20_000, 3, generator=g)).half()
    log_std = (log_std0.float() + 0.0165 * th.randn(3, generator=g)).half()
    return {"seed": seed, **log_ratio_errors(actions, mean, log_std, GaussianBehaviour(mean0, log_std0))}


def log_ratio_errors(actions: Tensor, mean: Tensor, log_std: Tensor, behaviour: GaussianBehaviour) -> dict[str, float]:
    """
    Rms of log π/π₀, and mean absolute error against float64 of three ways to form it.

    :param actions: FP16, shape (batch, dims)
    :param mean: μ, FP16, shape (batch, dims)
    :param log_std: l, FP16, shape (dims,)
    :param behaviour: μ₀ and l₀, FP16
    """

    def log_prob(mu: Tensor, log_sigma: Tensor) -> Tensor:  # in the tensors' own format, operation by operation
        z = (actions.to(mu.dtype) - mu) * th.exp(-log_sigma)
        return (-log_sigma - 0.5 * z.square() - LOG_SQRT_2PI).sum(dim=1)

    mean0, log_std0 = behaviour
    exact = log_prob(mean.double(), log_std.double()) - log_prob(mean0.double(), log_std0.double())
    ways = {
        "absolute_fp16": log_prob(mean, log_std) - log_prob(mean0, log_std0),
        "residual_twosum": gaussian_log_ratio(mean.float(), log_std.float(), actions, behaviour, FORMATS["fp16"]),
        "residual_fp32": gaussian_log_ratio(mean.float(), log_std.float(), actions, behaviour),
    }
    errors = {name: float((d.double() - exact).abs().mean()) for name, d in ways.items()}
    return {"rms": float(exact.square().mean().sqrt()), **errors}


def main() -> None:
    """Measure, write one row per seed, print the summary."""
    total, naive, ours = finite_norms()
    rows: list[dict[str, Any]] = [synthetic_errors(seed) for seed in SEEDS]
    for row in rows:
        row["mae_ratio"] = row["absolute_fp16"] / row["residual_twosum"]
        row.update({"norms": total, "naive_finite": naive, "ours_finite": ours, **versions()})
        row.update({key: float(f"{value:.4g}") for key, value in row.items() if isinstance(value, float)})
    write_csv(FILE, rows)
    print(f"gradient norms that are finite: FP16 squares {naive} of {total}, module A {ours} of {total}")
    for key in ("rms", "absolute_fp16", "residual_twosum", "residual_fp32", "mae_ratio"):
        values = np.array([row[key] for row in rows])
        spread = f"{values.min():.3g} to {values.max():.3g}, {len(rows)} seeds"
        print(f"{key:<16} median {np.median(values):.3g}  ({spread})")


if __name__ == "__main__":
    main()
