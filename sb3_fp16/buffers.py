"""The rollout in 16 bits, and generalized advantage estimation with one FP32 recurrence state per environment."""

import math
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from sb3_fp16.precision import Precision
from sb3_fp16.residuals import Behaviour, GaussianBehaviour, LogitsBehaviour, behaviour_of
from sb3_fp16.rounding import check_finite

try:
    from sb3_fp16 import _cpu

    _ISA: str | None = _cpu.best()
except ImportError:  # no compiler where the package was installed
    _ISA = None

Array = np.ndarray[Any, np.dtype[Any]]


class Acted(NamedTuple):
    """
    What a policy knows of the actions of one step.

    :param value: V, shape (envs, 1)
    :param log_prob: FP32, shape (envs,)
    :param behaviour: parameters that the actions were sampled with, in the order of their ``Behaviour``; None where
        the log-probability serves
    :param correction: c (paper Sec. 3.2), shape (envs,); None where it is 0
    """

    value: Array
    log_prob: Array
    behaviour: tuple[Array, ...] | None
    correction: Array | None

    @classmethod
    def of(cls, value: Tensor, log_prob: Tensor) -> "Acted":
        """
        From what ``HalfPrecisionPolicy.forward`` returned.

        :param value: shape (envs, 1)
        :param log_prob: shape (envs,); may carry the behaviour policy's parameters
        """
        behaviour, correction = behaviour_of(log_prob)
        return cls(
            _numpy(value),
            _numpy(log_prob),
            None if behaviour is None else tuple(map(_numpy, behaviour)),
            None if correction is None else _numpy(correction),
        )


class Minibatch(NamedTuple):
    """
    Samples of a rollout; the first six fields are SB3's.

    :param observations: shape (batch, \\*obs), or a dictionary of such
    :param actions: shape (batch, \\*action), FP32, as SB3 gives them
    :param old_values: V of the behaviour policy, shape (batch,)
    :param old_log_prob: FP32 log π₀(a|s), shape (batch,); None where ``behaviour`` takes its place
    :param advantages: shape (batch,)
    :param returns: shape (batch,)
    :param behaviour: parameters of the behaviour policy; None where only log-probabilities are stored
    :param correction: c, what storage changed in log π₀(a|s) (paper Sec. 3.2), shape (batch,); None where it is 0
    """

    observations: Any
    actions: Tensor
    old_values: Tensor
    old_log_prob: Tensor | None
    advantages: Tensor
    returns: Tensor
    behaviour: Behaviour | None
    correction: Tensor | None


class RolloutBufferFP16(RolloutBuffer):
    """
    SB3's rollout buffer in the storage format of a precision.

    Rewards, values, advantages, returns, float observations and actions, and the behaviour policy's parameters are
    16-bit; integer observations and actions keep their type. Arrays stay shaped (n_steps, n_envs, ...) throughout.

    Takes SB3's arguments, and:

    :param precision: number format and protections, a preset's name or a ``Precision``
    """

    observations: Any
    """An array, or one per key of a dictionary observation."""
    behaviour: tuple[Array, ...] | None
    """Parameters of the behaviour policy, arrays in the order of its ``Behaviour``; made at the first step."""
    log_probs: Array | None  # type: ignore[assignment]
    """FP32 log π₀(a|s), where the behaviour policy's parameters are not stored."""
    corrections: Array | None
    """c, where stored and executed actions differ."""
    _log_std: Array | None  # of the last step
    _recorder: "_cpu.Recorder | None"

    def __init__(self, *args: Any, precision: str | Precision | Mapping[str, Any] = "fp16", **kwargs: Any) -> None:
        self.precision = Precision.of(precision)
        self.saturated = dict.fromkeys(("observations", "actions", "rewards", "values", "returns"), 0)
        """Values of the current rollout that exceeded the format's range and were stored at its bound."""
        super().__init__(*args, **kwargs)
        for name in ("gamma", "gae_lambda"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r}; expected a finite number.")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorder": None}  # which refers to memory; copies do without until they make their own

    def reset(self) -> None:
        """Empty the buffer."""
        steps, kind = (self.buffer_size, self.n_envs), self.precision.numpy_dtype
        if isinstance(self.observation_space, spaces.Dict):
            self.observations = {
                key: np.zeros((*steps, *cast(Any, self.obs_shape)[key]), dtype=self._storage_dtype(space))
                for key, space in self.observation_space.spaces.items()
            }
        else:
            self.observations = np.zeros((*steps, *self.obs_shape), dtype=self._storage_dtype(self.observation_space))
        self.actions = np.zeros((*steps, self.action_dim), dtype=self._storage_dtype(self.action_space))
        self.rewards, self.values, self.advantages, self.returns = (np.zeros(steps, dtype=kind) for _ in range(4))
        self.episode_starts = np.zeros(steps, dtype=bool)
        self.log_probs = self.corrections = self.behaviour = None
        self._recorder = self._log_std = None
        self._recorded: tuple[Any, ...] = self._step_arrays()
        self.saturated = dict.fromkeys(self.saturated, 0)
        self.pos, self.full, self.generator_ready = 0, False, False

    def _storage_dtype(self, space: spaces.Space[Any]) -> np.dtype[Any]:
        dtype = np.dtype(space.dtype)
        return self.precision.numpy_dtype if dtype.kind == "f" else dtype

    def _rounded(self, values: Array) -> Array:
        """FP32 values in storage format; beyond its range infinite."""
        kind = self.precision.format
        if not kind.is_native:
            values = kind.round(th.from_numpy(np.ascontiguousarray(values))).numpy()
        return values.astype(self.precision.numpy_dtype, copy=False)

    def add(
        self, obs: Any, action: Array, reward: Array, episode_start: Array, value: Tensor, log_prob: Tensor
    ) -> None:
        """
        Store one step of all environments.

        :param obs: shape (envs, \\*obs), or a dictionary of such
        :param action: as executed, shape (envs, \\*action)
        :param reward: shape (envs,)
        :param episode_start: shape (envs,)
        :param value: shape (envs, 1)
        :param log_prob: shape (envs,); may carry the behaviour policy's parameters
        :raises ValueError: for an observation, action or reward that is not finite, naming its environment
        """
        self.add_step(obs, action, reward, episode_start, Acted.of(value, log_prob))

    def add_step(self, obs: Any, action: Array, reward: Array, episode_start: Array, acted: Acted) -> None:
        """
        ``add`` without tensors.

        :param obs: see ``add``, as the next three
        :param action: as executed
        :param reward: per environment
        :param episode_start: per environment
        :param acted: what the policy knows of the action
        :raises ValueError: as ``add``
        """
        if self.pos == 0:
            self._allocate(acted)
        if not self._record(obs, action, reward, episode_start, acted):
            self._add_step(obs, action, reward, episode_start, acted)
        self.pos += 1
        self.full = self.pos == self.buffer_size

    def _record(self, obs: Any, action: Array, reward: Array, episode_start: Array, acted: Acted) -> bool:
        """The usual step in one native call; false where it is not usual, and nothing counts as stored."""
        behaviour = acted.behaviour or (None,)
        was = self._recorded
        if was[0] is not self.observations or was[1] is not self.actions or was[2] is not self.rewards:
            self._make_recorder()  # a callback has replaced an array
        elif was[3] is not self.values or was[4] is not self.episode_starts or was[5] is not self.log_probs:
            self._make_recorder()
        if self._recorder is None:
            return False
        log_std = behaviour[-1] if len(behaviour) == 2 else self._log_std
        if log_std is not self._log_std and not np.array_equal(cast(Array, log_std), cast(Array, self._log_std)):
            return False
        counts = self._recorder.record(
            self.pos,
            [obs, action, reward, acted.value, episode_start, acted.log_prob, behaviour[0], acted.correction],
        )
        if counts is None:
            return False
        if any(counts[:4]):
            for kind, count in zip(("observations", "actions", "rewards", "values"), counts, strict=False):
                self.saturated[kind] += count
        return True

    def _add_step(self, obs: Any, action: Array, reward: Array, episode_start: Array, acted: Acted) -> None:
        if isinstance(self.observations, dict):
            for key, array in self.observations.items():
                self._store(array, obs[key], "observations", f"observation[{key!r}]")
        else:
            self._store(self.observations, obs, "observations", "observation")
        self._store(self.actions, action, "actions", "action")
        self._store(self.rewards, reward, "rewards", "reward")
        self._store(self.values, acted.value, "values", "value")
        self.episode_starts[self.pos] = episode_start
        if self.log_probs is not None:
            self.log_probs[self.pos] = acted.log_prob.flatten()
        if self.behaviour is not None and acted.behaviour is not None:
            self.behaviour = tuple(map(self._store_behaviour, self.behaviour, acted.behaviour))
            self._log_std = acted.behaviour[1] if len(acted.behaviour) == 2 else None
            self._make_recorder()
        if self.corrections is not None and acted.correction is not None:
            self.corrections[self.pos] = self._rounded(acted.correction)

    def _allocate(self, acted: Acted) -> None:
        """Make room for what describes the behaviour policy of this rollout."""
        steps, kind = (self.buffer_size, self.n_envs), self.precision.numpy_dtype
        if acted.behaviour is None:
            stored = self.precision.log_ratio == "absolute-stored"
            self.log_probs = np.zeros(steps, dtype=kind if stored else np.float32)
        else:
            # A Gaussian's log_std that does not depend on the state is the same for the whole rollout: one copy serves.
            self.behaviour = tuple(
                np.zeros((*steps, x.shape[1]), dtype=kind) if x.ndim == 2 else x.astype(kind) for x in acted.behaviour
            )
            self._log_std = acted.behaviour[1] if len(acted.behaviour) == 2 else None
            if acted.correction is not None:
                self.corrections = np.zeros(steps, dtype=kind)
        self._make_recorder()

    def _make_recorder(self) -> None:
        """For rollouts of arrays; one with log_std per step is stored in Python."""
        behaviour = self.behaviour or (None,)
        usual = isinstance(self.observations, np.ndarray) and all(x is None or x.ndim != 3 for x in behaviour[1:])
        self._recorded = self._step_arrays()
        self._recorder = None
        if _ISA is not None and usual and all(x is None or x.flags.c_contiguous for x in self._recorded):
            arrays = [*self._recorded, behaviour[0], self.corrections]
            self._recorder = _cpu.Recorder(_ISA, self.precision.storage, arrays)

    def _step_arrays(self) -> tuple[Any, ...]:
        """What a step is stored in and a callback may replace, in the order of the recorder's arguments."""
        return self.observations, self.actions, self.rewards, self.values, self.episode_starts, self.log_probs

    def _store_behaviour(self, array: Array, parameter: Array) -> Array:
        values = self._rounded(parameter)
        if array.ndim == 1 and not np.array_equal(array, values):  # a callback has changed log_std within the rollout
            array = np.broadcast_to(array, (self.buffer_size, self.n_envs, len(array))).copy()
        if array.ndim == 3:
            array[self.pos] = values
        return array

    def _store(self, array: Array, values: Any, kind: str, name: str) -> None:
        """Round one step of values into its array, saturating; numbers that training cannot use are refused."""
        given = np.asarray(values).reshape(array.shape[1:])
        if array.dtype != self.precision.numpy_dtype:
            array[self.pos] = given
            return
        with np.errstate(over="ignore"):
            values = given.astype(np.float32)  # via FP32 like the policy's own input, so that both round alike
        limit = self.precision.format.max
        if not np.abs(values).max() < limit:
            if kind != "values" or np.isnan(given).any():  # a value beyond FP16 reads as infinite
                check_finite(th.from_numpy(given), name)
            self.saturated[kind] += int((np.abs(values) >= limit).sum())
            values = values.clip(-limit, limit)
        array[self.pos] = self._rounded(values)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: Array) -> None:
        """
        GAE(λ): δ_t = r_t + γV_{t+1} − V_t, A_t = δ_t + γλA_{t+1}, returns A + V (Schulman et al. 2016).

        The recurrence is one FP32 number per environment; each step is rounded to storage as it leaves (paper Sec. 3).

        :param last_values: V after the last step, shape (envs, 1)
        :param dones: whether the last step ended an episode, shape (envs,)
        """
        next_value = last_values.detach().cpu().numpy().flatten().astype(np.float32)
        continues = 1.0 - dones.astype(np.float32)
        names = ("rewards", "values", "episode_starts", "advantages", "returns")
        arrays = {name: getattr(self, name) for name in names}
        steps, kind = (self.buffer_size, self.n_envs), self.precision.numpy_dtype
        dtypes = dict.fromkeys(names, kind) | {"episode_starts": np.dtype(bool)}
        as_made = all(x.shape == steps and x.dtype == dtypes[n] and x.flags.c_contiguous for n, x in arrays.items())
        if _ISA is not None and as_made:
            self.saturated["returns"] += _cpu.gae(
                _ISA, self.precision.storage, arrays, next_value, continues, self.gamma, self.gae_lambda
            )
            return
        recurrence = np.zeros(self.n_envs, dtype=np.float32)
        with np.errstate(over="ignore"):  # saturated below
            for step in reversed(range(self.buffer_size)):
                value = self.values[step].astype(np.float32)
                delta = self.rewards[step].astype(np.float32) + self.gamma * next_value * continues - value
                recurrence = delta + self.gamma * self.gae_lambda * continues * recurrence
                self.advantages[step] = self._rounded(recurrence)
                self.returns[step] = self._rounded(recurrence + value)
                next_value, continues = value, 1.0 - self.episode_starts[step].astype(np.float32)
        for array in (self.advantages, self.returns):
            infinite = np.isinf(array)
            self.saturated["returns"] += int(infinite.sum())
            array[infinite] = np.copysign(self.precision.format.max, array[infinite].astype(np.float32))

    def get(self, batch_size: int | None = None) -> Generator[Minibatch, None, None]:  # type: ignore[override]
        """
        One epoch of minibatches, drawn as SB3 draws them.

        :param batch_size: samples per minibatch, by default all
        """
        assert self.full, "The rollout is not complete."
        rows = self.minibatch_rows()
        size = batch_size or len(rows)
        for start in range(0, len(rows), size):
            yield self._get_samples(rows[start : start + size])

    def minibatch_rows(self) -> Array:
        """
        One epoch's order, drawn as SB3 draws it.

        :return: rows of the arrays' first two dimensions flattened, shape (n_steps * n_envs,)
        """
        return self.rows_of(np.random.permutation(self.buffer_size * self.n_envs))

    def rows_of(self, order: Array) -> Array:
        """
        Where samples lie that are counted through the steps of one environment after the other, as SB3 counts them.

        :param order: numbers of samples, any shape
        :return: rows of the arrays' first two dimensions flattened, same shape
        """
        if self.n_envs == 1:
            return order
        rows: Array = order % self.buffer_size * self.n_envs + order // self.buffer_size
        return rows

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Minibatch:  # type: ignore[override]
        def gather(array: Array) -> Tensor:
            flat = array.reshape(self.buffer_size * self.n_envs, *array.shape[2:])
            return self.tensor(flat.take(batch_inds, axis=0))

        behaviour: Behaviour | None = None
        if self.behaviour is not None:
            kind = GaussianBehaviour if len(self.behaviour) == 2 else LogitsBehaviour
            behaviour = kind(*(gather(x) if x.ndim == 3 else self.tensor(x) for x in self.behaviour))
        observations: Any = self.observations
        if isinstance(observations, dict):
            observations = {key: gather(array) for key, array in observations.items()}
        else:
            observations = gather(observations)
        return Minibatch(
            observations=observations,
            actions=gather(self.actions).float(),
            old_values=gather(self.values),
            old_log_prob=None if self.log_probs is None else gather(self.log_probs),
            advantages=gather(self.advantages),
            returns=gather(self.returns),
            behaviour=behaviour,
            correction=None if self.corrections is None else gather(self.corrections),
        )

    def tensor(self, array: Array) -> Tensor:
        """The array's memory as a tensor, on the buffer's device; numpy and torch share no name for BF16."""
        if array.dtype == ml_dtypes.bfloat16:
            return th.from_numpy(array.view(np.int16)).view(th.bfloat16).to(self.device)
        return th.from_numpy(array).to(self.device)

    def arrays(self) -> dict[str, Array]:
        """All arrays of the rollout by name, for accounting."""
        names = ("actions", "rewards", "episode_starts", "values", "advantages", "returns", "log_probs", "corrections")
        found = {name: getattr(self, name) for name in names}
        if isinstance(self.observations, dict):
            found |= {f"observations {key}": array for key, array in self.observations.items()}
        else:
            found["observations"] = self.observations
        found |= {f"behaviour {i}": array for i, array in enumerate(self.behaviour or ())}
        return {name: array for name, array in found.items() if array is not None}


def _numpy(tensor: Tensor) -> Array:
    tensor = tensor.detach().cpu()
    array: Array = (tensor.float() if tensor.dtype == th.bfloat16 else tensor).numpy()
    return array
