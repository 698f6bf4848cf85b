"""
The sweep behind the ``fp16`` preset: one factor at a time, three tasks x 8 seeds x 204,800 steps per arm; then the
arms that could replace it on eight fresh seeds.

Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.sweep --jobs 2``
"""

import base64
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.distributions import DiagGaussianDistribution

from benchmarks.comparison import Rows, stratified
from benchmarks.runner import (
    PAPER_SETTINGS,
    RESULTS,
    Evaluations,
    UpdateLogs,
    annealed,
    curve_of,
    make_model,
    pyplot,
    versions,
)
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.timing import Array, Row
from sb3_fp16 import Precision
from sb3_fp16.audit.statistics import Interval

ENVS = ("HalfCheetah-v5", "Walker2d-v5", "Hopper-v5")
SEEDS = tuple(range(8))
FRESH = tuple(range(8, 16))
CONFIRMED = ("fp32", "fp16", "dithered")
"""Arms that run again on seeds that had no part in choosing them: of sixteen, some look better by luck."""
STEPS, EVERY, EPISODES = 204_800, 20_480, 5
PROBES = 32
PROBED_AT = (20_480, 102_400, 204_800)
FILE = RESULTS / "sweep.csv"


class Arm(NamedTuple):
    """
    What is compared.

    :param differs: from ``fp16``, in words
    :param precision: a preset, or ``fp16`` with one factor changed
    :param learning_rate: of Adam or SHARP at the start, annealed linearly to 0 as in the paper's runs
    """

    differs: str
    precision: str | Precision
    learning_rate: float = PAPER_SETTINGS["learning_rate"]


_FP16 = Precision.presets["fp16"]
_MASTERS = replace(
    _FP16, input_sharing="elementwise", hidden_sharing="elementwise", root_rounding="fp32", writeback="residual"
)

# In the order in which they run, those that could matter most first.
ARMS: dict[str, Arm] = {
    "fp32": Arm("FP32, torch's Adam", "fp32"),
    "fp16": Arm("the preset", "fp16"),
    "dithered": Arm("weights written back dithered", replace(_FP16, writeback="dithered")),
    "residual": Arm("every weight has an FP32 carry", replace(_FP16, writeback="residual")),
    "elementwise": Arm(
        "no shared second moment", replace(_FP16, input_sharing="elementwise", hidden_sharing="elementwise")
    ),
    "paper": Arm("the paper as written", "paper"),
    "masters": Arm("no sharing, FP32 second moment, FP32 carry", _MASTERS),
    "bf16": Arm("the paper in BF16", "bf16"),
    "bf16-sr": Arm("BF16, written back stochastically", "bf16-sr"),
    "bf16-lr": Arm("the paper in BF16, twice the learning rate", "bf16", 6e-4),
    "nearest": Arm("weights written back to nearest", replace(_FP16, writeback="nearest")),
    "row": Arm("rows share a second moment in every layer", replace(_FP16, input_sharing="row", hidden_sharing="row")),
    "elementwise-row": Arm(
        "no sharing at the input, rows elsewhere", replace(_FP16, input_sharing="elementwise", hidden_sharing="row")
    ),
    "root-nearest": Arm("second moment rounded to nearest", replace(_FP16, root_rounding="nearest")),
    "root-stochastic": Arm("second moment rounded stochastically", replace(_FP16, root_rounding="stochastic")),
    "root-fp32": Arm("second moment in FP32", replace(_FP16, root_rounding="fp32")),
}


class _Watch(UpdateLogs):
    """
    What a run tells of itself: the logs of its updates, and its policy now and then.

    :param probes: observations at which the policy is kept
    """

    def __init__(self, probes: Array) -> None:
        super().__init__()
        self.probes = probes
        self.policies: list[Array] = []

    def _on_rollout_start(self) -> None:
        super()._on_rollout_start()
        if self.num_timesteps in PROBED_AT:
            self._keep_policy()

    def _on_training_end(self) -> None:
        self._on_rollout_start()

    @th.no_grad()
    def _keep_policy(self) -> None:
        model = cast(PPO, self.model)
        distribution = model.policy.get_distribution(th.as_tensor(self.probes, device=model.device))
        gaussian = cast(DiagGaussianDistribution, distribution).distribution
        self.policies.append(np.stack([gaussian.mean.float().numpy(), gaussian.stddev.log().float().numpy()]))


def probes(env_id: str) -> Array:
    """
    Observations of random actions, at which policies are compared.

    :param env_id: task
    :return: FP32, shape (PROBES, observation dimensions)
    """
    env = gym.make(env_id)
    env.action_space.seed(0)
    observations = [env.reset(seed=0)[0]]
    while len(observations) < 8 * PROBES:
        observation, _, terminated, truncated, _ = env.step(env.action_space.sample())
        observations.append(env.reset()[0] if terminated or truncated else observation)
    return np.asarray(observations[::8], dtype=np.float32)


def pack(policies: list[Array]) -> str:
    """
    Policies as text.

    :param policies: means and log standard deviations, shape (2, PROBES, action dimensions), per time of PROBED_AT
    """
    return base64.b64encode(np.asarray(policies, dtype="<f2").tobytes()).decode()


def unpack(text: str) -> Array:
    """
    What ``pack`` was given.

    :param text: from it
    :return: FP64, shape (times, 2, PROBES, action dimensions)
    """
    return np.frombuffer(base64.b64decode(text), "<f2").astype(float).reshape(len(PROBED_AT), 2, PROBES, -1)


def run(env_id: str, arm: str, seed: int) -> Row:
    """One training run as one row."""
    th.set_num_threads(1)
    model = make_model(ARMS[arm].precision, env_id, seed, **annealed(ARMS[arm].learning_rate))
    watch, evaluations = _Watch(probes(env_id)), Evaluations(env_id, seed, EVERY, EPISODES)
    model.learn(STEPS, callback=[watch, evaluations])
    evaluated = evaluations.columns()
    return {
        "env": env_id,
        "arm": arm,
        "seed": seed,
        "steps": STEPS,
        "return_auc": evaluated["return_auc"],
        "final_return": evaluated["final_return"],
        **watch.columns(),
        # The last learning rate is 0.
        "stuck_fraction_late": round(float(np.mean(watch.values["stuck_fraction"][-10:-1])), 4),
        "curve": evaluated["curve"],
        "policies": pack(watch.policies),
        **versions(),
    }


def gaussian_kl(policy: Array, reference: Array) -> float:
    """
    Mean KL(reference‖policy) over the probes, closed form.

    :param policy: means and log standard deviations, shape (2, PROBES, action dimensions)
    :param reference: likewise
    """
    (mean, log_std), (mean0, log_std0) = policy, reference
    ratio = np.exp(2 * (log_std0 - log_std)) + ((mean - mean0) / np.exp(log_std)) ** 2
    return float((log_std - log_std0 + (ratio - 1) / 2).sum(axis=-1).mean())


class Comparison(NamedTuple):
    """
    An arm against the reference, over the pairs of task and seed that both have finished.

    :param pairs: how many
    :param auc: return AUC as a share of the reference's mean of the task, averaged over tasks
    :param difference: of that share to the reference's, with its interval
    :param final: difference of final returns likewise
    :param wins: pairs in which the arm's AUC is higher
    :param drift: KL from the reference's policy of the same task and seed at the end, median over pairs
    """

    pairs: int
    auc: float
    difference: Interval
    final: Interval
    wins: int
    drift: float


def compare(rows: Rows, arm: str, reference: str) -> Comparison | None:
    """
    Pair an arm's runs with the reference's.

    Intervals are of a paired bootstrap within each task: differences of one task are resampled among themselves.

    :param rows: of the results file
    :param arm: key of ``ARMS``
    :param reference: likewise
    :return: None where there is no pair
    """
    runs = {name: {(r["env"], r["seed"]): r for r in rows if r["arm"] == name} for name in (arm, reference)}
    pairs = [(env, seed) for env, seed in runs[arm] if (env, seed) in runs[reference]]
    if not pairs:
        return None

    def relative(measure: str) -> dict[str, Array]:
        """Differences by task, as shares of the reference's mean."""
        differences = {}
        for env in dict.fromkeys(env for env, _ in pairs):
            values = [
                [float(runs[name][pair][measure]) for pair in pairs if pair[0] == env] for name in (arm, reference)
            ]
            own, others = np.asarray(values)
            differences[env] = (own - others) / abs(others.mean())
        return differences

    auc = relative("return_auc")
    drifts = [gaussian_kl(*(unpack(runs[name][pair]["policies"])[-1] for name in (arm, reference))) for pair in pairs]
    return Comparison(
        pairs=len(pairs),
        auc=1 + float(np.mean([x.mean() for x in auc.values()])),
        difference=stratified(list(auc.values())),
        final=stratified(list(relative("final_return").values())),
        wins=int(sum((x > 0).sum() for x in auc.values())),
        drift=float(np.median(drifts)),
    )


def table(rows: Rows) -> str:
    """
    Every arm against FP32 and against ``fp16`` as Markdown.

    :param rows: of the results file
    """
    rows = [row for row in rows if int(row["seed"]) in SEEDS]
    lines = [
        "| arm | what differs | runs | AUC, % of `fp32` | to `fp32`, % | to `fp16`, % | final return to `fp32`, % "
        "| wins over `fp32` | KL from `fp32` | stuck, late |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for arm, setting in ARMS.items():
        of_arm = [row for row in rows if row["arm"] == arm]
        single, half = compare(rows, arm, "fp32"), compare(rows, arm, "fp16")
        if single is None or half is None:
            continue
        stuck = np.mean([float(row["stuck_fraction_late"]) for row in of_arm])
        cells = [
            f"`{arm}`",
            setting.differs,
            str(len(of_arm)),
            f"{100 * single.auc:.0f}",
            _percent(single.difference) if arm != "fp32" else "",
            _percent(half.difference) if arm != "fp16" else "",
            _percent(single.final) if arm != "fp32" else "",
            f"{single.wins} of {single.pairs}" if arm != "fp32" else "",
            f"{single.drift:.2f}" if arm != "fp32" else "",
            f"{100 * stuck:.0f} %",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def confirmation(rows: Rows) -> str:
    """
    The confirmed arms on fresh seeds alone, against FP32 and ``fp16``, as Markdown.

    :param rows: of the results file
    """
    fresh = [row for row in rows if int(row["seed"]) in FRESH]
    lines = ["| arm | against | pairs | AUC, % | final return, % | higher AUC |", "|---|---|---:|---:|---:|---:|"]
    for arm, reference in (("fp16", "fp32"), ("dithered", "fp32"), ("dithered", "fp16")):
        found = compare(fresh, arm, reference)
        if found is not None:
            differences = f"{_percent(found.difference)} | {_percent(found.final)}"
            lines.append(f"| `{arm}` | `{reference}` | {found.pairs} | {differences} | {found.wins} of {found.pairs} |")
    return "\n".join(lines)


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:+.0f} [{100 * interval.low:+.0f}, {100 * interval.high:+.0f}]"


def draw(rows: Rows, path: Path) -> None:
    """
    Differences to FP32 with their intervals, and learning curves per task.

    :param rows: of the results file
    :param path: of the picture
    """
    rows = [row for row in rows if int(row["seed"]) in SEEDS]
    figure, panels = pyplot().subplots(1, 1 + len(ENVS), figsize=(18, 5), layout="constrained")
    compared = {arm: compare(rows, arm, "fp32") for arm in ARMS if arm != "fp32"}
    found = {arm: comparison for arm, comparison in compared.items() if comparison is not None}
    for place, comparison in enumerate(found.values()):
        value, low, high = (100 * x for x in comparison.difference)
        panels[0].errorbar(value, place, xerr=[[value - low], [high - value]], fmt="C0o", capsize=3)
    panels[0].axvline(0, color="grey", linewidth=0.8)
    panels[0].set_yticks(range(len(found)), found)
    panels[0].invert_yaxis()
    panels[0].set(title="return AUC against FP32, mean of tasks, 95 %", xlabel="% of FP32's")
    for axes, env in zip(panels[1:], ENVS, strict=True):
        for arm in ("fp32", "fp16", "paper", "bf16", "bf16-sr"):
            curves = [curve_of(row) for row in rows if row["arm"] == arm and row["env"] == env]
            if curves:
                axes.plot(*np.mean(curves, axis=0), label=arm)
        axes.set(title=env, xlabel="environment steps", ylabel="deterministic return, mean of seeds")
        axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="all by default")
    arguments = parser.parse_args()
    wanted = [(env, arm, seed) for arm, seed, env in product(ARMS, SEEDS, ENVS)]
    wanted += [(env, arm, seed) for seed, env, arm in product(FRESH, ENVS, CONFIRMED)]
    asked = [values for values in wanted if values[1] in arguments.arms]
    rows = run_missing(FILE, ("env", "arm", "seed"), wanted, run, workers_of(arguments), asked)
    print(f"{table(rows)}\n\n{confirmation(rows)}")


if __name__ == "__main__":
    main()
