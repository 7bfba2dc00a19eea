"""The two forwards that make a head's product lazy: the language model's, which knows the labels, and the head's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from foak.fast_kernels.loss.lazy_logits import LazyLogits
from foak.fast_kernels.loss.request import HeadRequest, HeadState

LAZY_WITHOUT_LABELS = "_foak_lazy_without_labels"
"""Instance attribute of a model whose loss is computed from the logits outside of its forward (label smoothing)."""

_postponing: ContextVar[bool] = ContextVar("foak_postponing", default=False)
"""Whether the forward that is running will have its logits consumed by a loss. Set only for the extent of one call."""


def model_forward(inner: Callable[..., Any], model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of a language model's forward: while it runs with labels, its head postpones its product."""
    if torch.compiler.is_compiling() or not _wants_loss(model, args, kwargs):
        return inner(model, *args, **kwargs)
    token = _postponing.set(True)
    try:
        return inner(model, *args, **kwargs)
    finally:
        _postponing.reset(token)


def head_forward(head: nn.Linear, hidden: torch.Tensor, *, foak_request: HeadRequest | None = None) -> torch.Tensor:
    """Forward of a linear output head.

    Args:
        head: weight ``[V, H]``, bias ``[V]`` or None.
        hidden: ``[..., H]``.
        foak_request: what a `LazyLogits` asks for when its time has come.

    Returns:
        The product ``[..., V]``; a `LazyLogits` of it while the model's forward postpones; a requested loss.
    """
    if foak_request is not None:
        return foak_request.run(head, hidden)
    if torch.compiler.is_compiling() or not _postponing.get():
        return F.linear(hidden, head.weight, head.bias)
    dtype = _product_dtype(head, hidden)
    if dtype is None or hidden.dim() < 2 or hidden.is_inference():
        return F.linear(hidden, head.weight, head.bias)
    return LazyLogits(head, hidden, HeadState.of(head, hidden), dtype)


def _product_dtype(head: nn.Linear, hidden: torch.Tensor) -> torch.dtype | None:
    """The dtype that ``F.linear`` would give, or None where it would refuse or does not round to one we know."""
    kind = hidden.device.type
    if not hidden.is_floating_point():
        return None
    if kind != "meta" and torch.is_autocast_enabled(kind):
        both_castable = hidden.dtype != torch.float64 and head.weight.dtype != torch.float64
        return torch.get_autocast_dtype(kind) if both_castable else None
    return hidden.dtype if hidden.dtype == head.weight.dtype else None


def _wants_loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    if model.__dict__.get(LAZY_WITHOUT_LABELS, False):
        return True
    position = _position_of_labels(type(model).forward)
    return position is not None and len(args) > position and args[position] is not None


@functools.lru_cache(maxsize=256)
def _position_of_labels(forward: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None
