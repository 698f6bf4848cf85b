"""How one update runs: engines that share one contract, and the choice between them."""

from sb3_fp16 import distributed
from sb3_fp16.engines.contract import Engine, UpdateSettings, UpdateStats
from sb3_fp16.engines.eager import EagerEngine
from sb3_fp16.engines.graph import GraphEngine, why_no_graph
from sb3_fp16.engines.native import NativeEngine
from sb3_fp16.engines.native_plan import why_not_native
from sb3_fp16.policies import HalfPrecisionPolicy

__all__ = ["Engine", "UpdateSettings", "UpdateStats", "select_engine"]


def select_engine(policy: HalfPrecisionPolicy, batch_size: int) -> Engine:
    """
    The fastest engine that serves a policy on its device; its ``reason`` says why it is no faster one.

    :param policy: to be trained
    :param batch_size: minibatch size, which the gradient scale depends on
    :raises ValueError: for a policy that several ranks cannot train
    """
    group = distributed.current()
    if group is not None:
        from sb3_fp16.engines.parallel import ParallelEngine  # which no process that is alone needs

        return ParallelEngine(policy, batch_size, group)
    on_host = policy.device.type == "cpu"
    reason = why_not_native(policy) if on_host else why_no_graph(policy)
    if reason is not None:
        return EagerEngine(policy, batch_size, reason)
    return (NativeEngine if on_host else GraphEngine)(policy, batch_size)
