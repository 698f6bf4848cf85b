"""
Processes that train one model together, through ``torch.distributed``: how they find each other and what they can say.

What is exchanged, and when, is the concern of ``engines.parallel`` and ``learners``.
"""

import atexit
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch as th
import torch.distributed as dist
from torch import Tensor

TIMEOUT = 600.0
"""Seconds that a rank waits for the others, by default: as long as one of them may be busy with its environments."""

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them
_SECONDS_TO_DIE = 0.5  # connections break a moment before the process that held them is gone


class LostRankError(RuntimeError):
    """Another rank has ended or hangs, so that this one cannot go on; names the rank where that is known."""


class Peer(NamedTuple):
    """
    Where a rank runs.

    :param host: name of the machine
    :param process: its id there
    """

    host: str
    process: int

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone; of other machines nothing is known."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except OSError:
            return True
        status = Path(f"/proc/{self.process}/stat")  # of one whose exit status nobody has asked for yet
        return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


class Group:
    """
    All ranks of the default process group. Every method is to be called on all of them, in the same order.

    :raises LostRankError: by every method, if a rank has ended or does not answer in time
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.peers: list[Peer] = []
        """By rank, once they have met."""

    def meet(self) -> None:
        """Let each rank know where the others run, for messages of errors."""
        self.peers = self.gather(Peer(socket.gethostname(), os.getpid()))

    def sum(self, tensor: Tensor) -> Tensor:
        """
        Sum over ranks, in place, in the tensor's format and on its device.

        :param tensor: same shape and format on all ranks
        """
        with self._explaining():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """
        What each rank gives.

        :param value: small, and can be pickled
        :return: by rank
        """
        values: list[Any] = [None] * self.size
        with self._explaining():
            dist.all_gather_object(values, value)
        return values

    def broadcast(self, value: Any) -> Any:
        """
        What rank 0 gives.

        :param value: can be pickled; of other ranks ignored
        """
        values = [value if self.rank == 0 else None]
        with self._explaining():
            dist.broadcast_object_list(values)
        return values[0]

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say which rank is missing: a backend knows connections only."""
        try:
            yield
        except RuntimeError as problem:
            if "nccl" in dist.get_backend_config():
                atexit.unregister(_leave)  # which could wait for those who are gone
            raise LostRankError(self._explanation(problem)) from None

    def _explanation(self, problem: RuntimeError) -> str:
        gone: list[int] = []
        end = time.monotonic() + _SECONDS_TO_DIE
        while not gone and time.monotonic() < end:
            gone = [rank for rank, peer in enumerate(self.peers) if peer.has_ended]
            time.sleep(0.005)
        if gone:
            found = "; ".join(f"rank {rank} (process {self.peers[rank].process}) has ended" for rank in gone)
            advice = "What it printed last, or how it was ended, says why."
        else:
            found = "which one is not known"
            advice = (
                "It has ended on another machine, or hangs, or is busy for longer than the timeout given to "
                "sb3_fp16.distributed.init."
            )
        cause = str(problem).partition(". ")[0]  # gloo goes on with jokes
        return f"Rank {self.rank} of {self.size} stops, it waits for another in vain: {found}. {advice} ({cause})"


_group: tuple[Any, Group] | None = None  # and the process group that it stands for


def current() -> Group | None:
    """The ranks that this process trains with; None where it is alone."""
    global _group
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    if _group is None or _group[0] is not dist.group.WORLD:
        _group = dist.group.WORLD, Group()
    return _group[1]


def rank() -> int:
    """Of this process; 0 where it is alone."""
    group = current()
    return 0 if group is None else group.rank


def barrier() -> None:
    """
    Wait for all ranks, e.g. until rank 0 has saved what others load; does nothing in a process that is alone.

    :raises LostRankError: if a rank has ended or does not answer in time
    """
    group = current()
    if group is not None:
        group.gather(None)


def init(device: str = "auto", timeout: float = TIMEOUT) -> int:
    """
    Join the ranks that ``torchrun`` has started; does nothing in a process that it has not started.

    Models of PPOFP16 that are made afterwards train together. Tensors on CUDA devices go through NCCL, each rank's
    current device is that of its local rank; all else goes through gloo.

    :param device: ``auto`` and ``cuda`` give each rank a CUDA device, the former where there are any; ``cpu`` does not
    :param timeout: seconds that a rank waits for the others before it gives up
    :return: the rank; 0 in a process that is alone
    :raises ValueError: for an incomplete environment, or a device that is not there, naming it
    :raises LostRankError: if the others do not come in time
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r}; expected 'auto', 'cpu' or 'cuda'.")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}; expected a positive number of seconds.")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or (dist.is_available() and dist.is_initialized()):
        return rank()
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE is set, but {' and '.join(missing)} not; start the script by torchrun.")
    if not dist.is_available():
        raise ValueError("WORLD_SIZE is above 1, but this torch was built without torch.distributed.")
    backend = "cpu:gloo,cuda:nccl" if _take_cuda_device(device) else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as problem:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LostRankError(f"Rank {os.environ['RANK']} met no others at {address}. ({problem})") from None
    atexit.register(_leave)
    return rank()


def _take_cuda_device(device: str) -> bool:
    """Make the local rank's device the current one; false where none is wanted or, by default, there."""
    count = 0 if device == "cpu" else th.cuda.device_count()
    if count == 0 and device != "cuda":
        return False
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if local_rank >= count:
        raise ValueError(
            f"Local rank {local_rank} has no CUDA device of its own, as there are {count}: start no more processes on "
            "this machine than it has devices, or pass device='cpu' to sb3_fp16.distributed.init and to PPOFP16."
        )
    th.cuda.set_device(local_rank)
    return True


def _leave() -> None:
    """End the backends' threads while Python is there: they drop tensors, and would abort a process that has none."""
    global _group
    _group = None
    if dist.is_initialized():
        dist.destroy_process_group()
