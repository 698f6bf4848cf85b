"""Acts for a policy: one C++ call per step of the environments."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from operator import is_not
from threading import get_ident
from typing import Any, cast

import numpy as np
import torch as th
from torch import Tensor, nn

from sb3_fp16.buffers import Acted, Array
from sb3_fp16.distributions import CategoricalFP16, DiagGaussianFP16
from sb3_fp16.engines.native_plan import hooked_globally, obstacles_to_acting, parts_of, plan_of, slopes_of
from sb3_fp16.policies import HalfPrecisionPolicy

with suppress(ImportError):  # no compiler where the package was installed
    from sb3_fp16 import _cpu

MOST_DRAWS = 64
"""Threads and numbers of environments whose arrays of random numbers an actor keeps."""
_NOT_FINITE, _SATURATED, _CHANGED = 1, 2, 4  # flags of an action


class NativeActor:
    """
    Acts for a policy in C++: a ``policies.Actor``. Copies and pickles as None, as it refers to memory.

    :param policy: to act for
    :param isa: instruction set
    """

    def __init__(self, policy: HalfPrecisionPolicy, isa: str) -> None:
        self.policy, self.isa = policy, isa
        self._seen: tuple[Any, ...] = ()
        self.check()

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()

    def check(self) -> None:
        """See ``policies.Actor``."""
        seen = tuple(_traits(self.policy))
        if seen != self._seen:
            self._seen = seen
            self._prepare()

    def _prepare(self) -> None:
        policy = self.policy
        self._native: _cpu.Actor | None = None
        self.look()
        self._views: list[Any] = []
        self._parts: list[Any] = []
        parts = parts_of(policy)
        if next(obstacles_to_acting(policy, parts), None) is not None:
            return
        plan = plan_of(policy, parts.parameters)
        self._native = _cpu.Actor(self.isa, plan)
        self._parameters = parts.parameters
        # Views stay up to date, so that `_moved` sees what was put in a place of a module or parameter.
        self._views = [table.values() for m in parts.modules for table in (m._modules, m._parameters) if table]
        self._parts = list(chain.from_iterable(self._views))
        self._addresses = list(map(Tensor.data_ptr, self._parameters))
        self._head, self._hands_on = plan["head"], plan["hands_on"]
        in_half = plan["naive"] and type(policy.action_dist) in (DiagGaussianFP16, CategoricalFP16)
        self._log_prob_dtype = np.dtype(np.float16 if in_half else np.float32)
        self._choices: list[int] = plan["choices"] or [plan["policy"][-1][3]]
        self._noise: dict[tuple[int, int], tuple[Array, list[Callable[[], Any]]]] = {}
        self._action_shape = cast("tuple[int, ...]", policy.action_space.shape)
        self._obs_shape = cast("tuple[int, ...]", policy.observation_space.shape)
        self._is_large = not plan["compares"]
        self._read_log_std()

    def look(self) -> None:
        """Let the next action look at all weights: they were written to in a way that torch does not count."""
        self._versions: list[int] = []

    def act(self, obs: Array, deterministic: bool = False) -> tuple[Array, Acted] | None:
        """See ``policies.Actor``."""
        result = self._call(obs, True, True, deterministic)
        if result is None:
            return None
        _, actions, value, log_prob, output, correction = result
        behaviour = None
        if self._hands_on:
            behaviour = (output,) if self._log_std is None else (output, self._log_std)
        return self._shaped(actions), Acted(
            value, log_prob.astype(self._log_prob_dtype, copy=False), behaviour, correction
        )

    def predict(self, obs: Array, deterministic: bool) -> Array | None:
        """See ``policies.Actor``."""
        result = self._call(obs, True, False, deterministic)
        if result is None:
            return None
        return cast(Array, result[1]) if self._head == "gaussian" else self._shaped(result[1])

    def predict_values(self, obs: Array) -> Array | None:
        """See ``policies.Actor``."""
        result = self._call(obs, False, True, True)
        return None if result is None else result[2]

    def _call(self, obs: Array, actions: bool, values: bool, deterministic: bool) -> tuple[Any, ...] | None:
        if self._native is not None and self._moved():
            self._prepare()
        native = self._native
        if native is None or obs.dtype.char not in "fd" or obs.shape[1:] != self._obs_shape:
            return None
        noise = None if deterministic else self._draw(len(obs))
        result = native.act(np.ascontiguousarray(obs), noise, actions, values, self._must_look())
        if flags := result[0]:
            if flags & _CHANGED:
                self._read_log_std()
            if flags & _NOT_FINITE:
                return None  # torch's way says what is wrong
            if flags & _SATURATED:
                cast(Any, self.policy).warn_if_saturated(th.from_numpy(obs), "observation")
        return result

    def _moved(self) -> bool:
        """Whether a module or parameter was replaced, or a parameter's memory."""
        parts = list(chain.from_iterable(self._views))
        if len(parts) != len(self._parts) or any(map(is_not, parts, self._parts)):
            return True
        return list(map(Tensor.data_ptr, self._parameters)) != self._addresses

    def _must_look(self) -> bool:
        """
        Whether torch counted a change of any weight, or an update or a rollout has come between. The C++ side asks
        where weights are so many that looking at them at each step would take long.
        """
        if not self._is_large:
            return True
        versions = [p._version for p in self._parameters]
        changed, self._versions = versions != self._versions, versions
        return changed

    def _draw(self, envs: int) -> Array:
        """
        Random numbers for one step, drawn as torch's own distributions draw them: standard normal, or exponential for
        each categorical choice (``multinomial`` takes the largest p/e), or uniform.
        """
        mine = get_ident(), envs  # other threads may be acting, too
        if mine not in self._noise:
            noise = th.empty(envs * sum(self._choices), dtype=th.float32)
            kind = {"gaussian": "normal_", "categorical": "exponential_", "bernoulli": "uniform_"}[self._head]
            parts = th.split(noise, [envs * n for n in self._choices])
            if len(self._noise) > MOST_DRAWS:
                self._noise.clear()
            self._noise[mine] = noise.numpy(), [getattr(part, kind) for part in parts]
        array, draws = self._noise[mine]
        for draw in draws:
            draw()
        return array

    def _read_log_std(self) -> None:
        self._log_std: Array | None = None
        if self._head == "gaussian":
            self._log_std = cast(Tensor, self.policy.log_std).detach().float().numpy().copy()

    def _shaped(self, actions: Array) -> Array:
        if self._head == "categorical":
            actions = actions.astype(np.int64)
        return actions if actions.shape[1:] == self._action_shape else actions.reshape(-1, *self._action_shape)


def _traits(policy: HalfPrecisionPolicy) -> Iterator[Any]:
    """What tells whether a policy may still be acted for as before, short of its weights."""
    yield from (type(policy.action_dist), hooked_globally())
    waiting: list[nn.Module] = [policy]
    while waiting:
        module = waiting.pop()
        yield from (id(module), type(module), len(module._forward_hooks), len(module._forward_pre_hooks))
        yield from ("forward" in module.__dict__, *slopes_of(module))
        yield from ((id(p), p.data_ptr()) for p in module._parameters.values() if p is not None)
        waiting += [child for child in module._modules.values() if child is not None]


def _nothing() -> None:
    """What copies and pickles hold in an actor's place."""
