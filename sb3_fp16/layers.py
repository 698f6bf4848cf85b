"""
Layers that compute in FP32 on 16-bit parameters and round what they return, once, forwards and backwards.

On CPUs torch's half products are ten times slower than FP32 ones. The graph of an update keeps the FP32 copies of
inputs and weights that its backward pass needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch as th
from torch import Tensor, nn

from sb3_fp16.precision import Precision
from sb3_fp16.rounding import Format, random_key, random_thresholds, round_by_threshold

# torch evaluates these in FP32 and rounds once, also for 16-bit tensors.
_ELEMENTWISE = (nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Sigmoid)
_STRUCTURE = (nn.Flatten, nn.Identity, nn.Sequential)
# What autocast runs in 16 bits.
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.Bilinear)
# What uses the parameters of its children without calling them.
_COMPOSITES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_COPY_SALT = 0x2545F491


@dataclass(frozen=True)
class LayerRule:
    """
    How a layer treats its parameters, inputs and outputs.

    :param kind: format that parameters and inputs are rounded to before they are upcast
    :param rounds: whether outputs are rounded to it; a layer of mixed precision that autocast leaves in FP32 does not
    :param is_head: return FP32 numbers that hold values of the format
    :param stochastic: round the copy of FP32 parameters stochastically
    """

    kind: Format
    rounds: bool = True
    is_head: bool = False
    stochastic: bool = False

    def parameter(self, value: Tensor) -> Tensor:
        """FP32 copy of a parameter that holds values of the format."""
        if self.stochastic:
            copy: Tensor = _StochasticCopy.apply(value, self.kind)  # type: ignore[no-untyped-call]
            return copy
        return cast(Tensor, self.input(value))

    def input(self, value: Any) -> Any:
        """FP32 copy of an input."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return self.kind.upcast(value) if self.rounds else value.float()

    def output(self, value: Any) -> Any:
        """What the layer returns."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.output, value))
        if not self.rounds or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        rounded = self.kind.round(value)
        return rounded.float() if self.is_head else rounded


class _StochasticCopy(th.autograd.Function):
    """
    Stochastically rounded copy of FP32 weights, the same in every pass until they change.

    The thresholds are a hash of the weights' own bits, which change with every step: no generator, no state.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, kind: Format) -> Tensor:
        ctx.kind = kind
        index = th.arange(weights.numel(), dtype=th.int32, device=weights.device).view(weights.shape)
        key = random_key(weights.view(th.int32), _COPY_SALT, 0)
        return round_by_threshold(weights, random_thresholds(index, key), kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.kind.round(gradients[0]).float(), None


class _RuledLayer(nn.Module):
    """A layer that computes in FP32 by a rule; its class is made for the layer it replaces."""

    original: type[nn.Module]
    rule: LayerRule

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # The original layer, but for its parameters; self stays untouched, as other threads may be acting with it.
        layer = self.original.__new__(self.original)
        parameters = {name: p if p is None else self.rule.parameter(p) for name, p in self._parameters.items()}
        # weight_norm and its like leave what they compute among the plain attributes.
        computed = {name: self.rule.parameter(x) for name, x in self.__dict__.items() if isinstance(x, Tensor)}
        layer.__dict__ = {**self.__dict__, **computed, "_parameters": parameters}
        given = {name: self.rule.input(value) for name, value in kwargs.items()}
        return self.rule.output(layer.forward(*map(self.rule.input, inputs), **given))

    def __reduce__(self) -> tuple[Any, ...]:
        return _new_layer, (self.original, self.rule), self.__dict__


@cache
def _layer_class(original: type[nn.Module], rule: LayerRule) -> type[nn.Module]:
    attributes = {"original": original, "rule": rule, "__module__": original.__module__}
    return type(original.__name__, (_RuledLayer, original), attributes)


def _new_layer(original: type[nn.Module], rule: LayerRule) -> nn.Module:
    """Rebuild a copied or unpickled layer."""
    layer = _layer_class(original, rule)  # type: ignore[arg-type]
    return layer.__new__(layer)


def apply_precision(precision: Precision, network: nn.Module, heads: Sequence[nn.Module]) -> None:
    """
    Round a network's parameters to storage and make its layers work on them.

    A layer is a module without children. Its class is replaced by one derived from it, so that ``isinstance``, state
    dictionaries and representations stay as they were.

    :param precision: number formats
    :param network: changed in place
    :param heads: layers that return FP32 numbers
    """
    for parameter in network.parameters():
        parameter.data = precision.format.store(parameter.data)
    for module in network.modules():
        is_layer = not list(module.children()) or (precision.compute != "storage" and isinstance(module, _COMPOSITES))
        is_new = not isinstance(module, _RuledLayer)
        rule = _rule(precision, module, module in heads) if is_layer and is_new else None
        if rule is not None:
            module.__class__ = _layer_class(type(module), rule)  # type: ignore[arg-type]


def round_activations(network: nn.Module, kind: Format) -> None:
    """
    Have activations compute in FP32 and round, as torch does inside each of them: other runtimes lack some in 16 bits.

    :param network: changed in place
    :param kind: format that layers compute in
    """
    for module in network.modules():
        if type(module) in _ELEMENTWISE and kind.name != "fp32":
            module.__class__ = _layer_class(type(module), LayerRule(kind))  # type: ignore[arg-type]


def _rule(precision: Precision, layer: nn.Module, is_head: bool) -> LayerRule | None:
    """None where the layer does by itself what the precision asks for."""
    kind = precision.compute_format
    if isinstance(layer, _STRUCTURE) or (isinstance(layer, _ELEMENTWISE) and kind.is_native):
        return None
    if precision.compute == "storage":
        return LayerRule(kind, is_head=is_head)
    is_product = isinstance(layer, _PRODUCTS)
    return LayerRule(kind, rounds=is_product, is_head=is_head, stochastic=is_product and precision.compute == "bf16-sr")
