"""What every engine takes and gives."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from sb3_fp16.policies import Actor, HalfPrecisionPolicy


@dataclass(frozen=True)
class UpdateSettings:
    """
    PPO's hyperparameters as one update uses them, schedules resolved; names are SB3's.

    The optimizer's parameter groups hold the learning rate; here it is only checked.

    :raises ValueError: for a value no update can use, naming it
    """

    learning_rate: float
    batch_size: int
    n_epochs: int
    clip_range: float
    clip_range_vf: float | None
    normalize_advantage: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, expected: str) -> None:
            if not condition:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected {expected}.")

        for name in ("batch_size", "n_epochs"):
            value = getattr(self, name)
            require(isinstance(value, (int, np.integer)) and bool(value >= 1), name, "a positive integer")
        for name in ("clip_range", "clip_range_vf", "vf_coef", "max_grad_norm", "target_kl"):
            value = getattr(self, name)
            optional = name in ("clip_range_vf", "target_kl")
            require(optional if value is None else value >= 0, name, "a number that is not negative")
        require(0 <= self.learning_rate < math.inf, "learning_rate", "a finite number that is not negative")
        require(math.isfinite(self.ent_coef), "ent_coef", "a finite number")


@dataclass(frozen=True)
class UpdateStats:
    """
    What one update did, averaged over its minibatches unless stated.

    :param entropy_loss: SB3's name for minus the mean entropy
    :param policy_loss: clipped surrogate
    :param value_loss: mean squared error
    :param approx_kl: KL estimate, over the last epoch
    :param clip_fraction: of ratios outside the clip range
    :param loss: total loss of the last minibatch
    :param grad_norm: global gradient norm before clipping, over the steps taken
    :param loss_scale: the smallest gradient scale after the update
    :param skipped_steps: optimizer steps skipped for gradients that were not finite
    :param stuck_fraction: of the nonzero parameter updates, those that rounding turned into no change
    :param saturated: values of parameters and optimizer state that exceeded the format's range
    :param epochs: begun
    :param stopped_at_kl: KL estimate that ended the update early, if one did
    """

    entropy_loss: float
    policy_loss: float
    value_loss: float
    approx_kl: float
    clip_fraction: float
    loss: float
    grad_norm: float
    loss_scale: float
    skipped_steps: int
    stuck_fraction: float
    saturated: int
    epochs: int
    stopped_at_kl: float | None


class Engine(Protocol):
    """
    Runs updates of one policy. It never logs, never touches the environment, and does not read the device inside the
    loop unless ``target_kl`` makes it.
    """

    name: str
    reason: str
    """Why this engine serves the policy."""
    keeps_gradients: bool
    """Whether gradients stay in the parameters after an update; else they are part of the workspace."""
    policy: HalfPrecisionPolicy
    optimizer: th.optim.Optimizer

    @property
    def actor(self) -> Actor | None:
        """What acts for the policy, if not its modules."""
        ...

    def update(self, rollout: RolloutBuffer, settings: UpdateSettings) -> UpdateStats:
        """
        Train the policy on a rollout.

        :param rollout: complete
        :param settings: resolved hyperparameters
        :raises ValueError: if training cannot recover from gradients that are not finite
        """
        ...

    def workspace(self) -> dict[str, int]:
        """FP32 numbers that live while an update runs, by purpose."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What must be saved with the model so that the next update is the same."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over what ``state_dict`` gave."""
        ...
