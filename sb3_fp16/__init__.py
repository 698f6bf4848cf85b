"""PPO trained natively in half precision, as a Stable-Baselines3 plugin."""

import warnings

from sb3_fp16.engines.native_plan import BUILT
from sb3_fp16.policies import ActorCriticPolicyFP16
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.sharp import SHARP

__all__ = ["PPOFP16", "SHARP", "ActorCriticPolicyFP16", "Precision", "__version__"]
__version__ = "0.1.0"

if not BUILT:
    warnings.warn(
        "sb3_fp16 was installed without its native CPU engine, as no C++ compiler was found; updates run on plain "
        "torch, many times slower. Install a compiler and reinstall with SB3_FP16_CPU=1 to see what fails.",
        stacklevel=2,
    )
