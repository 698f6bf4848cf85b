"""An audit of a model: measured on copies, answered in words, figures and rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_fp16.audit.measurements import Measurements
from sb3_fp16.audit.mismatch import as_trained, between_formats
from sb3_fp16.audit.optimizer import RootWatch, Shadow, state_rows
from sb3_fp16.audit.ranges import GradientRange, range_rows
from sb3_fp16.audit.sticking import OwnSticking, WritebackSimulation
from sb3_fp16.audit.tables import lines_of, rows_of
from sb3_fp16.audit.twin import SINGLE, Step, own_copy, parameters_of, replay, same_random_numbers, sharp_of, twin_of
from sb3_fp16.audit.verdicts import Verdict, verdicts_on
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.sharp import SHARP


class Audit(Measurements):
    """What the number format does to a model; ``print`` shows the verdicts and their figures."""

    def verdicts(self) -> list[Verdict]:
        """Answers in words, one or more per section."""
        return verdicts_on(self)

    def rows(self) -> list[dict[str, Any]]:
        """Everything as rows of ``timesteps``, ``section``, ``subject``, ``measure`` and ``value``, for a file."""
        return rows_of(self)

    def __str__(self) -> str:
        head = f"precision {self.precision.name}, after {self.timesteps:,} steps"
        return "\n".join([head, *map(str, self.verdicts()), "", *lines_of(self)])


def audit(
    model: PPO, rollout: RolloutBuffer, minibatches: int = 32, samples: int = 1024, formats: bool = True
) -> Audit:
    """
    Measure what the number format does to a model, which stays as it is, as do all random number generators.

    :param model: of PPOFP16 or SB3's PPO
    :param rollout: complete, and collected with the weights that the model has now; what ``learn`` leaves in the
        model's buffer was collected before the last update
    :param minibatches: of a replayed update, at most one epoch
    :param samples: of the rollout that activations and the log-ratio are evaluated at
    :param formats: also compare implementations and formats of the policy, over the whole rollout
    :raises ValueError: if the rollout is not complete, or the model's outputs or gradients are not finite
    """
    rollout = own_copy(rollout)
    if not rollout.full:
        raise ValueError(f"The rollout holds {rollout.pos} of {rollout.buffer_size} steps; collect all of it first.")
    with same_random_numbers():
        own, single = twin_of(model), twin_of(model, SINGLE)
        mismatch, correction = as_trained(own, rollout, samples)
        others = between_formats(own, rollout) if formats else []
        ranges = range_rows(single, rollout, samples)
        state = state_rows(own)
        layers, sharp = OwnSticking(own), sharp_of(model)
        shadow = None if sharp is None else Shadow(sharp, model.device)
        roots = RootWatch(own) if isinstance(own.policy.optimizer, SHARP) else None
        replay(own, rollout, minibatches, _each_of([layers, shadow, roots]))
        writebacks, gradients = WritebackSimulation(own.precision.storage), GradientRange(*_scales(single))
        replay(single, rollout, minibatches, _each_of([writebacks, gradients]))
    return Audit(
        timesteps=model.num_timesteps,
        precision=own.precision,
        clip_range=own.update_settings().clip_range,
        layers=tuple(layers.rows()),
        writebacks=tuple(writebacks.rows()),
        state=tuple(state),
        shadows=() if shadow is None else tuple(shadow.rows()),
        roots=() if roots is None else tuple(roots.rows()),
        mismatches=(mismatch, *others),
        correction=correction,
        ranges=tuple(ranges),
        gradients=tuple(gradients.rows()),
    )


def _each_of(watchers: Sequence[Any]) -> Callable[[Step], None]:
    """Those that are there, one after the other."""
    there = [watcher for watcher in watchers if watcher is not None]

    def observe(step: Step) -> None:
        for watcher in there:
            watcher.observe(step)

    return observe


def _scales(single: PPOFP16) -> tuple[list[str], list[float]]:
    """Parameters, and the scale that the preset ``fp16`` gives each one's loss."""
    scaled = twin_of(single, replace(SINGLE, gradient_scaling="per-network"))
    scales = scaled.engine.state_dict()["scales"].tolist()
    network_of = {id(p): k for k, network in enumerate(scaled.policy.networks.values()) for p in network}
    return list(parameters_of(single)), [scales[network_of[id(p)]] for p in parameters_of(scaled).values()]
