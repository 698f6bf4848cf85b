"""
``make demo``: PPOFP16 and SB3's PPO on HalfCheetah-v5, same seed and budget, each in a process of its own.

Leaves demo/model.zip (the FP16 model), demo/learning_curve.png and demo/table.md.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import make_model, pyplot, state_bytes, train

ENV, SEED = "HalfCheetah-v5", 0
FOLDER = Path("demo")
LABELS = {"sb3": "SB3 PPO (FP32)", "fp16": "PPOFP16 (FP16)"}


def run(method: str, steps: int) -> dict[str, Any]:
    """
    Train and evaluate one method; the FP16 model is saved.

    :param method: ``sb3`` or a precision
    :param steps: environment steps
    """
    model = make_model(method, ENV, SEED)
    started = time.perf_counter()
    evaluations, times = train(model, ENV, SEED, steps, every=4096, episodes=3, progress_bar=method == "fp16")
    seconds = time.perf_counter() - started
    if method == "fp16":
        model.save(FOLDER / "model.zip")
    evaluations.episodes = 10
    final = evaluations.evaluate()
    return {
        "curve": evaluations.points[:-1],
        "return": final,
        "update_seconds": float(np.median(times.seconds)) if times.seconds else float("nan"),
        "run_seconds": seconds,
        **state_bytes(model),
    }


def table(results: dict[str, dict[str, Any]], steps: int) -> str:
    """
    What a user wants to compare, as Markdown.

    :param results: of ``run``, by method
    :param steps: environment steps
    """
    rows = [
        ("return, 10 deterministic episodes", "return", "{:.0f}"),
        ("seconds per update, median", "update_seconds", "{:.3f}"),
        ("seconds of the run, evaluations included", "run_seconds", "{:.1f}"),
    ]
    kept = ("parameters", "gradients", "optimizer state", "rollout")
    rows += [(f"bytes of {name} kept between updates", name, "{:,}") for name in kept]
    lines = [f"{ENV}, {steps:,} steps, seed {SEED}", "", "| | " + " | ".join(LABELS[m] for m in results) + " |"]
    lines.append("|---|" + "---:|" * len(results))
    for label, key, form in rows:
        lines.append(f"| {label} | " + " | ".join(form.format(result[key]) for result in results.values()) + " |")
    sb3, ours = results["sb3"], results["fp16"]
    update, run = (sb3[name] / ours[name] for name in ("update_seconds", "run_seconds"))
    lines += [
        "",
        f"PPOFP16 updated {update:.1f} and ran {run:.1f} times as fast as SB3's PPO, both at once on this machine.",
    ]
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """
    Learning curves.

    :param results: of ``run``, by method
    :param path: of the picture
    """
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for method, result in results.items():
        axes.plot(*zip(*result["curve"], strict=True), marker="o", label=LABELS[method])
    axes.set(xlabel="environment steps", ylabel="mean return, 3 deterministic episodes", title=ENV)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train both, then write the picture and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=51_200, help="environment steps of each run")
    steps = parser.parse_args().steps
    FOLDER.mkdir(exist_ok=True)
    print(f"Training {' and '.join(LABELS.values())} on {ENV} for {steps:,} steps each", flush=True)
    with ProcessPoolExecutor(len(LABELS), get_context("spawn")) as pool:
        futures = {method: pool.submit(run, method, steps) for method in LABELS}
        results = {method: future.result() for method, future in futures.items()}
    draw(results, FOLDER / "learning_curve.png")
    text = table(results, steps)
    (FOLDER / "table.md").write_text(text)
    print(f"\n{text}\nWritten: {', '.join(str(path) for path in sorted(FOLDER.iterdir()))}")


if __name__ == "__main__":
    main()
