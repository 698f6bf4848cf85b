from typing import Any

import numpy as np
from numpy.typing import NDArray

def supports(isa: str) -> bool: ...
def to_half(isa: str, values: NDArray[np.float32]) -> NDArray[np.uint16]: ...
def to_float(isa: str, values: NDArray[np.uint16]) -> NDArray[np.float32]: ...
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
