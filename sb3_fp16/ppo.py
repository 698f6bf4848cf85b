"""PPOFP16: SB3's PPO whose ``train()`` hands one rollout to one engine."""

import inspect
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from sb3_fp16 import distributed, saving
from sb3_fp16.buffers import Acted, Array, RolloutBufferFP16
from sb3_fp16.engines import Engine, UpdateSettings, UpdateStats, select_engine
from sb3_fp16.policies import ActorCriticPolicyFP16, HalfPrecisionPolicy, half_precision
from sb3_fp16.precision import Precision, PrecisionReport, ReportRow
from sb3_fp16.scalars import explained_variance
from sb3_fp16.sharp import SHARP, state_scale_for

if TYPE_CHECKING:
    from sb3_fp16.learners import Learner

SelfPPOFP16 = TypeVar("SelfPPOFP16", bound="PPOFP16")

_QUIET: dict[str, Any] = {"verbose": 0, "tensorboard_log": None}
"""Arguments that ranks above 0 have in place of those given, so that one alone prints and logs."""


class PPOFP16(PPO):
    """
    Proximal Policy Optimization trained natively in half precision.

    Takes all arguments of SB3's ``PPO`` in their order, and:

    :param precision: number format and protections, the name of one of ``Precision.presets`` or a ``Precision``
    :raises ValueError: for an unknown precision, naming the valid ones
    """

    policy: HalfPrecisionPolicy
    _learner: "Learner | None"  # what this rank is to the others; None in a process that trains alone

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        *args: Any,
        precision: str | Precision | Mapping[str, Any] = "fp16",
        **kwargs: Any,
    ) -> None:
        self.precision_settings = Precision.of(precision).to_dict()  # plain, for files read without sb3_fp16
        if distributed.rank() > 0:
            given = inspect.signature(PPO.__init__).bind(self, policy, env, *args, **kwargs)
            given.arguments.update(_QUIET)
            _, policy, env, *args = given.args  # type: ignore[assignment]
            kwargs = given.kwargs
        super().__init__(policy, env, *args, **kwargs)

    @property
    def precision(self) -> Precision:
        """Number format and protections."""
        return Precision.of(self.precision_settings)

    def _setup_model(self) -> None:
        if "precision" in self.policy_kwargs or "precision" in self.rollout_buffer_kwargs:
            raise ValueError("Pass precision to PPOFP16 itself; policy and rollout buffer follow it.")
        self.sb3_fp16_format = saving.FORMAT
        self._learner = None
        given = {name: getattr(self, name) for name in ("policy_class", "policy_kwargs", "rollout_buffer_kwargs")}
        # SB3 builds the half-precision forms, but what the user gave stays in place: a saved model names SB3's classes.
        self.policy_class = half_precision(self.policy_class)
        self.policy_kwargs = {**self.policy_kwargs, "precision": self.precision}
        stock_buffer = DictRolloutBuffer if isinstance(self.observation_space, spaces.Dict) else RolloutBuffer
        given["rollout_buffer_class"] = self.rollout_buffer_class or stock_buffer
        if given["rollout_buffer_class"] in (RolloutBuffer, DictRolloutBuffer):
            self.rollout_buffer_class = RolloutBufferFP16
        if issubclass(cast(type[RolloutBuffer], self.rollout_buffer_class), RolloutBufferFP16):
            self.rollout_buffer_kwargs = {**self.rollout_buffer_kwargs, "precision": self.precision}
        try:
            super()._setup_model()
        finally:
            vars(self).update(given)
        self._original_policy.complete()
        self.update_settings()  # unusable ones are named here, not after the first rollout
        if isinstance(self.policy.optimizer, SHARP):
            for group in self.policy.optimizer.param_groups:
                group["state_scale"] = state_scale_for(self.max_grad_norm) if self.precision.has_short_exponent else 1.0
        self._engine: Engine | None = None
        engine = self.engine
        if self.verbose >= 1:
            print(f"Using precision {self.precision.name} and the {engine.name} engine ({engine.reason})")
            if not self.precision.log_ratio.startswith("absolute") and self.policy.absolute_because is not None:
                print(f"The log-ratio is absolute, in FP32: {self.policy.absolute_because}")

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        # The last rollout may overshoot total_timesteps; schedules that end at 0 must not go on below.
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        self._current_progress_remaining = max(0.0, self._current_progress_remaining)

    def _maybe_recommend_cpu(self, mlp_class_name: str = ActorCriticPolicyFP16.__name__) -> None:
        super()._maybe_recommend_cpu(mlp_class_name)

    @property
    def _original_policy(self) -> HalfPrecisionPolicy:
        """The policy behind one that ``torch.compile`` wraps, which names its weights otherwise (SB3 issue 2137)."""
        return cast(HalfPrecisionPolicy, getattr(self.policy, "_orig_mod", self.policy))

    @property
    def engine(self) -> Engine:
        """What runs the updates of the current policy."""
        policy, engine = self._original_policy, self._engine
        if engine is None or engine.policy is not policy or engine.optimizer is not policy.optimizer:
            self.use_engine(engine := select_engine(policy, self.batch_size))
        return engine

    def use_engine(self, engine: Engine) -> None:
        """
        Choose how updates run, for comparisons; by default the fastest engine that serves the policy.

        :param engine: made for this model's policy
        """
        self._engine = engine
        engine.policy.actor = engine.actor

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """
        SB3's own, or the same without tensors where the engine acts for the policy.

        :param env: to step
        :param callback: called as SB3 calls it, with SB3's local variables
        :param rollout_buffer: to fill
        :param n_rollout_steps: of each environment
        :return: false if the callback has ended training, of any rank where several train
        :raises ValueError: for observations, actions and rewards that are not finite
        """
        goes_on = self._collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        return goes_on if self._learner is None else self._learner.after_rollout(goes_on)

    def _collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        actor = self._original_policy.actor = self.engine.actor
        if actor is None or self.use_sde or self.policy is not self._original_policy:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        if not isinstance(rollout_buffer, RolloutBufferFP16) or type(rollout_buffer).add is not RolloutBufferFP16.add:
            return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
        return self._collect(env, callback, rollout_buffer, n_rollout_steps)

    def _collect(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBufferFP16, n_rollout_steps: int
    ) -> bool:
        """The loop of SB3's ``collect_rollouts``."""
        assert self._last_obs is not None, "No previous observation was provided"
        self.policy.set_training_mode(False)
        if self.policy.actor is not None:
            self.policy.actor.look()
        rollout_buffer.reset()
        callback.on_rollout_start()
        box = self.action_space if isinstance(self.action_space, spaces.Box) else None
        is_discrete = isinstance(self.action_space, spaces.Discrete)
        n_steps = 0
        while n_steps < n_rollout_steps:
            obs = cast(Array, self._last_obs)
            obs_tensor = th.as_tensor(obs)
            actor = self.policy.actor  # of the policy as it is now
            actions, acted = (actor and actor.act(obs)) or self._act_on_torch(obs_tensor)
            values, log_probs = th.from_numpy(acted.value), th.from_numpy(acted.log_prob)
            clipped_actions = actions if box is None else np.minimum(np.maximum(actions, box.low), box.high)
            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self.num_timesteps += env.num_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer(infos, dones)
            n_steps += 1
            if is_discrete:
                actions = actions.reshape(-1, 1)
            if any(dones):
                self._bootstrap_truncated(rewards, dones, infos)
            rollout_buffer.add_step(self._last_obs, actions, rewards, cast(Array, self._last_episode_starts), acted)
            self._last_obs, self._last_episode_starts = cast(Array, new_obs), dones
        with th.no_grad():
            values = self.policy.predict_values(th.as_tensor(self._last_obs))
        rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    @th.no_grad()
    def _act_on_torch(self, obs: Tensor) -> tuple[Array, Acted]:
        actions, values, log_prob = self.policy(obs)
        return actions.numpy(), Acted.of(values, log_prob)

    @th.no_grad()
    def _bootstrap_truncated(self, rewards: Array, dones: Array, infos: list[dict[str, Any]]) -> None:
        """Add the value of the state in which an episode ran out of time (SB3 issue 633)."""
        for idx, done in enumerate(dones):
            info = infos[idx]
            if done and info.get("terminal_observation") is not None and info.get("TimeLimit.truncated", False):
                terminal_obs, _ = self.policy.obs_to_tensor(info["terminal_observation"])
                rewards[idx] += self.gamma * float(self.policy.predict_values(terminal_obs)[0])

    def train(self) -> None:
        """
        Update the policy on the collected rollout.

        :raises ValueError: if a schedule gives an unusable value, or training cannot recover from gradients that are
            not finite; the parameters are the last good ones then
        """
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        settings = self.update_settings()
        stats = self.engine.update(self.rollout_buffer, settings)
        self._n_updates += stats.epochs
        if stats.stopped_at_kl is not None and self.verbose >= 1:
            print(f"Early stopping at step {stats.epochs - 1} due to reaching max kl: {stats.stopped_at_kl:.2f}")
        self._log_update(stats, settings)

    def update_settings(self, progress: float | None = None) -> UpdateSettings:
        """
        Hyperparameters of an update, schedules resolved.

        :param progress: what remains of training, from 1 to 0; by default now
        """
        progress = self._current_progress_remaining if progress is None else progress
        return UpdateSettings(
            learning_rate=self.lr_schedule(progress),
            batch_size=self.batch_size,
            n_epochs=self.n_epochs,
            clip_range=self.clip_range(progress),  # type: ignore[operator]
            clip_range_vf=None if self.clip_range_vf is None else self.clip_range_vf(progress),  # type: ignore[operator]
            normalize_advantage=self.normalize_advantage,
            ent_coef=self.ent_coef,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm,
            target_kl=self.target_kl,
        )

    def _log_update(self, stats: UpdateStats, settings: UpdateSettings) -> None:
        record, buffer = self.logger.record, self.rollout_buffer
        record("train/entropy_loss", stats.entropy_loss)
        record("train/policy_gradient_loss", stats.policy_loss)
        record("train/value_loss", stats.value_loss)
        record("train/approx_kl", stats.approx_kl)
        record("train/clip_fraction", stats.clip_fraction)
        record("train/loss", stats.loss)
        values, returns = (th.from_numpy(x.astype(np.float32)) for x in (buffer.values, buffer.returns))
        stored = sum(buffer.saturated.values()) if isinstance(buffer, RolloutBufferFP16) else 0
        if self._learner is None:
            explained = explained_variance(values, returns)
        else:
            explained, stored = self._learner.of_all(values, returns, stored)
        record("train/explained_variance", explained)
        if hasattr(self.policy, "log_std"):
            record("train/std", self.policy.log_std.float().exp().mean().item())
        record("train/n_updates", self._n_updates, exclude="tensorboard")
        record("train/clip_range", settings.clip_range)
        if settings.clip_range_vf is not None:
            record("train/clip_range_vf", settings.clip_range_vf)
        record("train/grad_norm", stats.grad_norm)
        record("train/loss_scale", stats.loss_scale)
        record("train/skipped_steps", stats.skipped_steps)
        record("train/stuck_fraction", stats.stuck_fraction)
        record("train/saturated", stats.saturated + stored)

    def learn(
        self: SelfPPOFP16,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PPOFP16",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfPPOFP16:
        """Train; arguments and result are SB3's."""
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        group, self._learner = distributed.current(), None
        if group is not None:
            from sb3_fp16.learners import Learner  # which no process that is alone needs

            self._learner = Learner(self, group)
            self._learner.start(total_timesteps=total_timesteps, reset_num_timesteps=reset_num_timesteps)
            if group.rank > 0:
                vars(self).update(_QUIET)  # a model made before the ranks met has its own
                self.set_logger(Logger(None, []))
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        if self._learner is not None:
            callback, progress_bar = self._learner.with_users(callback, progress_bar), False
        return super()._init_callback(callback, progress_bar)

    def precision_report(self) -> PrecisionReport:
        """
        Count what the model stores between updates, by format (paper Sec. 3: FP32 below 0.1 % of the elements).

        :return: a report; ``print`` shows it as a table
        """
        parameters = list(self.policy.parameters())
        optimizer, buffer = self.policy.optimizer, self.rollout_buffer
        if isinstance(optimizer, SHARP):
            optimizer.initialize_state()
        moments: dict[str, list[th.Tensor]] = {}
        for state in optimizer.state.values():
            for name, value in state.items():
                moments.setdefault(name, []).append(th.as_tensor(value))
        if isinstance(buffer, RolloutBufferFP16):
            arrays = list(buffer.arrays().values())
        else:
            arrays = [array for array in vars(buffer).values() if isinstance(array, np.ndarray)]
        rows = [
            ReportRow.of("parameters", parameters),
            # of the same number and format as the parameters, where they are kept
            ReportRow.of("gradients", parameters if self.engine.keeps_gradients else []),
            *(ReportRow.of(f"optimizer {name}", tensors) for name, tensors in moments.items()),
            ReportRow.of_arrays("rollout", arrays),
            ReportRow.of("GAE recurrence", [th.zeros(self.n_envs)]),
            ReportRow.of("gradient scales", list(self.engine.state_dict().values())),
        ]
        workspace = [ReportRow(name, n, 4 * n, n) for name, n in self.engine.workspace().items()]
        return PrecisionReport(self.precision.name, tuple(rows), tuple(workspace))

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """
        A copy of the policy's and the optimizer's state that SB3's ``PPO.set_parameters`` takes as well.

        :return: FP32 weights under ``policy``; under ``policy.optimizer`` Adam's state in place of SHARP's, with
            SHARP's own and the gradient scales in an extra entry
        """
        parameters = super().get_parameters()
        extra = {"engine": self.engine.state_dict(), "precision": self.precision.to_dict()}
        as_adam = self.policy.optimizer_class is th.optim.Adam
        return {
            "policy": saving.upcast(parameters["policy"]),
            "policy.optimizer": saving.portable_optimizer_state(self.policy.optimizer, as_adam, extra),
        }

    def set_parameters(
        self,
        load_path_or_dict: str | dict[str, Any],
        exact_match: bool = True,
        device: th.device | str = "auto",
    ) -> None:
        """
        Take over parameters of a PPOFP16 or of SB3's PPO, rounding them to storage.

        :param load_path_or_dict: a saved model, or what ``get_parameters`` of either gave
        :param exact_match: whether policy and optimizer must both be there, and complete
        :param device: to load a saved model to
        :raises ValueError: for a weight beyond the format's range, or a file that is damaged or not PPO's
        """
        if isinstance(load_path_or_dict, dict):
            parameters: dict[str, Any] = dict(load_path_or_dict)
        else:
            saving.check_file(load_path_or_dict)
            parameters = load_from_zip_file(load_path_or_dict, device=device, load_data=False)[1]
        saved = parameters.get("policy.optimizer")
        if saved is not None:
            parameters["policy.optimizer"] = saving.own_optimizer_state(saved, self.policy.optimizer)
        policy, self.policy = self.policy, self._original_policy
        try:
            super().set_parameters(parameters, exact_match, device)
        finally:
            self.policy = policy
        if saved is not None and self.precision.optimizer != "adam":
            saving.keep_formats(parameters["policy.optimizer"], self.policy.optimizer)
        extra = (saved or {}).get(saving.ENTRY, {})
        same_precision = extra.get("precision") == self.precision_settings  # else its gradient scales may not fit
        if same_precision and saving.layout(extra["engine"]) == saving.layout(self.engine.state_dict()):
            self.engine.load_state_dict(extra["engine"])

    def save(
        self,
        path: saving.Path,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """
        Save to a file that SB3's ``PPO.load`` reads too, also where sb3_fp16 is not installed.

        An existing file is replaced once the new one is complete. A warning tells if the model refers to classes of
        sb3_fp16, so that loading needs it. Where several ranks train, rank 0 writes files; others do nothing, but for
        file objects.

        :param path: as SB3 takes it
        :param exclude: names of attributes to leave out
        :param include: names of attributes to save that otherwise are not
        """
        if distributed.rank() > 0 and isinstance(path, (str, Path)):
            return
        exclude, include = set(exclude or ()), set(include or ())
        referring = {"policy_class", "policy_kwargs", "rollout_buffer_class", "rollout_buffer_kwargs"}
        saving.warn_if_only_for_us({name: vars(self).get(name) for name in sorted(referring - exclude | include)})
        with saving.replacing(path) as file:
            super().save(file, exclude, include)

    @classmethod
    def load(
        cls: type[SelfPPOFP16],
        path: saving.Path,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        *,
        precision: str | Precision | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> SelfPPOFP16:
        """
        Load a model that PPOFP16 or SB3's PPO saved; other arguments are SB3's.

        :param precision: in place of the saved one; for a model of SB3's PPO ``fp16`` by default
        :raises ValueError: for a file that is damaged, not PPO's or newer than this package, and for a weight beyond
            the format's range
        """
        saving.check_file(path)
        if precision is not None:
            kwargs["precision_settings"] = Precision.of(precision).to_dict()
        if distributed.rank() > 0:
            custom_objects = {**(custom_objects or {}), **_QUIET}
            kwargs.update(_QUIET)
        try:
            return super().load(path, env, device, custom_objects, print_system_info, force_reset, **kwargs)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{path} is damaged: an entry in it holds no weights.") from error

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_engine", "_learner"]


def _signature() -> inspect.Signature:
    """SB3's own arguments, then ``precision``: what help(), editors and tests see."""
    own = inspect.signature(PPOFP16.__init__).parameters["precision"]
    return inspect.Signature([*inspect.signature(PPO.__init__).parameters.values(), own])


PPOFP16.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
