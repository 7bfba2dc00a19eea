"""What two modules must share for one trial to speak for both."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from foak.core.patching.binding import original_function
from foak.core.patching.rebinding import inner_functions
from foak.core.patching.twin import compute_dtype, is_linear_like, linear_sizes

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_POSITION_ATTRIBUTES = {"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index"}
"""Where a module stands in a stack. It counts only where the forward reads it."""


def structure(module: nn.Module, *, whole_forward: bool = True) -> Hashable:
    """A key that is equal for modules which compute the same of equal inputs and parameters.

    Args:
        module: the module; not to be outlived by the key, which holds identities of what it refers to.
        whole_forward: False where only a function that the forward calls is tried: then the position in the stack
            does not count, whoever reads it.

    Returns:
        Class, forward, parameters' and buffers' shapes and dtypes, every attribute (simple values by value, other
        objects by identity), and the same of the children; of linear layers their sizes, bias and dtype alone, for
        that is all that a stand-in keeps of them.
    """
    if is_linear_like(module):
        has_bias = isinstance(getattr(getattr(module, "base_layer", module), "bias", None), torch.Tensor)
        return ("linear", *linear_sizes(module), has_bias, str(compute_dtype(module)))
    forward = original_function(module)
    read = _names(forward) if whole_forward else set()
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, str(t.device))
        for name, t in [*module._parameters.items(), *module._buffers.items()]
        if t is not None
    )
    attributes = tuple(
        (name, _value(value))
        for name, value in sorted(module.__dict__.items())
        if name not in _machinery() and (name not in _POSITION_ATTRIBUTES or name in read)
    )
    children = tuple(
        (name, structure(child, whole_forward=whole_forward))
        for name, child in module._modules.items()
        if child is not None
    )
    return (id(type(module)), id(getattr(forward, "__code__", forward)), tensors, attributes, children)


@functools.cache
def _machinery() -> frozenset[str]:
    """Attributes of `torch.nn.Module` itself, and the bound forward, which is compared by its code."""
    return frozenset(nn.Module().__dict__) - {"training"} | {"forward", "_old_forward", "_hf_hook"}


def _value(value: Any) -> Hashable:
    if isinstance(value, _SIMPLE):
        return (type(value).__name__, repr(value))
    if isinstance(value, list | tuple):
        return (type(value).__name__, *map(_value, value))
    if isinstance(value, dict):
        return ("dict", *((repr(key), _value(item)) for key, item in value.items()))
    return ("object", id(value))


def _names(forward: Any) -> set[str]:
    """Every name, of attributes too, that a forward and what it decorates read."""
    if not isinstance(forward, types.FunctionType):
        return set(_POSITION_ATTRIBUTES)
    codes = (code for function in inner_functions(forward) for code in _codes(function.__code__))
    return {name for code in codes for name in code.co_names}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
