from collections.abc import Mapping, Sequence
from typing import Any

OPTIMIZER_FORMATS: list[tuple[str, str]]

def device_count() -> int: ...

class Optimizer:
    def __init__(self, parameter_format: str, state_format: str, parameters: Sequence[Mapping[str, Any]]) -> None: ...
    @property
    def workspace(self) -> int: ...
    def step(
        self,
        device: int,
        stream: int,
        workspace: int,
        gradients: Sequence[int],
        settings: Mapping[str, Any],
        norm: Mapping[str, Any] | None,
    ) -> None: ...
