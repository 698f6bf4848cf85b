"""
Learning over 512,000 steps: six MuJoCo tasks x five seeds per method (paper Sec. 4.3, Table 3 and Fig. 3).

Deterministic evaluation of five episodes every 16,384 steps; SB3's own PPO on two of the tasks checks that ``fp32`` is
SB3. Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.learning [--methods fp32]``
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.comparison import Rows, Scores, in_brackets, interquartile_mean
from benchmarks.runner import RESULTS, Evaluations, annealed, curve_of, make_model, pyplot, versions
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


class _Logs(BaseCallback):
    """Stuck updates, skipped steps and saturated values of each update."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {"stuck_fraction": [], "skipped_steps": [], "saturated": []}

    def _on_rollout_start(self) -> None:
        for name, values in self.values.items():
            if f"train/{name}" in self.logger.name_to_value:
                values.append(float(self.logger.name_to_value[f"train/{name}"]))

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    def _on_step(self) -> bool:
        return True

    def columns(self) -> Row:
        """What a results row keeps; SB3's PPO logs none of it."""
        stuck = self.values["stuck_fraction"]
        return {
            "stuck_fraction": round(float(np.mean(stuck)), 4) if stuck else "",
            "skipped_steps": int(sum(self.values["skipped_steps"])),
            "saturated": int(sum(self.values["saturated"])),
        }


def trained(
    method: str | Precision, env_id: str, seed: int, steps: int, every: int = EVERY, episodes: int = EPISODES
) -> Row:
    """
    One run with the paper's settings, as columns of a row.

    A run that ends with an error, or with a policy that is not finite, has crashed: its AUC and final return are NaN.

    :param method: ``sb3``, or a precision
    :param env_id: task
    :param seed: of the run
    :param steps: environment steps, over which the learning rate falls to 0
    :param every: environment steps between evaluations
    :param episodes: per evaluation
    """
    th.set_num_threads(1)
    model = make_model(method, env_id, seed, **annealed())
    evaluations, logs = Evaluations(env_id, seed, every, episodes), _Logs()
    crash = ""
    try:
        model.learn(steps, callback=[logs, evaluations])
        _raise_unless_finite(model)
    except ValueError as error:
        crash = " ".join(str(error).split())[:200]
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
    """Of runs of one method on one task; those that crashed and those still to be done are told."""
    auc = np.array([float(row["return_auc"]) for row in rows if not row["crash"]])
    crashed = f", {len(rows) - len(auc)} crashed" if len(auc) < len(rows) else ""
    few = f", {len(rows)} seeds" if 0 < len(rows) < len(SEEDS) else ""
    spread = f" ± {auc.std(ddof=1):.0f}" if len(auc) > 1 else ""
    return f"{auc.mean():.0f}{spread}{crashed}{few}" if len(auc) else f"–{crashed}"


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
        each = [" ".join(f"{value:.0f}" for value in values) for values in auc]
        lines.append(f"| {env} | {auc.shape[1]} | {each[0]} | {each[1]} | {auc[1].mean() / auc[0].mean():.2f} |")
    if scores.pairs:
        lines += ["", f"Difference of normalised AUC: {in_brackets(scores.normalised_difference('fp32', 'sb3'))}."]
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """
    Interquartile means of the seeds' learning curves, each task and all of them together.

    :param rows: of the results file
    :param path: of the picture
    """
    figure, panels = pyplot().subplots(2, 4, figsize=(20, 8), layout="constrained")
    whole: dict[str, list[Array]] = {}
    for axes, env in zip(panels.flat, TASKS, strict=False):
        curves = {method: _curves(rows, env, method) for method in METHODS}
        every = [curve[1] for of_method in curves.values() for curve in of_method]
        for colour, (method, of_method) in enumerate(curves.items()):
            if of_method:
                steps, returns = of_method[0][0], np.array([curve[1] for curve in of_method])
                axes.plot(steps, interquartile_mean(returns), color=f"C{colour}", label=method)
                axes.fill_between(steps, *np.quantile(returns, [0.25, 0.75], axis=0), color=f"C{colour}", alpha=0.12)
                if method != "sb3":  # which has two tasks only
                    low, high = np.min(every), np.max(every)
                    whole.setdefault(method, []).extend((returns - low) / (high - low))
        axes.set(title=env, xlabel="environment steps", ylabel="deterministic return")
    for colour, method in enumerate(METHODS):
        if method in whole:
            panels[1, 2].plot(steps, interquartile_mean(np.array(whole[method])), color=f"C{colour}", label=method)
    panels[1, 2].set(title="all tasks, scaled to the extremes of each", xlabel="environment steps")
    panels[1, 3].axis("off")
    panels[1, 3].legend(*panels[0, 0].get_legend_handles_labels(), loc="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _curves(rows: Rows, env: str, method: str) -> list[Array]:
    """Of the runs that did not crash."""
    return [curve_of(row) for row in rows if (row["env"], row["method"], row["crash"]) == (env, method, "")]


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
    runs = wanted(cast(list[str], arguments.methods))
    rows = run_missing(FILE, ("env", "method", "seed"), runs, run, workers_of(arguments))
    print("\n\n".join(make(rows) for make in (table, ranks_table, pairs_table, sb3_table)))


if __name__ == "__main__":
    main()
