"""
Stage by stage: what FP16 does to an update of FP32 on the same rollouts and minibatches (paper Sec. 4.1).

Runs of FP32 stop before some of their updates; weights are put on FP16's grid, so that both formats hold the same ones.
FP32 then does the update. At some of its steps every path gets the weights that FP32 has reached, rounded, and the same
minibatch: statistics, losses, gradients, log-probabilities, log-ratios and clip decisions are compared with FP32's.
Optimizers and ways of writing back get the stream of FP32's own gradients and updates (``sb3_fp16.audit``).

Resumable: runs that are in the results file are not repeated. ``python -m benchmarks.stages``
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch as th
from stable_baselines3 import PPO
from torch import Tensor

from benchmarks.comparison import Rows
from benchmarks.fidelity import BeforeUpdates, rollout_for
from benchmarks.runner import RESULTS, annealed, make_model, pyplot, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.stress import log_ratio_errors
from benchmarks.timing import Array, Row
from sb3_fp16 import PPOFP16
from sb3_fp16.audit.optimizer import Shadow, state_rows
from sb3_fp16.audit.statistics import bootstrap
from sb3_fp16.audit.sticking import WRITEBACKS, WritebackSimulation
from sb3_fp16.audit.twin import SINGLE, Step, replay, twin_of
from sb3_fp16.buffers import RolloutBufferFP16
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.residuals import GaussianBehaviour, clip_log_ratio
from sb3_fp16.rounding import FORMATS
from sb3_fp16.scalars import clip_coefficients, gradient_norm, naive_clip_coefficient, normalize_advantages
from sb3_fp16.sharp import SHARP

ENVS, SEEDS = ("HalfCheetah-v5", "Hopper-v5"), tuple(range(5))
STEPS, AFTER = 204_800, (2, 10, 30, 60, 99)
"""Length of a run, and the rollouts after which an update is looked at."""
AT = (1, 40, 160, 319)
"""Steps of the 320 of an update at which paths are compared; before the first the policy has not moved."""
PATHS = ("naive-fp16", "paper", "fp16")
FILE = RESULTS / "stages.csv"

STAGES = {
    "advantage_mean": "mean of the advantages, error / their SD",
    "advantage_std": "SD of the advantages, relative error",
    "advantages": "normalised advantages, mean absolute error",
    "policy_loss": "policy loss, absolute error",
    "value_loss": "value loss, relative error",
    "norm": "gradient norm, relative error",
    "gradient": "gradient, distance / norm",
    "log_prob": "log π, mean absolute error",
    "log_ratio": "log π/π₀, mean absolute error",
    "clipped": "samples clipped otherwise than in FP32",
}
OPTIMIZERS = {"Adam in FP16": "Adam in FP16", "paper": "SHARP, `paper`", "fp16": "SHARP, `fp16`"}
_NOT_FINITE = 1e300
RATIOS = ("rms", "absolute_fp16", "residual_twosum", "residual_fp32")


class Seen(NamedTuple):
    """What a path makes of one minibatch, in true units, and of the policy at all samples of the rollout."""

    mean: float
    std: float
    advantages: Tensor
    policy_loss: float
    value_loss: float
    norm: float
    gradient: Tensor
    log_prob: Tensor
    d: Tensor
    clipped: Tensor


class Arithmetic:
    """
    One way of computing an update.

    :param model: whose state it starts from
    :param precision: that it computes in
    :param rollout: FP32's, of one environment
    """

    def __init__(self, model: PPO, precision: str, rollout: RolloutBufferFP16) -> None:
        self.twin = twin_of(model, SINGLE if precision == "fp32" else precision)
        self.engine = EagerEngine(self.twin.policy, self.twin.batch_size)
        self.settings = self.twin.update_settings()
        self.rollout = rollout_for(self.twin, rollout)

    def sees(self, rows: Array, epoch: Array, weights: dict[str, Tensor]) -> Seen:
        """
        Every stage up to the gradient's norm.

        :param rows: of the rollout, the minibatch
        :param epoch: rows in the order of all its minibatches
        :param weights: on FP16's grid
        """
        policy, precision = self.twin.policy, self.twin.precision
        policy.load_state_dict(weights)
        batch = self.rollout._get_samples(rows)
        advantages = batch.advantages.float() if precision.global_scalars else batch.advantages
        losses = self.engine._losses(batch, self.settings)
        self.engine.optimizer.zero_grad()
        scales = self.engine.gradient_scale.scales
        (losses.per_network * scales).sum().backward()  # type: ignore[no-untyped-call]
        networks = [[cast(Tensor, p.grad) for p in network] for network in self.engine.networks.values()]
        true = [g.float().reshape(-1) / scale for network, scale in zip(networks, scales, strict=True) for g in network]
        norms = th.stack([gradient_norm(network) for network in networks])
        norm = clip_coefficients(norms, scales, self.settings.max_grad_norm)[0]
        if not precision.global_scalars:
            everything = [g for network in networks for g in network]
            norm = naive_clip_coefficient(everything, self.settings.max_grad_norm)[0]
        whole = self.rollout._get_samples(np.arange(len(self.rollout.rewards)))
        with th.no_grad():
            d = self.engine.evaluate(whole)[0].float()
            log_prob = policy.evaluate_actions(whole.observations, whole.actions)[1].float()
        return Seen(
            mean=float(advantages.mean()),
            std=float(advantages.std()),
            advantages=normalize_advantages(advantages).float(),
            policy_loss=losses.policy.item(),
            value_loss=losses.value.item(),
            norm=float(norm),
            gradient=th.cat(true),
            log_prob=log_prob,
            d=d,
            clipped=self._clipped(d[epoch], whole.advantages[epoch]),
        )

    def _clipped(self, d: Tensor, advantages: Tensor) -> Tensor:
        """Which samples the loss clips, minibatch by minibatch."""
        clip_range, found = self.settings.clip_range, []
        size = self.settings.batch_size
        for first in range(0, len(d), size):
            ratios, part = d[first : first + size], advantages[first : first + size]
            if self.twin.precision.global_scalars:
                found.append(clip_log_ratio(ratios, normalize_advantages(part.float()), clip_range) != ratios)
            else:  # on ratios, every operation rounded to storage
                ratio, normalized = ratios.to(part.dtype).exp(), normalize_advantages(part)
                found.append(th.where(normalized >= 0, ratio > 1 + clip_range, ratio < 1 - clip_range))
        return th.cat(found)


def errors(seen: Seen, reference: Seen) -> dict[str, float]:
    """
    Of each stage.

    :param seen: by a path
    :param reference: FP32's
    """
    return {
        "advantage_mean": abs(seen.mean - reference.mean) / reference.std,
        "advantage_std": abs(seen.std / reference.std - 1),
        "advantages": _mae(seen.advantages, reference.advantages),
        "policy_loss": abs(seen.policy_loss - reference.policy_loss),
        "value_loss": abs(seen.value_loss / reference.value_loss - 1),
        "norm": abs(seen.norm / reference.norm - 1),
        "gradient": float((seen.gradient - reference.gradient).norm() / reference.gradient.norm()),
        "log_prob": _mae(seen.log_prob, reference.log_prob),
        "log_ratio": _mae(seen.d, reference.d),
        "clipped": float((seen.clipped != reference.clipped).double().mean()),
    }


def _mae(values: Tensor, reference: Tensor) -> float:
    return float((values - reference).abs().mean())


class _Watch(BeforeUpdates):
    """Looks at some of the updates of an FP32 run."""

    def __init__(self) -> None:
        super().__init__(AFTER)
        self.columns: dict[str, list[float]] = {}

    def look(self, model: PPO) -> None:
        """Compare arithmetics, optimizers and ways of writing back."""
        rollout = cast(RolloutBufferFP16, model.rollout_buffer)
        start = on_the_grid(twin_of(model, SINGLE))
        reference = Arithmetic(start, "fp32", rollout)
        paths = {name: Arithmetic(start, name, rollout) for name in PATHS}
        found = list(self._along_an_update(start, reference, paths))
        for name in found[0]:
            self.columns.setdefault(name, []).append(float(np.mean([one[name] for one in found])))
        for name, value in self._optimizers(start, reference.rollout).items():
            self.columns.setdefault(name, []).append(value)

    def _along_an_update(
        self, start: PPOFP16, reference: Arithmetic, paths: dict[str, Arithmetic]
    ) -> Iterable[dict[str, float]]:
        """Errors at the chosen steps of FP32's update."""
        walker = Arithmetic(start, "fp32", reference.rollout)
        for group in walker.engine.optimizer.param_groups:
            group["lr"] = walker.settings.learning_rate
        np.random.seed(0)
        size, step = walker.settings.batch_size, 0
        for _ in range(walker.settings.n_epochs):
            rows = walker.rollout.minibatch_rows()
            for first in range(0, len(rows), size):
                batch = rows[first : first + size]
                if step in AT:
                    weights = {k: FORMATS["fp16"].round(v) for k, v in walker.twin.policy.state_dict().items()}
                    exact = reference.sees(batch, rows, weights)
                    found = {
                        f"{name} {stage}": error
                        for name, path in paths.items()
                        for stage, error in errors(path.sees(batch, rows, weights), exact).items()
                    }
                    yield found | self._ratios(reference)
                losses = walker.engine._losses(walker.rollout._get_samples(batch), walker.settings)
                walker.engine._step(losses.per_network, walker.settings.max_grad_norm)
                step += 1

    @staticmethod
    @th.no_grad()
    def _ratios(reference: Arithmetic) -> dict[str, float]:
        """Three ways to form the log-ratio of the same FP16 actions and parameters of both policies."""
        batch = reference.rollout._get_samples(np.arange(len(reference.rollout.rewards)))
        old = cast(GaussianBehaviour, batch.behaviour)
        policy = reference.twin.policy.evaluate(batch.observations).distribution
        mean, log_std = cast(GaussianBehaviour, policy.behaviour())
        behaviour = GaussianBehaviour(old.mean.half(), old.log_std.half())
        found = log_ratio_errors(batch.actions.half(), mean.half(), log_std.half(), behaviour)
        return {f"ratio {name}": value for name, value in found.items()}

    @staticmethod
    def _optimizers(start: PPOFP16, rollout: RolloutBufferFP16) -> dict[str, float]:
        """Optimizer state and writeback over FP32's update."""
        shadows = {name: _shadow_of(start, name) for name in ("paper", "fp16")}
        written = WritebackSimulation()
        walker = twin_of(start, SINGLE)

        def observe(step: Step) -> None:
            for observing in (*(shadow.observe for shadow in shadows.values()), written.observe):
                observing(step)

        for _ in range(walker.n_epochs):
            replay(walker, rollout, len(rollout.rewards) // walker.batch_size, observe)
        own = [row for row in state_rows(start) if (row.name, row.storage) == ("exp_avg_sq", "fp16")]
        found = {"FP32 Adam's, in FP16": own[0].lost} if own else {}
        for name, shadow in shadows.items():
            sharp, adam = shadow.rows()
            for of, row in ((name, sharp), ("Adam in FP16", adam)):
                found |= {f"{of} zeroed": row.zeroed, f"{of} update": row.ratio, f"{of} cosine": row.cosine}
        return found | {
            f"stuck {row.writeback}": row.unchanged
            for row in written.rows()
            if row.storage == "fp16" and row.writeback in WRITEBACKS
        }


def on_the_grid(model: PPOFP16) -> PPOFP16:
    """
    The model, its weights rounded to FP16.

    :param model: in FP32, changed
    """
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.copy_(FORMATS["fp16"].round(parameter))
    return model


def _shadow_of(model: PPOFP16, precision: str) -> Shadow:
    twin = twin_of(model, precision)
    return Shadow(cast(SHARP, twin.policy.optimizer), twin.device)


def run(env_id: str, seed: int) -> Row:
    """All that was seen along one run as one row, a number for each of ``AFTER`` in every column."""
    th.set_num_threads(1)
    model, watch = make_model("fp32", env_id, seed, **annealed()), _Watch()
    model.learn(STEPS, callback=watch)
    columns = {name: " ".join(f"{value:.5g}" for value in values) for name, values in watch.columns.items()}
    return {"env": env_id, "seed": seed, "after": " ".join(map(str, AFTER)), **columns, **versions()}


def cell(rows: Rows, column: str, digits: str = ".2g") -> str:
    """
    Median over runs and updates with the interval of resampled runs, as text.

    :param rows: of the results file
    :param column: of it
    :param digits: format of the numbers
    """
    values = np.array([[float(x) for x in row[column].split()] for row in rows])
    # Norms of FP16 overflow; an order is all that a median needs.
    ordered = bootstrap(np.nan_to_num(values, nan=_NOT_FINITE, posinf=_NOT_FINITE), np.median)
    value, low, high = ("not finite" if x > 1e100 else f"{x:{digits}}" for x in ordered)
    return f"{value} [{low}, {high}]"


def table(rows: Rows) -> str:
    """
    Errors of every stage as Markdown.

    :param rows: of the results file
    """
    lines = [f"| stage | {' | '.join(f'`{name}`' for name in PATHS)} |", "|---|" + "---:|" * len(PATHS)]
    for stage, words in STAGES.items():
        lines.append(f"| {words} | {' | '.join(cell(rows, f'{name} {stage}') for name in PATHS)} |")
    return "\n".join(lines)


def ratios_table(rows: Rows) -> str:
    """
    The three ways to form the log-ratio of given policies, per task, as Markdown.

    :param rows: of the results file
    """
    lines = ["| task | rms of log π/π₀ | absolute in FP16, MAE | residual with TwoSum in FP16 | residual in FP32 |"]
    lines.append("|---|---:|---:|---:|---:|")
    for env in dict.fromkeys(row["env"] for row in rows):
        of_task = [row for row in rows if row["env"] == env]
        lines.append(f"| {env} | {' | '.join(cell(of_task, f'ratio {name}') for name in RATIOS)} |")
    return "\n".join(lines)


def optimizers_table(rows: Rows) -> str:
    """
    Optimizers beside FP32's Adam on the same gradients, as Markdown.

    :param rows: of the results file
    """
    lines = ["| optimizer | second moments that are zero | size of its step / FP32 Adam's | cosine |"]
    lines.append("|---|---:|---:|---:|")
    for name, words in OPTIMIZERS.items():
        cells = (cell(rows, f"{name} {what}", ".3g") for what in ("zeroed", "update", "cosine"))
        lines.append(f"| {words} | {' | '.join(cells)} |")
    held = cell(rows, "FP32 Adam's, in FP16", ".3g")
    lines.append(f"| FP32 Adam's second moments of the whole run, were they FP16 | {held} | | |")
    return "\n".join(lines)


def draw(rows: Rows, path: Path) -> None:
    """
    Nonzero updates without effect along the runs, by the way weights are written back.

    :param rows: of the results file
    :param path: of the picture
    """
    figure, panels = pyplot().subplots(1, len(ENVS), figsize=(10, 4), sharey=True, layout="constrained")
    steps = 2048 * np.array([int(rollouts) for rollouts in rows[0]["after"].split()])
    for axes, env in zip(panels, ENVS, strict=True):
        for writeback in WRITEBACKS:
            values = [[float(x) for x in row[f"stuck {writeback}"].split()] for row in rows if row["env"] == env]
            if values:
                (line,) = axes.plot(steps, 100 * np.mean(values, axis=0), "o-", label=writeback)
                axes.plot(steps, 100 * np.array(values).T, color=line.get_color(), alpha=0.25)
        axes.set(title=env, xlabel="environment steps", ylabel="nonzero updates that change no FP16 weight, %")
    panels[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Run what is missing, then print the tables."""
    workers = workers_of(parser_of(__doc__).parse_args())
    runs = [(env, seed) for seed, env in product(SEEDS, ENVS)]
    rows = run_missing(FILE, ("env", "seed"), runs, run, workers, settings={"after": " ".join(map(str, AFTER))})
    print("\n\n".join(make(rows) for make in (table, ratios_table, optimizers_table)))


if __name__ == "__main__":
    main()
