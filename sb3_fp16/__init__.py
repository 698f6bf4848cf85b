"""PPO trained natively in half precision, as a Stable-Baselines3 plugin."""

import warnings

from sb3_fp16.engines.native_plan import BUILT, MISSING
from sb3_fp16.policies import ActorCriticPolicyFP16
from sb3_fp16.ppo import PPOFP16
from sb3_fp16.precision import Precision
from sb3_fp16.sharp import SHARP

__all__ = ["PPOFP16", "SHARP", "ActorCriticPolicyFP16", "Precision", "__version__"]
__version__ = "0.1.0"

if not BUILT:
    warnings.warn(
        f"Updates run on plain torch, many times slower: {MISSING}.",
        stacklevel=2,
    )
