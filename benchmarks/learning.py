"""
Learning over 512,000 steps: six MuJoCo tasks x five seeds per method (paper Sec. 4.3, Table 3 and Fig. 3).

Deterministic evaluation of five episodes every 16,384 steps; SB3's own PPO on two of the tasks checks that ``fp32`` is
SB3. Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.learning [--methods fp32]``
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch as th
from stable_baselines3 import PPO

from benchmarks.comparison import Rows, Scores, in_brackets, interquartile_mean, spread_of
from benchmarks.runner import RESULTS, Evaluations, UpdateLogs, annealed, curve_of, make_model, pyplot, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.timing import Array, Row
from sb3_fp16 import Precision

TASKS = (
    "HalfCheetah-v5",
    "Hopper-v5",
    "Walker2d-v5",
    "Humanoid-v5",
    "Swimmer-v5",
    "InvertedDoublePendulum-v5",
)
TASKS_OF_SB3 = TASKS[:2]
SEEDS = tuple(range(5))
STEPS, EVERY, EPISODES = 512_000, 16_384, 5
OTHERS = ("fp32", "amp-fp16", "amp-bf16")
"""What the paper ranks its method among."""
OURS = ("paper", "fp16")
METHODS = (*OTHERS, *OURS, "sb3")
NAMES = {method: f"`{method}`" for method in METHODS} | {"sb3": "SB3's PPO"}
FILE = RESULTS / "learning.csv"


def trained(
    method: str | Precision,
    env_id: str,
    seed: int,
    steps: int,
    every: int = EVERY,
    episodes: int = EPISODES,
    horizon: int | None = None,
) -> Row:
    """
    One run with the paper's settings, as columns of a row.

    A run that ends with an error of its numbers, or with a policy that is not finite, has crashed: its AUC and final
    return are NaN, and the row says what was raised.

    :param method: ``sb3``, or a precision
    :param env_id: task
    :param seed: of the run
    :param steps: environment steps
    :param every: environment steps between evaluations
    :param episodes: per evaluation
    :param horizon: environment steps over which the learning rate falls to 0; ``steps`` by default
    """
    th.set_num_threads(1)
    model = make_model(method, env_id, seed, **annealed(part=steps / (horizon or steps)))
    evaluations, logs = Evaluations(env_id, seed, every, episodes), UpdateLogs()
    crash = ""
    try:
        model.learn(steps, callback=[logs, evaluations])
        _raise_unless_finite(model)
    except (ArithmeticError, RuntimeError, ValueError) as error:  # RuntimeError is torch's of probabilities
        crash = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
    columns = evaluations.columns()
    if crash:
        columns |= {"return_auc": np.nan, "final_return": np.nan}
    return {"steps": steps, **columns, **logs.columns(), "ended_at": model.num_timesteps, "crash": crash}


def _raise_unless_finite(model: PPO) -> None:
    bad = [name for name, p in model.policy.named_parameters() if not bool(th.isfinite(p).all())]
    if bad:
        raise ValueError(f"{bad[0]} is not finite")


def run(env_id: str, method: str, seed: int) -> Row:
    """One training run as one row."""
    return {"env": env_id, "method": method, "seed": seed, **trained(method, env_id, seed, STEPS), **versions()}


def settings(steps: int, every: int = EVERY, episodes: int = EPISODES) -> dict[str, Any]:
    """
    What rows of one file share.

    :param steps: environment steps
    :param every: environment steps between evaluations
    :param episodes: per evaluation
    """
    return {"steps": steps, "evaluated": f"{episodes} episodes every {every}"}


def table(rows: Rows) -> str:
    """
    Return AUC of each task and method, mean and standard deviation over seeds, as Markdown.

    :param rows: of the results file
    """
    methods = [method for method in METHODS if any(row["method"] == method for row in rows)]
    lines = [f"| task | {' | '.join(NAMES[method] for method in methods)} |", "|---|" + "---:|" * len(methods)]
    for env in TASKS:
        cells = [_mean_of([row for row in rows if (row["env"], row["method"]) == (env, m)]) for m in methods]
        lines.append(f"| {env} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_of(rows: Rows) -> str:
    """Of runs of one method on one task; those still to be done are told."""
    few = f", {len(rows)} seeds" if 0 < len(rows) < len(SEEDS) else ""
    return spread_of(np.array([float(row["return_auc"]) for row in rows])) + few


def ranks_table(rows: Rows) -> str:
    """
    Mean rank among four methods and pairs ranked first, once with ``paper`` and once with ``fp16``, as Markdown.

    :param rows: of the results file
    """
    lines = [
        "| four methods | pairs | method | mean rank of AUC | ranked first |",
        "|---|---:|---|---:|---:|",
    ]
    for ours in OURS:
        scores = Scores.of(rows, (*OTHERS, ours))
        if scores.pairs:
            means, firsts = scores.ranks().mean(axis=1), scores.firsts()
            for method, mean, first in zip(scores.methods, means, firsts, strict=True):
                lines.append(f"| with `{ours}` | {len(scores.pairs)} | {NAMES[method]} | {mean:.2f} | {first} |")
    return "\n".join(lines)


def pairs_table(rows: Rows) -> str:
    """
    ``paper`` and ``fp16`` against each other method: wins, and differences of normalised AUC, as Markdown.

    :param rows: of the results file
    """
    lines = ["| method | against | higher AUC | difference of normalised AUC, 95 % |", "|---|---|---:|---:|"]
    for ours in OURS:
        scores = Scores.of(rows, (*OTHERS, ours))
        if scores.pairs:
            for other in OTHERS:
                wins = f"{scores.wins(ours, other)} of {len(scores.pairs)}"
                difference = in_brackets(scores.normalised_difference(ours, other))
                lines.append(f"| {NAMES[ours]} | {NAMES[other]} | {wins} | {difference} |")
    return "\n".join(lines)


def sb3_table(rows: Rows) -> str:
    """
    SB3's PPO beside ``fp32`` on the same seeds, as Markdown; nothing while SB3's runs are to be done.

    :param rows: of the results file
    """
    scores = Scores.of(rows, ("sb3", "fp32"))
    lines = ["| task | seeds | SB3's PPO | `fp32` | `fp32` / SB3's, mean |", "|---|---:|---|---|---:|"]
    for env in scores.tasks:
        auc = scores.of_task(env)
        each = [" ".join("Crash" if np.isnan(value) else f"{value:.0f}" for value in values) for values in auc]
        ratio = np.nanmean(auc[1]) / np.nanmean(auc[0])
        lines.append(f"| {env} | {auc.shape[1]} | {each[0]} | {each[1]} | {ratio:.2f} |")
    if scores.pairs:
        lines += ["", f"Difference of normalised AUC: {in_brackets(scores.normalised_difference('fp32', 'sb3'))}."]
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """
    Interquartile means of the seeds' learning curves, each task and all of them together.

    From where a run crashed on, it counts with the lowest return of its task.

    :param rows: of the results file
    :param path: of the picture
    """
    figure, panels = pyplot().subplots(2, 4, figsize=(20, 8), layout="constrained")
    whole: dict[str, list[Array]] = {}
    longest = np.zeros(0)
    for axes, env in zip(panels.flat, TASKS, strict=False):
        steps, curves = _curves([row for row in rows if row["env"] == env])
        longest = max(longest, steps, key=len)
        everything = np.concatenate([np.zeros(0), *map(np.ravel, curves.values())])
        low, high = (everything.min(), everything.max()) if len(everything) else (0.0, 1.0)
        for colour, method in enumerate(METHODS):
            if method in curves:
                axes.plot(steps, interquartile_mean(curves[method]), color=f"C{colour}", label=method)
                quarters = np.quantile(curves[method], [0.25, 0.75], axis=0)
                axes.fill_between(steps, *quarters, color=f"C{colour}", alpha=0.12)
                if method != "sb3":  # which has two tasks only
                    whole.setdefault(method, []).extend((curves[method] - low) / (high - low))
        axes.set(title=env, xlabel="environment steps", ylabel="deterministic return")
    for colour, method in enumerate(METHODS):
        if method in whole:
            panels[1, 2].plot(longest, interquartile_mean(np.array(whole[method])), color=f"C{colour}", label=method)
    panels[1, 2].set(title="all tasks, scaled to the extremes of each", xlabel="environment steps")
    panels[1, 3].axis("off")
    panels[1, 3].legend(*panels[0, 0].get_legend_handles_labels(), loc="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _curves(rows: Rows) -> tuple[Array, dict[str, Array]]:
    """Environment steps, and the returns of each method, shape (runs, evaluations), of one task."""
    found = [(row["method"], *curve_of(row)) for row in rows]
    steps = max((of for _, of, _ in found), key=len, default=np.zeros(0))
    low = min((returns.min() for _, _, returns in found), default=0.0)
    curves: dict[str, list[Array]] = {}
    for method, of, returns in found:
        curves.setdefault(method, []).append(np.pad(returns, (0, len(steps) - len(of)), constant_values=low))
    return steps, {method: np.array(runs) for method, runs in curves.items()}


def wanted(methods: Sequence[str]) -> list[tuple[str, str, int]]:
    """
    Runs in the order in which they start: all methods of a seed first, and SB3's, which take longest, last.

    :param methods: to be run
    """
    runs = [(env, method, seed) for seed, env, method in product(SEEDS, TASKS, methods) if method != "sb3"]
    return runs + [(env, "sb3", seed) for seed, env in product(SEEDS, TASKS_OF_SB3) if "sb3" in methods]


def main() -> None:
    """Run what is missing, then print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="all by default")
    arguments = parser.parse_args()
    workers, asked = workers_of(arguments), wanted(cast(list[str], arguments.methods))
    rows = run_missing(FILE, ("env", "method", "seed"), wanted(METHODS), run, workers, asked, settings(STEPS))
    print("\n\n".join(make(rows) for make in (table, ranks_table, pairs_table, sb3_table)))


if __name__ == "__main__":
    main()
