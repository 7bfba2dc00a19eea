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
from torch.nn.parallel import DistributedDataParallel

from foak.fast_kernels.loss.lazy_logits import LazyLogits
from foak.fast_kernels.loss.request import HeadState, Sealed, is_own_hook

LAZY_WITHOUT_LABELS = "_foak_lazy_without_labels"
"""Instance attribute of a model whose loss is computed from the logits outside of its forward (label smoothing)."""

_postponing: ContextVar[bool | None] = ContextVar("foak_postponing", default=None)
"""While a forward runs whose logits a loss will consume: whether gradients were recorded when it began; else None."""


def model_forward(inner: Callable[..., Any], model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Wrapper of a language model's forward: while it runs with labels, its head postpones its product."""
    if torch.compiler.is_compiling():
        return inner(model, *args, **kwargs)
    has_labels = _has_labels(model, args, kwargs)
    wants_loss = has_labels or model.__dict__.get(LAZY_WITHOUT_LABELS, False)
    if not wants_loss or _would_lose_its_head(model, has_labels):
        return inner(model, *args, **kwargs)
    token = _postponing.set(torch.is_grad_enabled())
    try:
        return inner(model, *args, **kwargs)
    finally:
        _postponing.reset(token)


def head_forward(head: nn.Linear, hidden: torch.Tensor, *, foak_request: Sealed | None = None) -> torch.Tensor:
    """Forward of a linear output head.

    Args:
        head: weight ``[V, H]``, bias ``[V]`` or None.
        hidden: ``[..., H]``.
        foak_request: what a `LazyLogits` asks for when its time has come.

    Returns:
        The product ``[..., V]``; a `LazyLogits` of it while the model's forward postpones; a requested loss.
    """
    if foak_request is not None:
        return foak_request.request.run(head, hidden)
    dtype = _product_dtype(head, hidden) if _may_postpone(head, hidden) else None
    if dtype is None:
        return F.linear(hidden, head.weight, head.bias)
    return LazyLogits(head, hidden, HeadState.of(head, hidden), dtype)


def _may_postpone(head: nn.Linear, hidden: torch.Tensor) -> bool:
    """Whether the product can be computed later, by a second call of the head, and still be the same."""
    if torch.compiler.is_compiling() or hidden.dim() < 2 or hidden.is_inference():
        return False
    # Under reentrant checkpointing the head runs without gradients first, and its output must lead to none of its own.
    if _postponing.get() is not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if type(head._parameters.get("weight")) is not nn.Parameter:  # FSDP1's views, parametrizations: other tensors later
        return False
    return not _is_offloaded(head) and not _is_sharded_in_a_group(head) and not _has_foreign_hooks(head)


def _is_sharded_in_a_group(head: nn.Linear) -> bool:
    """Whether FSDP2 shards the head with other modules as one: a second call of the head alone would begin the group
    anew, which never ends, and its backward would find the weight freed."""
    state = getattr(head, "_get_fsdp_state", None)
    return callable(state) and len(getattr(state(), "_modules", ())) > 1


def _is_offloaded(head: nn.Linear) -> bool:
    """Whether accelerate brings the weight to the device for each call: a later call would see another parameter."""
    hook = head.__dict__.get("_hf_hook")
    return any(getattr(one, "offload", False) for one in (hook, *getattr(hook, "hooks", ())))


def _has_foreign_hooks(head: nn.Linear) -> bool:
    """Whether somebody listens to the head's calls, and would be told of the loss as if it were a second product."""
    everywhere = nn.modules.module
    if (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    ):
        return True
    own = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return any(not is_own_hook(hook) for hooks in own for hook in hooks.values())


def _product_dtype(head: nn.Linear, hidden: torch.Tensor) -> torch.dtype | None:
    """The dtype that ``F.linear`` would give, or None where it would refuse or does not round to one we know."""
    kind = hidden.device.type
    if not hidden.is_floating_point():
        return None
    if kind != "meta" and torch.is_autocast_enabled(kind):
        both_castable = hidden.dtype != torch.float64 and head.weight.dtype != torch.float64
        return torch.get_autocast_dtype(kind) if both_castable else None
    return hidden.dtype if hidden.dtype == head.weight.dtype else None


def _would_lose_its_head(model: nn.Module, has_labels: bool) -> bool:
    """Whether somebody needs the logits' graph, or their head, before the loss is taken from them.

    FSDP2 reshards the head before an evaluation reads the logits, or a loss is computed outside of the model; DDP,
    where it looks for unused parameters, follows the graph of the outputs before that.
    """
    if not has_labels and DistributedDataParallel._active_ddp_module is not None:
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper.find_unused_parameters or wrapper.static_graph:
            return True
    is_sharded = hasattr(model, "unshard") and hasattr(model, "reshard")
    return is_sharded and not (has_labels and torch.is_grad_enabled())


def _has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    position = _position_of_labels(type(model).forward)
    return position is not None and len(args) > position and args[position] is not None


@functools.lru_cache(maxsize=256)
def _position_of_labels(forward: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None
