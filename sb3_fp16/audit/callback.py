"""Audits along a training run, which they do not change."""

import csv
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch as th
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from torch import Tensor

from sb3_fp16.audit.pictures import draw
from sb3_fp16.audit.report import Audit, audit
from sb3_fp16.audit.sticking import seen_by_layers
from sb3_fp16.audit.tables import COLUMNS
from sb3_fp16.audit.twin import parameters_of
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision


class AuditCallback(BaseCallback):
    """
    Audits a model of PPOFP16 or SB3's PPO at the end of rollouts, for ``learn(callback=...)``.

    Training goes on as it would have without: audits work on copies and put all random number generators back. One that
    cannot be made warns, and is the last. Figures are logged as ``audit/*``. With a folder, ``audit.csv`` grows by each
    audit, ``verdict.txt`` is of the last one, and ``audit.png`` is drawn when training ends. A run that goes on
    (``reset_num_timesteps=False``) goes on in the same files, any other starts them anew.

    :param folder: to write to, made if need be; none by default
    :param every: rollouts between audits, the first one is always audited
    :param minibatches: that an audit replays, at most one epoch
    :param budget: what audits may take of the time that everything else takes, at most a half; one that would exceed it
        is put off. The first one is not
    :param verbose: 1 to print the verdicts when training ends
    :raises ValueError: for a number that makes no sense
    """

    model: PPO
    only_on_rank_zero = True
    """Where several ranks train a model, one audit says it all."""

    def __init__(
        self,
        folder: str | Path | None = None,
        every: int = 10,
        minibatches: int = 16,
        budget: float = 0.2,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        for name, value in (("every", every), ("minibatches", minibatches)):
            if value < 1 or value != int(value):
                raise ValueError(f"AuditCallback: {name}={value!r}; expected a positive integer.")
        if not 0 < budget <= 0.5:
            raise ValueError(f"AuditCallback: budget={budget!r}; expected a share of the training time in (0, 0.5].")
        self.folder = None if folder is None else Path(folder)
        self.every, self.minibatches, self.budget = every, minibatches, budget
        self.audits: list[Audit] = []
        """What was found, in order."""
        self.moved: list[tuple[int, float]] = []
        """Environment steps, and the share of the weights that the update after them moved."""

    def _init_callback(self) -> None:
        if not isinstance(self.model, PPO):
            raise ValueError(f"AuditCallback audits PPO and PPOFP16, not {type(self.model).__name__}.")
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)

    def _on_training_start(self) -> None:
        if self.model.num_timesteps == 0:
            self.audits.clear()
            self.moved.clear()
        self._rollouts = 0
        self._due: float = 0
        self._seconds = self._longest = 0.0
        self._started = time.perf_counter()
        self._before: list[Tensor] | None = None

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        others = time.perf_counter() - self._started - self._seconds
        fits = self._seconds + self._longest <= self.budget * others
        if self._rollouts >= self._due and (fits or not self._longest):
            self._due = self._rollouts + self.every
            start = time.perf_counter()
            self._attempt(self._audit)
            self._longest = max(self._longest, time.perf_counter() - start)
            self._seconds += time.perf_counter() - start
        self._rollouts += 1

    def _on_rollout_start(self) -> None:
        if self._before is not None:
            self._attempt(self._compare)
            self._before = None

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as problem:  # whatever it is, training is worth more than an audit of it
            self._due = math.inf
            warnings.warn(f"No more audits of this run: {type(problem).__name__}: {problem}", stacklevel=2)

    def _compare(self) -> None:
        """How many weights the update has moved."""
        before = cast("list[Tensor]", self._before)
        changed = sum(int((a != b).sum()) for a, b in zip(before, self._weights(), strict=True))
        share = changed / max(1, sum(weights.numel() for weights in before))
        timesteps = self.audits[-1].timesteps
        self.moved.append((timesteps, share))
        self.logger.record("audit/moved", share)
        if self.folder is not None:
            row = dict(zip(COLUMNS, (timesteps, "iteration", "all weights", "moved", share), strict=True))
            _append(self.folder / "audit.csv", [row], is_first=False)

    def _audit(self) -> None:
        found = audit(self.model, self.model.rollout_buffer, self.minibatches, formats=False)
        self.audits.append(found)
        for name, value in _headlines(found).items():
            self.logger.record(f"audit/{name}", value)
        if self.folder is not None:
            _append(self.folder / "audit.csv", found.rows(), is_first=len(self.audits) == 1)
            (self.folder / "verdict.txt").write_text(f"{found}\n")
        self._before = self._weights()

    @th.no_grad()
    def _weights(self) -> list[Tensor]:
        precision = self.model.precision if isinstance(self.model, PPOFP16) else Precision.presets["fp32"]
        parameters = parameters_of(self.model)
        return seen_by_layers(precision, list(parameters), list(parameters.values()))

    def _on_training_end(self) -> None:
        self._on_rollout_start()
        if not self.audits:
            return
        last = self.audits[-1]
        if self.folder is not None:
            self._attempt(partial(draw, self.audits, self.folder / "audit.png"))
        if self.verbose >= 1:
            print("\n".join([f"Audit after {last.timesteps:,} steps:", *map(str, last.verdicts())]))


def _headlines(found: Audit) -> dict[str, float]:
    """What is worth a curve."""
    way, shadow = found.own_writeback, found.shadows[0] if found.shadows else None
    lost = [row.lost for row in found.state if "second" in row.name or row.name == "exp_avg_sq"]
    return {
        "unchanged": found.unchanged,
        **({} if way is None else {"retained": way.retained, "noise": way.noise}),
        **({} if shadow is None else {"step_ratio": shadow.ratio, "step_cosine": shadow.cosine}),
        **({"lost_second_moments": lost[0]} if lost else {}),
        "log_ratio_error": found.mismatches[0].steps.mean_abs,
        "range_used": max(row.used for row in found.ranges),
    }


def _append(path: Path, rows: Sequence[dict[str, Any]], is_first: bool) -> None:
    with path.open("w" if is_first else "a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if is_first:
            writer.writeheader()
        writer.writerows(rows)
