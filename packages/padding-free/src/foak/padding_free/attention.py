"""Attention over a packed batch, behind transformers' own attention interface.

Two forms compute the same:

- `varlen`: `torch.nn.attention.varlen.varlen_attn` (flash attention over ``cu_seqlens``): one call for all sequences.
- `sdpa`: sequences of similar length become dense sub-batches (`foak.padding_free.buckets`), and each goes through the
  implementation that the model uses without packing, `sdpa` or its own `eager`, as a plain causal batch. So whatever
  that implementation does (scale, soft cap, sinks, dropout, grouped heads) is done here too, and SDPA picks its fastest
  kernel, which takes no mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from foak.core import UnsupportedError
from foak.core.patching.binding import original_function
from foak.core.patching.rebinding import called_global
from foak.padding_free import varlen
from foak.padding_free.buckets import Bucket
from foak.padding_free.masks import PackedMask, mask_function
from foak.padding_free.rows import pack_rows, unpack_rows

__all__ = ["BASES", "attention", "packed_name", "register"]

BASES = ("sdpa", "eager")
"""The implementations whose models get packed attention; others (flash-attn, FlexAttention) pack by themselves."""
_NAME = "foak_padding_free"


def packed_name(base: str) -> str:
    """The name in transformers' registries, which also tells what runs where nothing is packed."""
    return _NAME if base == "sdpa" else f"{_NAME}_{base}"


def register(base: str) -> str:
    """Put attention and mask function into transformers' registries, once for a process; returns their name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = packed_name(base)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, functools.partial(attention, base=base))
        AttentionMaskInterface.register(name, functools.partial(mask_function, base=base))
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    base: str,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An attention function of transformers' interface.

    Args:
        module: the attention layer.
        query: ``[B, H, S, D]``.
        key: ``[B, H_kv, S, D]``.
        value: ``[B, H_kv, S, D_v]``.
        attention_mask: a `PackedMask`, for B = 1 and S = T packed tokens; anything else goes to ``base``.
        *args: further positional arguments of ``base``.
        base: the implementation that the model uses without packing.
        **kwargs: ``scaling``, ``dropout`` and what else ``base`` takes.

    Returns:
        The output ``[B, S, H, D_v]`` in the query's dtype (both forms sum in float32 where their kernels do), and the
        attention's weights where ``base`` gives them and nothing is packed.

    Raises:
        UnsupportedError: a packed batch with a cache, or with a bias over positions.
    """
    inner = _base_attention(module, base)
    if not isinstance(attention_mask, PackedMask):
        whole: tuple[torch.Tensor, torch.Tensor | None] = inner(
            module, query, key, value, attention_mask, *args, **kwargs
        )
        return whole
    packed = attention_mask.packed
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == value.shape[2] == packed.total:
        raise UnsupportedError(
            f"a packed batch of {packed.total} tokens met queries {tuple(query.shape)} and keys {tuple(key.shape)}: "
            "caches and cross attention cannot be packed"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedError("attention with a bias over positions cannot be packed")
    if varlen.refusal(attention_mask, query, key, value, base, kwargs) is None:
        return varlen.attend(attention_mask, query, key, value, kwargs.get("scaling")), None
    return _bucketed(inner, module, query, key, value, attention_mask, base, *args, **kwargs), None


def _bucketed(
    inner: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PackedMask,
    base: str,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    packed = mask.packed
    tokens = [unpack_rows(states[0].transpose(0, 1), packed) for states in (query, key, value)]  # [P, H, D]
    outputs = []
    for bucket in packed.buckets:
        q, k, v = (
            states.narrow(0, bucket.first_row, bucket.rows)
            .view(len(bucket.members), bucket.length, *states.shape[1:])
            .transpose(1, 2)
            for states in tokens
        )
        output, _ = inner(module, q, k, v, _dense_mask(mask, bucket, base, query), *args, **kwargs)
        outputs.append(output.reshape(bucket.rows, *output.shape[2:]))
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return pack_rows(rows, packed)[None]


def _dense_mask(mask: PackedMask, bucket: Bucket, base: str, query: torch.Tensor) -> torch.Tensor | None:
    """What a bucket takes as its mask: what fills it up stands last, where causality hides it from every token."""
    window = mask.window if mask.window is not None and mask.window < bucket.length else None
    if base == "sdpa" and window is None:
        return None  # causal by itself

    def make() -> torch.Tensor:
        places = torch.arange(bucket.length, device=query.device)
        distance = places[:, None] - places[None]
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if base == "sdpa":
            return seen[None, None]
        zeros = torch.zeros((), dtype=query.dtype, device=query.device)
        return torch.where(seen, zeros, torch.finfo(query.dtype).min)[None, None]

    return mask.packed.mask((bucket.length, window, base, query.dtype, query.device), make)


def _base_attention(module: torch.nn.Module, base: str) -> Callable[..., Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if base != "eager":
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[base]
        return function
    eager = called_global(original_function(module), "eager_attention_forward")
    if eager is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no eager_attention_forward, so its eager attention cannot be packed"
        )
    return eager  # type: ignore[no-any-return]
