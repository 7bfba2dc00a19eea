"""What `LazyLogits` answers or records without computing the logits: one table of functions each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F

from foak.fast_kernels.loss.request import LossCall, is_own_hook

if TYPE_CHECKING:
    from foak.fast_kernels.loss.lazy_logits import LazyLogits

Op = tuple[str, Any]
"""One recorded element-wise step: ``("scale", factor)``, ``("tanh", None)`` or ``("cast", dtype)``."""

T = torch.Tensor

_PROPERTIES = """
    shape dtype device layout ndim requires_grad itemsize nbytes is_cuda is_cpu is_meta is_mps is_xpu is_sparse
    is_sparse_csr is_quantized is_nested _base
"""

METADATA: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(T, name).__get__ for name in _PROPERTIES.split()),
        T.size,
        T.dim,
        T.numel,
        T.nelement,
        T.element_size,
        T.is_floating_point,
        T.is_complex,
        T.is_inference,
        T.__len__,
        T.get_device,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Questions that the stand-in answers itself."""


def _is_leaf(lazy: LazyLogits) -> bool:
    return not lazy.requires_grad


def _grad_fn(lazy: LazyLogits) -> None:
    """Nothing that was recorded leads here. DDP passes an output on as it is then, and through a function otherwise."""
    return


def _if_contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in's own answer about its layout, where that is the one of the real logits."""

    def answer(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if not lazy.row_major:
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return function(lazy, *args, **kwargs)

    return answer


def _contiguous(lazy: LazyLogits, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return lazy if lazy.row_major else lazy.derive(T.contiguous, row_major=True)


def _clone(lazy: LazyLogits, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    if memory_format is not torch.preserve_format:
        return NotImplemented
    return lazy.derive(T.clone)


def _alias(lazy: LazyLogits) -> LazyLogits:
    return lazy.derive(torch.ops.aten.alias.default)


def _detach(lazy: LazyLogits) -> LazyLogits:
    return lazy.derive(T.detach, hidden=lazy.hidden.detach(), gradients=False)


def _cast(lazy: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    if dtype == lazy.dtype:
        return lazy
    return lazy.derive(lambda real: real.to(dtype), op=("cast", dtype), dtype=dtype)


def _to(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    copy = kwargs.pop("copy", False)
    try:
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return NotImplemented
    device, dtype, _, memory_format = parsed
    target = lazy.device if device is None else torch.device(device)
    same_device = target == lazy.device or (target.type == lazy.device.type and target.index is None)
    if not same_device or memory_format is not None or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    if dtype is None or dtype == lazy.dtype:
        return _clone(lazy) if copy else lazy
    return _cast(lazy, dtype)


def _cast_to(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        return _cast(lazy, dtype)

    return cast


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _mul(lazy: LazyLogits, other: Any, **kwargs: Any) -> Any:
    number = _number(other)
    if number is None or kwargs:
        return NotImplemented
    return lazy.derive(lambda real: real * other, op=("scale", number))


def _div(lazy: LazyLogits, other: Any, **kwargs: Any) -> Any:
    number = _number(other)
    if not number or kwargs:
        return NotImplemented
    return lazy.derive(lambda real: real / other, op=("scale", 1.0 / number))


def _tanh(lazy: LazyLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else lazy.derive(torch.tanh, op=("tanh", None))


def _shape(args: tuple[Any, ...]) -> tuple[int, ...] | None:
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else args
    return tuple(sizes) if all(isinstance(size, int) and not isinstance(size, bool) for size in sizes) else None


def _view(lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    sizes = _shape(args)
    if kwargs or not sizes:
        return NotImplemented
    vocab_size = lazy.shape[-1]
    if sizes.count(-1) > 1 or sizes[-1] not in (vocab_size, -1):
        return NotImplemented
    rows = lazy.numel() // vocab_size
    leading = sizes[:-1]
    if sizes[-1] == -1 and math.prod(leading) != rows:
        return NotImplemented
    if -1 not in leading and math.prod(leading) != rows:
        return NotImplemented
    known = math.prod(size for size in leading if size != -1)
    if -1 in leading and (known == 0 or rows % known):
        return NotImplemented
    hidden = lazy.hidden.reshape(*leading, lazy.hidden.shape[-1])
    return lazy.derive(lambda real: real.reshape(sizes), hidden=hidden)


def _flatten(lazy: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % lazy.dim() == lazy.dim() - 1:
        return NotImplemented
    hidden = lazy.hidden.flatten(start_dim % lazy.dim(), end_dim % lazy.dim())
    return lazy.derive(lambda real: real.flatten(start_dim, end_dim), hidden=hidden)


def _getitem(lazy: LazyLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(item, slice) or item is Ellipsis or type(item) is int for item in items):
        return NotImplemented
    if items.count(Ellipsis) > 1:
        return NotImplemented
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items = (*items[:at], *[slice(None)] * (lazy.dim() - len(items) + 1), *items[at + 1 :])
    if len(items) > lazy.dim() or (len(items) == lazy.dim() and items[-1] != slice(None)):
        return NotImplemented
    hidden = lazy.hidden[items[: lazy.dim() - 1]]
    return lazy.derive(lambda real: real[index], hidden=hidden, row_major=lazy.row_major and hidden is lazy.hidden)


def _cross_entropy(
    lazy: LazyLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point():  # class probabilities
        return NotImplemented
    call = LossCall(target, ignore_index, reduction, None, label_smoothing)
    loss = lazy.cross_entropy(call)
    if loss is None:
        return NotImplemented
    # Autocast runs a cross entropy in float32, whatever its input.
    kind = lazy.device.type
    widened = kind != "meta" and torch.is_autocast_enabled(kind) and lazy.dtype != torch.float64
    return loss.to(torch.float32 if widened else lazy.dtype)


def _register_hook(lazy: LazyLogits, hook: Callable[..., Any]) -> Any:
    if not is_own_hook(hook):
        lazy.watch()
        return NotImplemented
    # FSDP2 registers one on every output; it counts only if the logits are computed after all
    lazy._hooks.append(hook)
    with torch._C.DisableTorchFunctionSubclass():
        return T.register_hook(lazy, hook)  # type: ignore[no-untyped-call]


def _retain_grad(lazy: LazyLogits) -> Any:
    lazy.watch()
    return NotImplemented


RECORDED: dict[Callable[..., Any], Callable[..., Any]] = {
    T.float: _cast_to(torch.float32),
    T.double: _cast_to(torch.float64),
    T.half: _cast_to(torch.float16),
    T.bfloat16: _cast_to(torch.bfloat16),
    T.to: _to,
    T.type_as: lambda lazy, other: _to(lazy, other),
    T.clone: _clone,
    torch.clone: _clone,
    T.contiguous: _contiguous,
    T.grad_fn.__get__: _grad_fn,  # type: ignore[union-attr]
    T.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
    T.is_contiguous: _if_contiguous(T.is_contiguous),
    T.stride: _if_contiguous(T.stride),
    T.storage_offset: _if_contiguous(T.storage_offset),
    torch.Tensor.detach: _detach,
    torch.detach: _detach,
    torch.ops.aten.alias.default: _alias,
    T.view: _view,
    T.reshape: _view,
    torch.reshape: _view,
    T.flatten: _flatten,
    torch.flatten: _flatten,
    T.__getitem__: _getitem,
    T.mul: _mul,
    T.__mul__: _mul,
    T.__rmul__: _mul,
    torch.mul: _mul,
    T.div: _div,
    T.__truediv__: _div,
    torch.div: _div,
    T.true_divide: _div,
    torch.true_divide: _div,
    T.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
    T.register_hook: _register_hook,
    T.retain_grad: _retain_grad,
}
