"""
The engine of one rank among several: the reference's update, each rank on its own share of every minibatch.

All ranks draw the same minibatches from the samples of all. Of a minibatch of B samples rank r has B_r, maybe none.
Its losses are sums over its samples divided by B, so that the gradient of the minibatch is the sum of the ranks'
gradients, and a sample's backward signals are those of a process that has the minibatch to itself.

A rank's gradients are rounded to storage, as in any update. They are summed over ranks in FP32, and the sum is rounded
to storage: one rounding more than in one process. Norm, clip coefficients, gradient scales and optimizer see that
rounded sum, of which every rank has the same bits, and so every rank makes the same step.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import cast

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer, RolloutBufferSamples
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sb3_fp16.buffers import Array, Minibatch, RolloutBufferFP16
from sb3_fp16.distributed import Group
from sb3_fp16.engines.contract import UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine, Losses
from sb3_fp16.engines.native_actor import NativeActor
from sb3_fp16.engines.native_plan import obstacles_to_acting, parts_of
from sb3_fp16.policies import HalfPrecisionPolicy
from sb3_fp16.scalars import standardize

with suppress(ImportError):  # no compiler where the package was installed
    from sb3_fp16 import _cpu

_SAMPLING = ("get", "minibatch_rows", "rows_of")
_WORDS = {1: th.int8, 2: th.int16, 4: th.int32, 8: th.int64}
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd; 2^64 divided by the golden ratio
_MOST_SHOWN = 200


class ParallelEngine(EagerEngine):
    """
    PPO's update in torch on the samples of all ranks; ``batch_size`` counts those of all.

    :param policy: to be trained, with its optimizer; the same on all ranks
    :param batch_size: minibatch size, which the initial gradient scales depend on
    :param group: the ranks
    :raises ValueError: for what has no parallel form, naming it
    """

    name = "parallel"

    def __init__(self, policy: HalfPrecisionPolicy, batch_size: int, group: Group) -> None:
        super().__init__(policy, batch_size, f"one of {group.size} ranks")
        self.group = group
        _refuse(policy)
        can_act = next(obstacles_to_acting(policy, parts_of(policy)), None) is None
        self._actor = NativeActor(policy, _cpu.best()) if can_act else None
        self._sizes: list[int] = []  # of the ranks' rollouts
        self._samples = 0  # of the current minibatch, on all ranks
        self._moments: tuple[Tensor, Tensor] | None = None  # mean and std of its advantages; None for one sample

    @property
    def actor(self) -> NativeActor | None:
        """See ``Engine.actor``: the native engine's, where it serves the policy."""
        return self._actor

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """
        See ``Engine.update``; to be called on all ranks.

        :param rollout: of this rank, complete
        :param settings: the same on all ranks
        :raises ValueError: for settings that differ between ranks, naming one
        :raises LostRankError: if a rank has ended or does not answer in time
        :raises RuntimeError: for parameters or optimizer state that differ between ranks afterwards, naming them
        """
        self.check_rollout(rollout)
        ranks = self.group.gather((rollout.buffer_size * rollout.n_envs, asdict(settings)))
        self._sizes = [size for size, _ in ranks]
        agree([theirs for _, theirs in ranks])
        stats = super().update(rollout, settings)
        self.check_identical()
        return stats

    def check_rollout(self, rollout: RolloutBuffer) -> None:
        """
        Refuse a buffer that draws samples in its own way.

        :param rollout: to train on
        :raises ValueError: naming its class
        """
        kind = type(rollout)
        ours = issubclass(kind, RolloutBufferFP16)
        if not ours or any(getattr(kind, name) is not getattr(RolloutBufferFP16, name) for name in _SAMPLING):
            raise ValueError(
                f"{kind.__name__} draws samples in its own way; several ranks train on RolloutBufferFP16, or on what "
                f"is derived from it without another {', '.join(_SAMPLING)}."
            )

    def check_identical(self) -> None:
        """
        Compare fingerprints of parameters, optimizer state and gradient scales with those of rank 0.

        :raises RuntimeError: on every rank alike, naming ranks and tensors that differ
        """
        tensors = self._state()
        found = self.group.gather(fingerprints(list(tensors.values())).tolist())
        differing = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if not differing:
            return
        names = [name for i, name in enumerate(tensors) if any(found[rank][i] != found[0][i] for rank in differing)]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(
            f"Training has come apart: {names[0]}{more} of rank {', '.join(map(str, differing))} differ from rank 0's. "
            "Either a script or callback has changed the model on some ranks only, or ranks do not compute alike, as "
            "processors of different kinds may not."
        )

    def _state(self) -> dict[str, Tensor]:
        """All that must be the same on all ranks, by name."""
        parameters = dict(self.policy.named_parameters())
        moments = {
            f"{key} of {name}": value
            for name, p in parameters.items()
            for key, value in sorted(self.optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor)
        }
        return {**parameters, **moments, **self.state_dict()}

    def _minibatches(
        self, rollout: RolloutBuffer, settings: UpdateSettings
    ) -> Iterator[Minibatch | RolloutBufferSamples]:
        """One epoch, drawn by rank 0 as one process with all environments draws it; of each minibatch the own rows."""
        rollout = cast(RolloutBufferFP16, rollout)
        assert rollout.full, "The rollout is not complete."
        rank, size = self.group.rank, settings.batch_size
        total, first = sum(self._sizes), sum(self._sizes[:rank])
        order = cast(Array, self.group.broadcast(np.random.permutation(total) if rank == 0 else None))
        mine = (order >= first) & (order < first + self._sizes[rank])
        rows = rollout.rows_of(order[mine] - first)
        samples = [min(size, total - start) for start in range(0, total, size)]
        counts = np.bincount(np.flatnonzero(mine) // size, minlength=len(samples)).tolist()
        advantages = th.split(rollout.tensor(rollout.advantages.reshape(-1)[rows]).float(), counts)
        moments = self._moments_of(advantages, samples) if settings.normalize_advantage else None
        for i, own in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
            self._samples = samples[i]
            self._moments = None if moments is None or samples[i] < 2 else (moments[0][i], moments[1][i])
            yield rollout._get_samples(own)

    def _moments_of(self, advantages: Sequence[Tensor], samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """
        Mean and unbiased std of each minibatch of an epoch in FP32, the std from distances to the mean.

        :param advantages: of the own rows, per minibatch
        :param samples: on all ranks, per minibatch
        """
        count = th.tensor(samples, dtype=th.float32, device=advantages[0].device)
        mean = self.group.sum(th.stack([part.sum() for part in advantages])) / count
        squares = th.stack([(part - m).square().sum() for part, m in zip(advantages, mean, strict=True)])
        return mean, (self.group.sum(squares) / (count - 1)).sqrt()

    def _normalize(self, advantages: Tensor) -> Tensor:
        return advantages if self._moments is None else standardize(advantages, *self._moments)

    def _losses(self, batch: Minibatch | RolloutBufferSamples, settings: UpdateSettings) -> Losses:
        """What the own rows add to each mean over the minibatch."""
        rows = len(batch.advantages)
        if rows == 0:
            zero = th.zeros((), device=batch.advantages.device)
            return Losses(zero.expand(len(self.networks)), zero, zero, zero, zero, zero)
        return Losses(*(mean * (rows / self._samples) for mean in super()._losses(batch, settings)))

    def _summed(self, values: Tensor) -> Tensor:
        return self.group.sum(values.detach().clone())

    def _backward(self, loss: Tensor) -> None:
        if loss.requires_grad:  # else no row of the minibatch is this rank's
            super()._backward(loss)
        self._sum_gradients()

    @th.no_grad()
    def _sum_gradients(self) -> None:
        """
        Sum gradients over ranks in FP32, all in one message, and round the sums to storage.

        A parameter that took part on any rank has a gradient then on all; the message says on how many it did.
        """
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        present = [p.grad is not None for p in parameters]
        parts = [(th.zeros_like(p) if p.grad is None else p.grad).reshape(-1).float() for p in parameters]
        flat = self.group.sum(th.cat([*parts, th.tensor(present, dtype=th.float32, device=parts[0].device)]))
        *sums, users = th.split(flat, [*(p.numel() for p in parameters), len(parameters)])
        unused = [False] * len(parameters) if all(present) else (users == 0).tolist()
        for p, gradient, is_unused in zip(parameters, sums, unused, strict=True):
            p.grad = None if is_unused else self._rounded(gradient, p).view(p.shape)

    def _rounded(self, gradient: Tensor, parameter: nn.Parameter) -> Tensor:
        """To storage; beyond its range to infinity, which skips the step."""
        kind = self.policy.precision.format
        return kind.round(gradient) if parameter.dtype == kind.dtype else gradient.to(parameter.dtype)

    def workspace(self) -> dict[str, int]:
        """See ``Engine.workspace``."""
        return super().workspace() | {"sums over ranks": sum(p.numel() + 1 for p in self.policy.parameters())}


def _refuse(policy: HalfPrecisionPolicy) -> None:
    """:raises ValueError: for what has no parallel form"""
    if not policy.precision.global_scalars:
        raise ValueError(
            f"Precision {policy.precision.name} rounds every reduction to storage (global_scalars=False); a sum over "
            "ranks is not defined so. Use another precision, or one process."
        )
    for name, module in policy.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a {type(module).__name__}, whose statistics would be of each rank's own samples and differ "
                "between ranks. Use LayerNorm or GroupNorm, or one process."
            )


def agree(settings: Sequence[Mapping[str, object]]) -> None:
    """
    Refuse ranks whose settings differ.

    :param settings: of each rank, by name
    :raises ValueError: on every rank alike, naming the first rank and setting that differ from rank 0's
    """
    for rank, theirs in enumerate(settings):
        for name in {**settings[0], **theirs}:
            ours, other = (repr(known[name]) if name in known else "none" for known in (settings[0], theirs))
            if ours != other:
                raise ValueError(
                    f"Rank {rank} has {name} {_shortened(other)}, but rank 0 has {_shortened(ours)}; all ranks must "
                    "train the same model by the same settings."
                )


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """
    One word per tensor, Σ (2i + 1)·K·(word_i + 1) mod 2^64 with an odd K: never the same for tensors that differ in
    one element, hardly ever for others.

    :param tensors: any shapes, formats and devices
    :return: int64, shape (tensors,), on the host
    """
    found = []
    for tensor in tensors:
        words = tensor.detach().contiguous().reshape(-1).view(_WORDS[tensor.element_size()]).long()
        weights = (2 * th.arange(len(words), device=words.device) + 1) * _STRIDE
        found.append(((words + 1) * weights).sum().cpu())
    return th.stack(found)
