"""Packed attention by `torch.nn.attention.varlen.varlen_attn`: stock PyTorch's flash attention over ``cu_seqlens``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from foak.padding_free.masks import PackedMask

__all__ = ["attend", "is_available", "refusal"]

_HEAD_SIZES = (8, 256)
"""A head's size is a multiple of the first, and at most the second."""
DENSE_FROM = 1024
"""Sequences of one length, from this length on, are the dense batch that they are without packing, and go to SDPA under
``auto``. On a Hopper SDPA's kernel (cuDNN's, which takes no boundaries) is nearly twice as fast on 4 x 2048 tokens (538
and 392 TFLOP/s forward and backward, against 274 and 237), and attention is a good part of a layer at such lengths.
Sequences of different lengths stay here, however few rows their buckets have too many: cuDNN plans each new shape of a
bucket on the host, and the rows would have to be gathered."""


@functools.cache
def is_available() -> bool:
    """Whether this PyTorch has `varlen_attn`, with an argument by which it can be causal."""
    return _function() is not None


def refusal(
    mask: PackedMask,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    base: str,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Why `attend` cannot compute this call, or None if it can.

    Args:
        mask: who sees whom, and which form is asked for.
        query: ``[1, H, T, D]``.
        key: ``[1, H_kv, T, D]``.
        value: ``[1, H_kv, T, D_v]``.
        base: the implementation whose result is wanted.
        kwargs: what the attention function was called with.
    """
    if mask.backend == "sdpa":
        return "SDPA was asked for"
    if mask.backend == "auto" and mask.window is None and mask.packed.is_uniform(DENSE_FROM):
        return "sequences of one length are a dense batch"
    if base != "sdpa":
        return f"the model's own {base} attention was asked for"
    if query.device.type != "cuda":
        return f"flash attention does not run on {query.device.type}"
    if not is_available():
        return "this PyTorch has no varlen_attn"
    dtypes = {_dtype(states) for states in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return f"flash attention does not take {', '.join(sorted(map(str, dtypes)))}"
    size = query.shape[-1]
    if value.shape[-1] != size or size % _HEAD_SIZES[0] or size > _HEAD_SIZES[1]:
        return f"flash attention does not take heads of size {size}, {value.shape[-1]}"
    if kwargs.get("dropout"):
        return "varlen_attn has no dropout"
    if mask.window is not None and "window_size" not in _parameters():
        return "this varlen_attn has no window"
    more = sorted(name for name in ("softcap", "s_aux", "sinks") if kwargs.get(name) is not None)
    return f"varlen_attn has no {more[0]}" if more else None


def attend(
    mask: PackedMask, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Causal attention inside each sequence.

    Args:
        mask: the layout, and the window.
        query: ``[1, H, T, D]``, float16 or bfloat16, or made so by autocast as SDPA's arguments are.
        key: ``[1, H_kv, T, D]``, H a multiple of H_kv.
        value: ``[1, H_kv, T, D]``.
        scaling: factor on the scores; ``D ** -0.5`` if None.

    Returns:
        ``[1, T, H, D]`` in that dtype; scores and sums are float32.
    """
    packed = mask.packed
    q, k, v = (states[0].transpose(0, 1).to(_dtype(states)) for states in (query, key, value))  # [T, H, D]
    options: dict[str, Any] = {}
    names = _parameters()
    if "scale" in names:
        options["scale"] = scaling
    elif scaling is not None:
        q = q * (scaling * q.shape[-1] ** 0.5)
    if "enable_gqa" in names:  # without the argument the kernel groups by itself
        options["enable_gqa"] = k.shape[1] != q.shape[1]
    if "window_size" in names:
        options["window_size"] = (-1 if mask.window is None else mask.window - 1, 0)
    else:
        options["is_causal"] = True
    function = _function()
    assert function is not None  # `refusal` has looked
    output: torch.Tensor = function(
        q, k, v, packed.cu_seqlens, packed.cu_seqlens, packed.max_length, packed.max_length, **options
    )
    return output[None]


def _dtype(states: torch.Tensor) -> torch.dtype:
    """The dtype in which a tensor is computed with, under autocast or not."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


@functools.cache
def _function() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Callable[..., Any] = varlen_attn
    return found if {"window_size", "is_causal"} & inspect.signature(found).parameters.keys() else None


@functools.cache
def _parameters() -> frozenset[str]:
    """The names of the arguments of this PyTorch's `varlen_attn`, which differ between releases."""
    function = _function()
    return frozenset() if function is None else frozenset(inspect.signature(function).parameters)
