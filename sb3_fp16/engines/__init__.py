"""How one update runs: engines that share one contract, and the choice between them."""

from sb3_fp16.engines.contract import Engine, UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.policies import HalfPrecisionPolicy

__all__ = ["Engine", "UpdateSettings", "UpdateStats", "select_engine"]


def select_engine(policy: HalfPrecisionPolicy, batch_size: int) -> Engine:
    """
    The engine that serves a policy on its device.

    :param policy: to be trained
    :param batch_size: minibatch size, which the gradient scale depends on
    """
    return EagerEngine(policy, batch_size)
