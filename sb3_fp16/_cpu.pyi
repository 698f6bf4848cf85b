from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

class Actor:
    def __init__(self, isa: str, plan: dict[str, Any]) -> None: ...
    def act(
        self,
        observations: NDArray[Any],
        noise: NDArray[np.float32] | None,
        wants_actions: bool,
        wants_values: bool,
        look: bool,
    ) -> tuple[int, Any, Any, Any, Any, Any]: ...

OPTIMIZER_FORMATS: list[tuple[str, str]]

class Optimizer:
    def __init__(
        self, parameter_format: str, state_format: str, parameters: Sequence[Mapping[str, Any]], isa: str = ""
    ) -> None: ...
    @property
    def workspace(self) -> int: ...
    def step(
        self,
        device: int,
        stream: int,
        workspace: int,
        gradients: Sequence[int],
        settings: Mapping[str, Any],
        norm: None,
    ) -> None: ...

class Recorder:
    def __init__(self, isa: str, storage: str, arrays: list[Any]) -> None: ...
    def record(self, step: int, values: list[Any]) -> tuple[int, ...] | None: ...

def supports(isa: str) -> bool: ...
def best() -> str: ...
def store(isa: str, storage: str, values: NDArray[Any], stored: NDArray[Any]) -> int: ...
def gae(
    isa: str,
    storage: str,
    arrays: dict[str, NDArray[Any]],
    last_values: NDArray[np.float32],
    last_continues: NDArray[np.float32],
    gamma: float,
    gae_lambda: float,
) -> int: ...
def load(isa: str, storage: str, stored: NDArray[Any]) -> NDArray[np.float32]: ...
def rounded(isa: str, storage: str, values: NDArray[np.float32]) -> NDArray[np.float32]: ...
def elementwise(isa: str, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]: ...
def update(
    isa: str,
    plan: dict[str, Any],
    rollout: dict[str, int],
    settings: dict[str, Any],
    order: NDArray[np.int64],
    scales: NDArray[np.float32],
    counters: NDArray[np.int64],
) -> dict[str, Any]: ...
