"""
Rollout-trainer mismatch at fixed weights: how far the policy that acted is from the one that the trainer evaluates.

Both have the same weights, so that nothing but arithmetic and storage lies between them. Before an update every
log-ratio d should be 0; what it is instead is noise in PPO's ratio, and a drift of minus the KL per step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer, RolloutBufferSamples
from torch import Tensor

from sb3_fp16.audit.statistics import (
    Array,
    SequenceRow,
    SliceRow,
    StepStatistics,
    probability_slices,
    sequence_statistics,
)
from sb3_fp16.audit.twin import SINGLE, twin_of
from sb3_fp16.buffers import Minibatch, RolloutBufferFP16
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.native_plan import HEADS
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.residuals import Behaviour, GaussianBehaviour, LogitsBehaviour

HORIZONS = (1, 4, 16, 64, 256, 1024)
SLICES = 4

FORMATS = {"fp32": SINGLE, "fp16": Precision.presets["fp16"], "bf16": Precision.presets["bf16-sr"]}

MinibatchOrSamples = Minibatch | RolloutBufferSamples


@dataclass(frozen=True)
class Mismatch:
    """
    Log-ratios between a policy that acts and one that a trainer evaluates.

    :param acts: format and implementation of the first
    :param trains: of the second
    :param steps: over all steps
    :param sequences: over the first steps of episodes
    :param slices: steps by the log-probability of their action
    """

    acts: str
    trains: str
    steps: StepStatistics
    sequences: tuple[SequenceRow, ...] = ()
    slices: tuple[SliceRow, ...] = ()


class CorrectionRow(NamedTuple):
    """
    What module B's reference correction c takes away (paper Sec. 3.2): mean |d| at unchanged weights.

    :param without: mean |d̃|
    :param with_correction: mean |d̃ − c|
    """

    without: float
    with_correction: float


class Episodes(NamedTuple):
    """
    Where the steps of episodes stand in a rollout.

    :param rows: of each episode's steps in the order of ``samples_in_order``, shape (episodes, longest); −1 after them
    :param lengths: steps until the episode ended by itself, beyond ``available`` where it did not
    :param available: steps from the episode's start to the end of the rollout
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    available: np.ndarray[Any, np.dtype[np.int64]]

    def arrange(self, values: Array) -> Array:
        """
        Values per step as one row per episode, zeros after its end.

        :param values: in the order of the samples
        """
        return np.where(self.rows >= 0, values[self.rows], 0.0)


def episodes_of(rollout: RolloutBuffer) -> Episodes:
    """
    Cut a rollout at its episodes' starts; what goes on from the rollout before is left out.

    :param rollout: complete
    """
    starts = np.asarray(rollout.episode_starts, dtype=bool)
    steps, envs = starts.shape
    found: list[tuple[int, int, int]] = []
    for env in range(envs):
        bounds = [*np.flatnonzero(starts[:, env]).tolist(), steps]
        found += [(env, first, last) for first, last in pairwise(bounds)]
    longest = max((last - first for _, first, last in found), default=0)
    rows = np.full((len(found), longest), -1, dtype=np.int64)
    for row, (env, first, last) in zip(rows, found, strict=True):
        row[: last - first] = np.arange(first, last) * envs + env
    available = np.array([steps - first for _, first, _ in found], dtype=np.int64)
    ended = np.array([last < steps for _, _, last in found], dtype=bool)
    lengths = (rows >= 0).sum(axis=1)
    return Episodes(rows, np.where(ended, lengths, available + 1), available)


def samples_in_order(rollout: RolloutBuffer, batch_size: int, stride: int = 1) -> Iterator[MinibatchOrSamples]:
    """
    Minibatches that go through a rollout step by step, all environments of a step one after the other.

    :param rollout: complete
    :param batch_size: samples per minibatch
    :param stride: take every so many steps
    """
    steps, envs = rollout.buffer_size, rollout.n_envs
    rows = np.arange(0, steps * envs, stride)
    if not isinstance(rollout, RolloutBufferFP16):
        next(rollout.get(1))  # SB3 flattens its arrays when they are first asked for: one environment after the other
        rows = rows % envs * steps + rows // envs
    for start in range(0, len(rows), batch_size):
        yield rollout._get_samples(rows[start : start + batch_size])


@th.no_grad()
def as_trained(twin: PPOFP16, rollout: RolloutBuffer, most: int) -> tuple[Mismatch, CorrectionRow | None]:
    """
    Between the policy that has filled a rollout and the reference engine at the same weights.

    :param twin: with the weights that acted
    :param rollout: complete
    :param most: steps to look at
    :return: what c takes away, too, where the rollout holds one
    """
    engine = EagerEngine(twin.policy, twin.batch_size)
    twin.policy.set_training_mode(False)
    stride = -(-rollout.buffer_size * rollout.n_envs // most)
    found, uncorrected = [], []
    for batch in samples_in_order(rollout, twin.batch_size, stride):
        found.append(engine.evaluate(batch)[0])
        if isinstance(batch, Minibatch) and batch.correction is not None:
            uncorrected.append(engine.evaluate(batch._replace(correction=None))[0])
    d = _float64(th.cat(found))
    name = twin.precision.name
    mismatch = Mismatch(f"{name}, as it acted", f"{name}, torch", StepStatistics.of(d))
    if not uncorrected:
        return mismatch, None
    return mismatch, CorrectionRow(float(np.abs(_float64(th.cat(uncorrected))).mean()), float(np.abs(d).mean()))


def between_formats(model: PPOFP16, rollout: RolloutBuffer, seed: int = 0) -> list[Mismatch]:
    """
    Between implementations of the model's policy in one format, and between FP32 and 16 bits.

    For each format the weights are rounded to it once, and both sides have the same. Actions are drawn from the side
    that acts, at the observations of the rollout.

    :param model: left as it is
    :param rollout: complete
    :param seed: of the actions
    :return: none for a policy whose distribution has no parameters to compare (gSDE, or one of the user's own), or in
        a format that cannot hold its weights or activations
    """
    if type(model.policy.action_dist) not in HEADS or model.policy.overridden:
        return []
    observations = [batch.observations for batch in samples_in_order(rollout, model.batch_size)]
    episodes = episodes_of(rollout)
    largest = max(float(parameter.detach().abs().max()) for parameter in model.policy.parameters())
    fitting = {name: precision for name, precision in FORMATS.items() if largest <= precision.format.max}
    twins = {name: twin_of(model, precision) for name, precision in fitting.items()}
    measure = cast(Any, twins["fp32"].policy.action_dist)
    envs = rollout.n_envs

    def policy_of(storage: str, by: str, size: int) -> Behaviour | None:
        return _parameters(twins[storage], by, observations, size)

    implementations = ["torch"] if twins["fp32"].engine.actor is None else ["native", "torch"]
    found: list[Mismatch] = []

    def compare(acts: str, behaviour: Behaviour | None, trains: str, trainer: Behaviour | None) -> None:
        if behaviour is not None and trainer is not None:
            found.append(_mismatch(acts, trains, measure, behaviour, trainer, episodes, seed))

    single = policy_of("fp32", "torch", envs)  # as SB3 acts
    for storage, twin in twins.items():
        acts = implementations[0]
        behaviour = policy_of(storage, acts, envs)
        for trains in implementations:
            trainer = policy_of(storage, trains, twin.batch_size)
            compare(f"{storage}, {acts}", behaviour, f"{storage}, {trains}", trainer)
        if storage != "fp32" or acts != "torch":
            compare("fp32, torch", single, f"{storage}, torch", trainer)
    return found


@th.no_grad()
def _parameters(twin: PPOFP16, by: str, observations: list[Any], size: int) -> Behaviour | None:
    """The policy at all observations, evaluated so many at a time; None where its activations overflow the format."""
    policy, actor = twin.policy, twin.engine.actor
    policy.set_training_mode(False)
    whole = _concatenated(observations)
    count = len(next(iter(whole.values()))) if isinstance(whole, dict) else len(whole)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, count, size):
        batch = _rows(whole, slice(start, start + size))
        if by == "native" and actor is not None:
            acted = actor.act(batch.float().numpy(), deterministic=True)
            if acted is None or acted[1].behaviour is None:
                return None
            parts.append(tuple(map(th.from_numpy, acted[1].behaviour)))
        else:
            try:
                distribution = policy.evaluate(batch).distribution
            except ValueError:
                return None
            parts.append(tuple(parameter.clone() for parameter in distribution.behaviour()))
    outputs = th.cat([part[0] for part in parts])
    return GaussianBehaviour(outputs, parts[0][1]) if len(parts[0]) == 2 else LogitsBehaviour(outputs)


@th.no_grad()
def _mismatch(
    acts: str, trains: str, measure: Any, behaviour: Behaviour, trainer: Behaviour, episodes: Episodes, seed: int
) -> Mismatch:
    th.manual_seed(seed)  # an audit puts the generators back
    measure.proba_distribution(*behaviour)
    actions = measure.sample()
    log_prob = _float64(measure.log_prob(actions))
    measure.proba_distribution(*trainer)
    d, kl = _float64(measure.log_ratio(actions, behaviour)), _float64(measure.kl(behaviour))
    arrange = episodes.arrange
    return Mismatch(
        acts,
        trains,
        StepStatistics.of(d, kl),
        tuple(sequence_statistics(arrange(d), HORIZONS, arrange(kl), episodes.lengths, episodes.available)),
        tuple(probability_slices(d, log_prob, SLICES)),
    )


def _concatenated(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: th.cat([part[key] for part in observations]) for key in observations[0]}
    return th.cat(observations)


def _rows(observations: Any, rows: slice) -> Any:
    if isinstance(observations, dict):
        return {key: value[rows] for key, value in observations.items()}
    return observations[rows]


def _float64(values: Tensor) -> Array:
    return values.detach().double().cpu().numpy()
