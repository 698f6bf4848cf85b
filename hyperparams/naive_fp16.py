"""The runs of ``ppo_fp16.yml`` with ``precision: naive-fp16``."""

from sb3_fp16.hyperparams import in_precision

hyperparams = in_precision("naive-fp16")
