"""
Hyperparameters in RL Zoo's form, installed as ``sb3_fp16.hyperparams``.

``ppo_fp16.yml`` is what ``rl_zoo3 train --algo ppo_fp16`` reads. Every module here is a value of ``-conf``, e.g.
``-conf sb3_fp16.hyperparams.paper``: one per precision, equal to ``ppo_fp16.yml`` but for ``precision``, and ``tuned``.
"""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read(name: str) -> dict[str, dict[str, Any]]:
    """
    Hyperparameters by environment.

    :param name: of a YAML file in this folder
    """
    import yaml  # comes with rl_zoo3, which alone has a use for this

    return dict(yaml.safe_load((FOLDER / name).read_text(encoding="utf-8")))


def in_precision(preset: str) -> dict[str, dict[str, Any]]:
    """
    The runs of ``ppo_fp16.yml`` in another precision.

    :param preset: a name that ``PPOFP16(precision=...)`` takes
    """
    return {env: {**values, "precision": preset} for env, values in read("ppo_fp16.yml").items()}
