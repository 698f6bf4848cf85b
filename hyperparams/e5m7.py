"""The runs of ``ppo_fp16.yml`` with ``precision: e5m7``."""

from sb3_fp16.hyperparams import in_precision

hyperparams = in_precision("e5m7")
