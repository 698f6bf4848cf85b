"""The compiled kernels, by the type of device that they run on; see cuda/bindings.cpp."""

from typing import Any

MODULES: dict[str, Any] = {}

try:
    from sb3_fp16 import _cuda

    MODULES["cuda"] = _cuda
except ImportError:  # no CUDA compiler where the package was installed
    pass
