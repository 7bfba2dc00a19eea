"""Where fused ops find the dense weight of a linear layer, whatever it is stored as.

A layer type is served by one `DenseWeight`: how to tell that a layer can be read, and how to write its weight into a
buffer. `torch.nn.Linear` is served here. Other packages declare theirs as an entry point of the group
`foak.dense_weights`: its name is the full name of the layer's class (`bitsandbytes.nn.modules.Linear4bit`), its value a
`DenseWeight`. It is loaded when the first layer of that class is asked about, so nothing is imported for a model that
has none.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import cast

import torch
from torch import Tensor, nn

__all__ = ["DenseWeight", "dense_weight_of"]

GROUP = "foak.dense_weights"


@dataclass(frozen=True)
class DenseWeight:
    """How the weight of one type of linear layer is read.

    Attributes:
        refusal: `refusal(layer)` is None, or why this layer's weight cannot be read exactly (one short clause).
        decode: `decode(layer, dtype, out)` gives the weight `[out_features, in_features]` in `dtype`, without a
            gradient and without synchronisation. With `out` (of that shape and dtype, unit column stride, any row
            stride) it is written there, and `out` is returned; with None it is allocated, or is the layer's own
            storage where that is dense and of `dtype`.
        product_dtype: `product_dtype(layer, x)` is the dtype in which the layer's own forward multiplies an input `x`
            outside autocast. Its output has the dtype of `x`.
    """

    refusal: Callable[[nn.Module], str | None]
    decode: Callable[[nn.Module, torch.dtype, Tensor | None], Tensor]
    product_dtype: Callable[[nn.Module, Tensor], torch.dtype]


def dense_weight_of(layer: nn.Module) -> DenseWeight | None:
    """How the weight of `layer` is read, by the class of the layer or the nearest base class known; None for others.

    `torch.nn.Linear` serves itself and no subclass: what a subclass does with its weight is its own affair.
    """
    kind = type(layer)
    if kind not in _by_type:
        _by_type[kind] = _of_type(kind)
    return _by_type[kind]


_by_type: dict[type, DenseWeight | None] = {}


def _of_type(kind: type) -> DenseWeight | None:
    if kind is nn.Linear:
        return _LINEAR
    for base in kind.__mro__:
        if base is nn.Linear:
            return None
        found = _declared(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    return None


@functools.cache
def _declared(name: str) -> DenseWeight | None:
    for entry_point in entry_points(group=GROUP, name=name):
        found: DenseWeight = entry_point.load()
        return found
    return None


def _decode_linear(layer: nn.Module, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    weight: Tensor | None = layer._parameters.get("weight")  # a third of the time that `layer.weight` takes
    if weight is None:  # FSDP keeps it as a plain attribute
        weight = cast(Tensor, layer.weight)
    if weight.requires_grad:
        weight = weight.detach()
    if out is not None:
        return out.copy_(weight)
    return weight if weight.dtype is dtype else weight.to(dtype)


_LINEAR = DenseWeight(
    refusal=lambda layer: None,
    decode=_decode_linear,
    product_dtype=lambda layer, x: x.dtype,
)
