"""The mask function that is registered with transformers: instead of a mask it hands the layout on to every layer.

Models make their masks once in a forward and give them to every layer as an argument, so the layout reaches every
attention, whatever else the layers hand on, and it reaches it again when activation checkpointing recomputes a layer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from foak.core import UnsupportedError
from foak.padding_free.packed import PackedSequences

__all__ = ["PackedMask", "mask_function", "packing"]


class PackedMask:
    """Stands where an attention mask would: a query sees the keys of its own sequence up to itself.

    Attributes:
        packed: the layout.
        backend: which form of attention is asked for; see `foak.padding_free.attention`.
        window: how many keys a query sees at most, itself included; None for all.
    """

    def __init__(self, packed: PackedSequences, backend: str, window: int | None = None) -> None:
        self.packed = packed
        self.backend = backend
        # a window that no sequence passes is none: the fastest kernels have none
        self.window = window if window is not None and window < packed.max_length else None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedMask:
        """The mask for a layer on another device (accelerate moves a layer's arguments to it)."""
        if isinstance(device, torch.dtype):
            raise TypeError("a PackedMask has no values of a dtype")
        return PackedMask(self.packed.to(device, non_blocking), self.backend, self.window)

    def __repr__(self) -> str:
        return f"PackedMask({self.packed}, window={self.window})"


_packing: ContextVar[tuple[PackedSequences, str] | None] = ContextVar("foak_packing", default=None)


@contextmanager
def packing(packed: PackedSequences, backend: str) -> Iterator[None]:
    """Within the block, which is one forward of a model, masks are layouts."""
    token = _packing.set((packed, backend))
    try:
        yield
    finally:
        _packing.reset(token)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def mask_function(*args: Any, base: str, **kwargs: Any) -> Any:
    """A mask as transformers' mask functions make it, or a `PackedMask` while a packed batch is in the model.

    Args:
        *args: as for transformers' ``sdpa_mask``.
        base: name of the attention implementation that the model uses without packing, which makes its masks.
        **kwargs: as for ``sdpa_mask``: ``mask_function`` says who sees whom, ``local_size`` is the size of a window
            or chunk.

    Raises:
        UnsupportedError: the model asks for a mask that is not causal, windowed or chunked.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    current = _packing.get()
    if current is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[base](*args, **kwargs)
    packed, backend = current
    wanted, size = kwargs.get("mask_function", causal_mask_function), kwargs.get("local_size")
    if wanted is causal_mask_function:
        return PackedMask(packed, backend)
    if isinstance(size, int):
        if _same(wanted, _windowed(size)):
            return PackedMask(packed, backend, size)
        if _same(wanted, _chunked(size)):
            return PackedMask(packed.split(size), backend)
    raise UnsupportedError(
        "padding-free training serves causal attention, with a sliding window or in chunks; this model masks by "
        f"{getattr(wanted, '__qualname__', wanted)}"
    )


def _windowed(size: int) -> Callable[..., Any]:
    from transformers.masking_utils import sliding_window_causal_mask_function

    function: Callable[..., Any] = sliding_window_causal_mask_function(size)
    return function


def _chunked(size: int) -> Callable[..., Any]:
    from transformers.masking_utils import chunked_causal_mask_function

    function: Callable[..., Any] = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    return function


def _same(first: Any, second: Any) -> bool:
    """Whether two closures do the same: equal code over equal constants (tensors, which count padding, aside)."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return True
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(_same(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, types.FunctionType) and isinstance(second, types.FunctionType):
        return first.__code__ is second.__code__ and _same(_cells(first), _cells(second))
    return type(first) is type(second) and bool(first == second)


def _cells(function: types.FunctionType) -> tuple[Any, ...]:
    return tuple(cell.cell_contents for cell in function.__closure__ or ())
