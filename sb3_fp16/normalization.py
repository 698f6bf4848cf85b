"""The running statistics of SB3's ``VecNormalize``, shared by ranks that train one model."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from sb3_fp16.buffers import Array

_SETTINGS = (
    "training",
    "norm_obs",
    "norm_reward",
    "clip_obs",
    "clip_reward",
    "gamma",
    "epsilon",
    "norm_obs_keys",
)


class Moments(NamedTuple):
    """
    Samples by their distances to a mean that all ranks know.

    :param samples: how many
    :param distance: sum of distances
    :param square: sum of squared distances
    """

    samples: float
    distance: Array
    square: Array


class SharedStatistics:
    """
    Lets each rank go on from the statistics of all ranks' samples.

    Between two exchanges a rank adds its own samples to the common statistics, and normalises by that. Everything is
    in FP64, as in SB3; what comes out is what one process with all environments has, to FP64 rounding.

    :param env: the training environment
    """

    def __init__(self, env: VecEnv) -> None:
        self.wrappers = list(_wrappers(env))
        self.running = [statistics for wrapper in self.wrappers for statistics in _statistics_of(wrapper)]
        self._common = self.give()

    def settings(self) -> list[dict[str, Any]]:
        """What ranks must agree in."""
        return [{name: getattr(wrapper, name) for name in _SETTINGS} for wrapper in self.wrappers]

    def give(self) -> list[RunningMeanStd]:
        """The statistics as they are, copies."""
        return [statistics.copy() for statistics in self.running]

    def take(self, common: Sequence[RunningMeanStd]) -> None:
        """
        Go on from statistics that all ranks have.

        :param common: from ``give``
        """
        for own, given in zip(self.running, common, strict=True):
            own.mean, own.var, own.count = given.mean.copy(), given.var.copy(), given.count
        self._common = self.give()

    def added(self) -> list[Moments]:
        """What this rank has added to the common statistics."""
        found = []
        for own, common in zip(self.running, self._common, strict=True):
            shift = own.mean - common.mean
            square = own.count * (own.var + np.square(shift)) - common.count * common.var
            found.append(Moments(own.count - common.count, own.count * shift, square))
        return found

    def merge(self, added: Sequence[Sequence[Moments]]) -> None:
        """
        Go on from the common statistics with what all ranks have added.

        :param added: from ``added`` of each rank; in the same order everywhere, so that all have the same bits
        """
        merged = self._common
        for common, parts in zip(merged, zip(*added, strict=True), strict=True):
            count = common.count + sum(part.samples for part in parts)
            if count == common.count:
                continue  # statistics that stand still must do so to the last bit
            shift = sum(part.distance for part in parts) / count
            square = common.count * common.var + sum(part.square for part in parts)
            common.mean, common.var, common.count = common.mean + shift, square / count - np.square(shift), count
        self.take(merged)


def _wrappers(env: VecEnv) -> Iterator[VecNormalize]:
    while isinstance(env, VecEnvWrapper):
        if isinstance(env, VecNormalize):
            yield env
        env = env.venv


def _statistics_of(wrapper: VecNormalize) -> list[RunningMeanStd]:
    of_observations: Any = getattr(wrapper, "obs_rms", {})  # none where they were never normalised
    if not isinstance(of_observations, dict):
        of_observations = {"": of_observations}
    return [*of_observations.values(), wrapper.ret_rms]
