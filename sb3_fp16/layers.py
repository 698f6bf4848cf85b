"""
Layers that compute in FP32 on 16-bit parameters and round what they return, once, forwards and backwards.

On CPUs torch's half products are ten times slower than FP32 ones. The graph of an update keeps the FP32 copies of
inputs and weights that its backward pass needs.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch as th
from torch import Tensor, nn

from sb3_fp16.rounding import saturate

# torch evaluates these in FP32 and rounds once, also for 16-bit tensors.
_PASS_THROUGH = (
    nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Sigmoid, nn.Flatten, nn.Identity, nn.Sequential,
)  # fmt: skip


class _StorageLeaf(nn.Module):
    """A layer that computes in FP32 on 16-bit parameters and rounds what it returns."""

    original: type[nn.Module]
    dtype: th.dtype
    is_head: bool

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # The original layer, but for its parameters; self stays untouched, as other threads may be acting with it.
        layer = self.original.__new__(self.original)
        layer.__dict__ = {**self.__dict__, "_parameters": {name: _upcast(p) for name, p in self._parameters.items()}}
        return self._round(layer.forward(*map(_upcast, inputs), **{name: _upcast(x) for name, x in kwargs.items()}))

    def _round(self, output: Any) -> Any:
        if isinstance(output, (tuple, list)):
            return type(output)(map(self._round, output))
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        rounded = output.to(self.dtype)
        return rounded.float() if self.is_head else rounded

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_leaf, (self.original, self.dtype, self.is_head), self.__dict__


def _upcast(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


@cache
def _leaf_class(original: type[nn.Module], dtype: th.dtype, is_head: bool) -> type[nn.Module]:
    attributes = {"original": original, "dtype": dtype, "is_head": is_head, "__module__": original.__module__}
    return type(original.__name__, (_StorageLeaf, original), attributes)


def _new_leaf(original: type[nn.Module], dtype: th.dtype, is_head: bool) -> nn.Module:
    """Rebuild a copied or unpickled leaf."""
    leaf = _leaf_class(original, dtype, is_head)  # type: ignore[arg-type]
    return leaf.__new__(leaf)


def store_in(dtype: th.dtype, network: nn.Module, heads: Sequence[nn.Module]) -> None:
    """
    Round a network's parameters to a format and make its layers work on them.

    A layer is a module without children. Its class is replaced by one derived from it, so that ``isinstance``, state
    dictionaries and representations stay as they were.

    :param dtype: of the parameters, and of what layers return
    :param network: changed in place
    :param heads: layers that return FP32 numbers holding values of the format
    """
    for parameter in network.parameters():
        parameter.data = saturate(parameter.data, dtype).to(dtype)
    for module in network.modules():
        if not list(module.children()) and not isinstance(module, _PASS_THROUGH):
            module.__class__ = _leaf_class(type(module), dtype, module in heads)  # type: ignore[arg-type]
