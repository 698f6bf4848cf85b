"""
One update from one state: what each part of the half-precision engine makes of the update that FP32 would do.

Runs of FP32 stop before some of their updates. From there each arm takes the same weights, optimizer state, rollout and
order of minibatches, does its own update, and the policies and values before and after are compared at the rollout's
observations. Nothing of what then happens in training blurs it. ``python -m benchmarks.fidelity --jobs 2``
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, cast

import numpy as np
import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.runner import PAPER_SETTINGS, RESULTS, make_model, versions
from benchmarks.runs import parser_of, run_missing, workers_of
from benchmarks.sweep import ENVS
from benchmarks.timing import Array, Row
from sb3_fp16 import PPOFP16, Precision
from sb3_fp16.audit.statistics import bootstrap
from sb3_fp16.audit.twin import SINGLE, same_random_numbers, twin_of
from sb3_fp16.buffers import Acted, RolloutBufferFP16

SEEDS = tuple(range(8))
AFTER = (2, 8, 16, 30)
"""Rollouts after which an update is compared."""
FILE = RESULTS / "fidelity.csv"

_FP16 = Precision.presets["fp16"]
_MASTERS = replace(
    _FP16, input_sharing="elementwise", hidden_sharing="elementwise", root_rounding="fp32", writeback="residual"
)

# From FP32 towards the preset, one part after the other; then other choices for its parts, and other presets.
ARMS: dict[str, tuple[str, Precision]] = {
    "another order": ("FP32, minibatches in another order", SINGLE),
    "rollout": ("FP32 on a rollout in FP16", SINGLE),
    "amp-fp16": ("and layers in FP16, FP32 weights", replace(SINGLE, compute="fp16", gradient_scaling="grad-scaler")),
    "masters": ("all storage in FP16 but FP32 carries and second moments, none shared", _MASTERS),
    "stochastic": ("and weights written back stochastically", replace(_MASTERS, writeback="stochastic")),
    "dithered roots": (
        "and second moments in FP16, dithered",
        replace(_MASTERS, writeback="stochastic", root_rounding="dithered"),
    ),
    "fp16": ("and second moments of rank one: the preset", _FP16),
    "row": ("`fp16` with rows that share", replace(_FP16, input_sharing="row", hidden_sharing="row")),
    "dithered": ("`fp16` with weights written back dithered", replace(_FP16, writeback="dithered")),
    "residual": ("`fp16` with an FP32 carry per weight", replace(_FP16, writeback="residual")),
    "nearest": ("`fp16` with weights written back to nearest", replace(_FP16, writeback="nearest")),
    "paper": ("the paper as written", Precision.presets["paper"]),
    "bf16": ("the paper in BF16", Precision.presets["bf16"]),
    "bf16-sr": ("`fp16` in BF16", Precision.presets["bf16-sr"]),
}


class _Outputs:
    """
    A policy at the observations of a rollout.

    :param model: whose policy
    :param observations: FP32, shape (samples, dimensions)
    """

    def __init__(self, model: PPOFP16, observations: Array) -> None:
        with th.no_grad():
            evaluation = model.policy.evaluate(th.from_numpy(observations))
            parameters = [x.detach().double().numpy() for x in evaluation.distribution.behaviour()]
        self.mean, self.log_std = parameters
        self.values = evaluation.values.double().numpy()

    def kl_to(self, other: "_Outputs") -> float:
        """Mean KL(this‖other)."""
        ratio = np.exp(2 * (self.log_std - other.log_std)) + ((self.mean - other.mean) / np.exp(other.log_std)) ** 2
        return float((other.log_std - self.log_std + (ratio - 1) / 2).sum(axis=-1).mean())


def rollout_for(twin: PPOFP16, rollout: RolloutBufferFP16, through: Precision | None = None) -> RolloutBufferFP16:
    """
    A rollout as the twin would have stored it, had it taken the same actions.

    :param twin: with the weights that acted
    :param rollout: in FP32, of one environment
    :param through: round to this precision's storage first
    """
    buffer = twin.rollout_buffer
    assert isinstance(buffer, RolloutBufferFP16)

    def kept(values: Array) -> Array:
        return values if through is None else values.astype(through.numpy_dtype).astype(np.float32)

    observations, actions = kept(rollout.observations), kept(rollout.actions)
    with th.no_grad():
        distribution, values = twin.policy.evaluate(th.from_numpy(observations[:, 0]))
        mean, log_std = (parameter.detach().float().numpy() for parameter in distribution.behaviour())
        log_prob = distribution.log_prob(th.from_numpy(actions[:, 0]))
        stores_parameters = twin.precision.log_ratio.startswith("residual")
        # Where stored actions are not the executed ones, c accounts for it (paper Sec. 3.2).
        correction = distribution.correction(th.from_numpy(actions[:, 0]), log_prob) if stores_parameters else None
    buffer.reset()
    for step in range(buffer.buffer_size):
        one = slice(step, step + 1)
        behaviour = (kept(mean[one]), kept(log_std)) if stores_parameters else None
        c = None if correction is None else correction[one].numpy()
        acted = Acted(values[one].numpy(), log_prob[one].numpy(), behaviour, c)
        start = rollout.episode_starts[step]
        buffer.add_step(observations[step], actions[step], rollout.rewards[step], start, acted)
    limit = twin.precision.format.max
    for name in ("values", "advantages", "returns"):
        array: Array = getattr(buffer, name)
        array[:] = buffer._rounded(kept(getattr(rollout, name)).clip(-limit, limit))
    return buffer


class BeforeUpdates(BaseCallback, ABC):
    """
    Stops a run before some of its updates, and leaves it as it was.

    :param after: rollouts after which it stops
    """

    def __init__(self, after: Sequence[int]) -> None:
        super().__init__()
        self.after, self.rollouts = after, 0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.rollouts += 1
        if self.rollouts in self.after:
            model = cast(PPO, self.model)
            # The update's learning rate: SB3 does this next.
            model._update_current_progress_remaining(model.num_timesteps, model._total_timesteps)
            with same_random_numbers():
                self.look(model)

    @abstractmethod
    def look(self, model: PPO) -> None:
        """
        Called before an update.

        :param model: with its rollout
        """


class _Compare(BeforeUpdates):
    """Compares arms."""

    def __init__(self, env_id: str, seed: int) -> None:
        super().__init__(AFTER)
        self.named = {"env": env_id, "seed": seed}
        self.rows: list[Row] = []

    def look(self, model: PPO) -> None:
        """Let every arm do the update."""
        rollout = model.rollout_buffer
        assert isinstance(rollout, RolloutBufferFP16)
        observations: Array = rollout.observations[:, 0]
        before = _Outputs(twin_of(model, SINGLE), observations)
        reference = _Outputs(_updated(model, SINGLE, rollout), observations)
        for arm, (_, precision) in ARMS.items():
            through = _FP16 if arm in ("rollout", "amp-fp16") else None
            order = 1 if arm == "another order" else 0
            after = _Outputs(_updated(model, precision, rollout, through, order), observations)
            self.rows.append(
                {**self.named, "rollouts": self.rollouts, "arm": arm, **_against(before, reference, after)}
            )


def _updated(
    model: PPO,
    precision: Precision,
    rollout: RolloutBufferFP16,
    through: Precision | None = None,
    order: int = 0,
) -> PPOFP16:
    twin = twin_of(model, precision)
    twin.policy.set_training_mode(False)
    given = rollout_for(twin, rollout, through)
    settings = twin.update_settings()
    for group in twin.policy.optimizer.param_groups:
        group["lr"] = settings.learning_rate
    np.random.seed(order)
    twin.engine.update(given, settings)
    twin.policy.set_training_mode(False)
    return twin


def _against(before: _Outputs, reference: _Outputs, after: _Outputs) -> Row:
    """How an arm's update differs from the reference's, in units of the latter."""
    due, done = (
        ((x.mean - before.mean) / np.exp(before.log_std)).reshape(-1) for x in (reference, after)
    )  # in standard deviations
    moved = reference.values - before.values
    numbers = {
        "kl": reference.kl_to(after) / before.kl_to(reference),
        "movement": float(done @ due / (due @ due)),
        "cosine": float(done @ due / np.sqrt((done @ done) * (due @ due))),
        "values": float(np.sqrt(np.mean((after.values - reference.values) ** 2) / np.mean(moved**2))),
        "update_kl": before.kl_to(reference),
    }
    return {name: float(f"{number:.5g}") for name, number in numbers.items()}


def run(env_id: str, seed: int) -> Row:
    """All comparisons along one run, as lists by arm and rollout in one row."""
    th.set_num_threads(1)
    model, callback = make_model("fp32", env_id, seed, **PAPER_SETTINGS), _Compare(env_id, seed)
    model.learn(max(AFTER) * model.n_steps, callback=callback)
    measures = ("kl", "movement", "cosine", "values", "update_kl")
    columns = {
        f"{arm} {measure}": " ".join(str(row[measure]) for row in callback.rows if row["arm"] == arm)
        for arm, measure in product(ARMS, measures)
    }
    return {**callback.named, **columns, **versions()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """
    Medians over checkpoints and runs, intervals of resampled runs, as Markdown.

    :param rows: of the results file
    """
    lines = [
        "| arm | what it is | KL from FP32's policy / KL of the update | movement | cosine | error of values |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for arm, (words, _) in ARMS.items():
        cells = []
        for measure in ("kl", "movement", "cosine", "values"):
            values = np.array([[float(x) for x in row[f"{arm} {measure}"].split()] for row in rows])
            value, low, high = bootstrap(values, np.median)
            digits = ".2g" if measure in ("kl", "values") else ".3f"
            cells.append(f"{value:{digits}} [{low:{digits}}, {high:{digits}}]")
        lines.append(f"| {arm} | {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, then print the table."""
    workers = workers_of(parser_of(__doc__).parse_args())
    wanted = [(env, seed) for seed, env in product(SEEDS, ENVS)]
    print(table(run_missing(FILE, ("env", "seed"), wanted, run, workers)))


if __name__ == "__main__":
    main()
