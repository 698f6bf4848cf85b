"""What PPOFP16 does as one rank among several, beside updates: how ranks start alike, count steps, share episodes."""

import io
import random
import zlib
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    ProgressBarCallback,
)
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import set_random_seed
from torch import Tensor

from sb3_fp16.distributed import Group
from sb3_fp16.engines import select_engine
from sb3_fp16.engines.parallel import ParallelEngine, agree
from sb3_fp16.normalization import Moments, SharedStatistics

_OUTPUT = (EvalCallback, CheckpointCallback, ProgressBarCallback)  # callbacks that print, log or save, and no more
_SETTINGS = ("n_steps", "gamma", "gae_lambda", "observation_space", "action_space", "use_sde", "sde_sample_freq")
_COUNTERS = ("num_timesteps", "_n_updates", "_current_progress_remaining")
_OWN = ("params", "lr", "initial_lr", "seed")  # of a parameter group: its rate follows a schedule, its seed is rank 0's


class _Rollout(NamedTuple):
    """What a rank says of its rollout."""

    goes_on: bool
    timesteps: int
    episodes: list[Any]
    successes: list[Any]
    statistics: list[Moments]


class Learner(BaseCallback):
    """
    This rank of a model that several train, for one call of ``learn``; the first of its callbacks.

    :param model: this rank's PPOFP16
    :param group: all ranks
    """

    model: Any  # a room above this one

    def __init__(self, model: Any, group: Group) -> None:
        super().__init__()
        self.model, self.group = model, group
        self.statistics = SharedStatistics(model.env)
        self._envs: list[int] = []  # of each rank
        self._episodes: list[Any] = []
        self._successes: list[Any] = []

    def start(self, **arguments: Any) -> None:
        """
        Make all ranks alike: parameters, optimizer state, gradient scales, counters and statistics are rank 0's.

        :param arguments: of ``learn``, that ranks must agree in
        :raises ValueError: if a rank trains another model or by other settings, naming the difference
        """
        model = self.model
        self.group.meet()
        agree(self.group.gather({**self._description(), **arguments}))
        if not isinstance(model.engine, ParallelEngine):  # it was made before the ranks met
            engine = select_engine(model.engine.policy, model.batch_size)
            engine.load_state_dict(model.engine.state_dict())
            model.use_engine(engine)
        engine = cast(ParallelEngine, model.engine)
        engine.check_rollout(model.rollout_buffer)
        self._envs = self.group.gather(model.n_envs)
        self._differ_in_seeds()
        self._start_alike(engine)

    def _description(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        model, optimizer = self.model, self.model.policy.optimizer
        precision = model.precision.name
        groups = [{name: x for name, x in group.items() if name not in _OWN} for group in optimizer.param_groups]
        return {
            "torch": th.__version__,
            "precision": model.precision_settings if precision == "custom" else precision,
            "device": model.device.type,
            **{name: getattr(model, name) for name in _SETTINGS},
            **{f"at progress {1 - left:g}": model.update_settings(left) for left in (1.0, 0.5, 0.0)},
            "VecNormalize": self.statistics.settings(),
            **{
                f"parameter {name}": (tuple(p.shape), p.dtype, "trained" if p.requires_grad else "frozen")
                for name, p in model.policy.named_parameters()
            },
            "optimizer": (type(optimizer).__name__, groups),
        }

    def _differ_in_seeds(self) -> None:
        """
        Give ranks that a script has seeded alike seeds of their own; rank 0 keeps its.

        Environments are numbered through all ranks, so that each is seeded as one process with all would seed it.
        """
        env: Any = self.model.env.unwrapped
        pending = {seed for seed in getattr(env, "_seeds", ()) if seed is not None}  # SB3 hands them to the next reset
        mine = pending, _traits_of_generators()
        below = self.group.gather(mine)[: self.group.rank]
        if any(pending & theirs for theirs, _ in below):
            env.seed(min(pending) + sum(self._envs[: self.group.rank]))
        if any(a == b for _, theirs in below for a, b in zip(theirs, mine[1], strict=True)):
            entropy = [th.initial_seed() & 0xFFFFFFFF, self.group.rank]
            set_random_seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))

    def _start_alike(self, engine: ParallelEngine) -> None:
        model, file = self.model, io.BytesIO()
        if self.group.rank == 0:
            th.save({"parameters": model.get_parameters(), "engine": engine.state_dict()}, file)
        counters = {name: getattr(model, name) for name in _COUNTERS}
        state, counters, statistics = self.group.broadcast((file.getvalue(), counters, self.statistics.give()))
        if self.group.rank > 0:
            given = th.load(io.BytesIO(state), map_location="cpu", weights_only=True)
            model.set_parameters(given["parameters"], device=model.device)
            engine.load_state_dict(given["engine"])
            vars(model).update(counters)
        self.statistics.take(statistics)
        engine.check_identical()

    def with_users(self, callback: MaybeCallback, progress_bar: bool) -> list[BaseCallback]:
        """
        The callbacks of this rank; on others than rank 0 without those that print, log or save and do no more.

        :param callback: the user's
        :param progress_bar: whether one is wanted
        """
        given = callback if isinstance(callback, list) else [callback]
        users = [one if isinstance(one, BaseCallback) else ConvertCallback(one) for one in given]
        return [self, *self._for_this_rank([*users, *([_ProgressBar()] if progress_bar else [])])]

    def _for_this_rank(self, callbacks: list[BaseCallback]) -> list[BaseCallback]:
        if self.group.rank == 0:
            return callbacks
        kept: list[BaseCallback] = []
        for callback in callbacks:
            if type(callback) is CallbackList:
                kept.append(CallbackList(self._for_this_rank(callback.callbacks)))
            elif not getattr(callback, "only_on_rank_zero", isinstance(callback, _OUTPUT)):
                kept.append(callback)
        return kept

    def _on_step(self) -> bool:
        """Count the steps that others make meanwhile, and note what their logs are to know."""
        others = sum(self._envs) - self._envs[self.group.rank]
        self.model.num_timesteps += others
        self.num_timesteps += others
        for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True):
            if info.get("episode") is not None:
                self._episodes.append(info["episode"])
            if done and info.get("is_success") is not None:
                self._successes.append(info["is_success"])
        return True

    def after_rollout(self, goes_on: bool) -> bool:
        """
        Exchange episodes, for the logs, statistics of ``VecNormalize``, and whether to go on.

        :param goes_on: false where a callback of this rank has ended training
        :return: false if a callback of any rank has
        :raises LostRankError: if a rank has ended or does not answer in time
        """
        model = self.model
        mine = _Rollout(goes_on, model.num_timesteps, self._episodes, self._successes, self.statistics.added())
        rollouts: list[_Rollout] = self.group.gather(mine)
        self._episodes, self._successes = [], []
        for rollout in rollouts[: self.group.rank] + rollouts[self.group.rank + 1 :]:  # own episodes are there
            model.ep_info_buffer.extend(rollout.episodes)
            model.ep_success_buffer.extend(rollout.successes)
        self.statistics.merge([rollout.statistics for rollout in rollouts])
        model.num_timesteps = max(rollout.timesteps for rollout in rollouts)
        return all(rollout.goes_on for rollout in rollouts)

    def of_all(self, values: Tensor, returns: Tensor, saturated: int) -> tuple[float, int]:
        """
        Explained variance (``scalars.explained_variance``) and saturated numbers of all ranks' rollouts.

        :param values: of this rank's, any shape
        :param returns: same shape
        :param saturated: in this rank's
        """
        parts = self.group.gather((_spread(returns), _spread(returns - values), saturated))
        total, left, counts = zip(*parts, strict=True)
        square = _joint_square(total)
        return float("nan") if square == 0 else 1 - _joint_square(left) / square, sum(counts)


class _ProgressBar(ProgressBarCallback):
    """Shows the steps of all ranks."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._shown = self.model.num_timesteps

    def _on_step(self) -> bool:
        self.pbar.update(self.model.num_timesteps - self._shown)
        self._shown = self.model.num_timesteps
        return True


def _traits_of_generators() -> list[int]:
    """Of torch's, NumPy's and Python's; the same where they were seeded alike, and the latter have drawn as often."""
    _, words, position, *_ = cast("tuple[Any, ...]", np.random.get_state())
    return [th.initial_seed(), zlib.crc32(words.tobytes(), position), zlib.crc32(repr(random.getstate()).encode())]


def _spread(values: Tensor) -> tuple[int, float, float]:
    """Number, mean, and sum of squared distances to it, in FP32."""
    mean = values.mean()
    return values.numel(), float(mean), float((values - mean).square().sum())


def _joint_square(parts: tuple[tuple[int, float, float], ...]) -> float:
    """Sum of squared distances to the mean of all."""
    mean = sum(count * own for count, own, _ in parts) / sum(count for count, _, _ in parts)
    return sum(square + count * (own - mean) ** 2 for count, own, square in parts)
