"""The wrapper of a language model's forward: a packed batch goes in with its layout, and reaches attention with it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from foak.core import UnsupportedError
from foak.padding_free.buckets import Bucket, call_cost_on
from foak.padding_free.masks import packing
from foak.padding_free.packed import BOUNDARIES, PACKED, PackedSequences
from foak.padding_free.rows import pack_rows, unpack_rows

__all__ = ["Settings", "mixer_forward", "packed_forward"]

_CACHES = ("cache", "cache_params", "past_key_values")
"""Names under which layers are given states to keep."""


@dataclass
class Settings:
    """How one model is packed.

    Attributes:
        backend: the form of attention: ``auto``, ``varlen`` or ``sdpa``.
        own: whether attention is this package's; else the model's implementation (flash-attn, FlexAttention) packs by
            itself, from boundaries and positions.
        name: of the implementation that the model's configuration must name for that.
        mixers: whether layers that mix tokens without attention take the layout too.
        reads_rows: whether a layer reads the rows of buckets, so that the collator should find them.
        training: the layout of the batch that a trainer's step is training on, or None outside of one.
    """

    backend: str = "auto"
    own: bool = True
    name: str | None = None
    mixers: bool = False
    reads_rows: bool = True
    training: PackedSequences | None = None


def packed_forward(
    settings: Settings, inner: Callable[..., Any], model: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a forward; where the batch is packed, its masks are layouts.

    A batch is packed where it brings a `PackedSequences` as `foak_packed`, or the ``cu_seq_lens_q`` of TRL's and
    transformers' flattening collators, or one row of positions that restart (either waits for the device once). Any
    other batch (padded, or a step of generation) passes through.

    Raises:
        UnsupportedError: a packed batch that is not one row, that has a mask or cached states besides, whose layout was
            left out by a trainer's own loss, or that meets another implementation of attention than was prepared.
    """
    packed = kwargs.pop(PACKED, None)
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if packed is None:
        _check_not_stripped(settings, tokens, kwargs)
        packed = _recognised(kwargs) if settings.own else None
    if packed is None:
        return inner(model, *args, **kwargs)
    implementation = getattr(model.config, "_attn_implementation", None)
    if settings.name not in (None, implementation):
        raise UnsupportedError(
            f"the model's attention was prepared for packed batches, but has been set to {implementation!r} since; "
            "choose the implementation before foak is applied"
        )
    if tokens is None or tuple(tokens.shape[:2]) != (1, packed.total):
        raise UnsupportedError(
            f"a packed batch of {packed.total} tokens is one row of as many, but the model got "
            f"{None if tokens is None else tuple(tokens.shape)}"
        )
    for name in ("attention_mask", "past_key_values"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"a packed batch has no {name}; take it out of the batch, or do not flatten it")
    packed = packed.to(tokens.device)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = packed.position_ids()
    if _takes(model, "use_cache"):
        kwargs.setdefault("use_cache", False)
    if not settings.own:
        if not packed.restarts:
            raise UnsupportedError(
                f"{implementation} finds sequences by positions that restart, but the batch brings position_ids of its "
                "own; load the model with attn_implementation='sdpa'"
            )
        kwargs.update(dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), packed.cu_seqlens))
        kwargs.update(dict.fromkeys(("max_length_q", "max_length_k"), packed.max_length))
        return inner(model, *args, **kwargs)
    # Not None: transformers would then look in the positions for packed sequences, and wait for the device.
    kwargs["attention_mask"] = torch.ones(1, packed.total, dtype=torch.long, device=tokens.device)
    if settings.mixers:
        kwargs[PACKED] = packed
    with packing(packed, settings.backend):
        return inner(model, *args, **kwargs)


def _check_not_stripped(settings: Settings, tokens: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse the tokens of a packed batch without what tells its sequences: they would be taken for other ones."""
    packed = settings.training
    if packed is None or tokens is None or (packed.restarts and kwargs.get("position_ids") is not None):
        return
    if len(packed.lengths) > 1 and tuple(tokens.shape[:2]) == (1, packed.total):
        raise UnsupportedError(
            f"the loss of this trainer hands the tokens of a packed batch to the model without its position_ids and "
            f"{PACKED}; hand on the whole batch: model(**inputs)"
        )


def _recognised(kwargs: Mapping[str, Any]) -> PackedSequences | None:
    """The layout of a batch that another collator has flattened; None for any other batch."""
    boundaries = kwargs.get("cu_seq_lens_q")
    if boundaries is not None:
        return PackedSequences.from_cu_seqlens(boundaries, call_cost_on(boundaries.device.type))
    positions = kwargs.get("position_ids")
    alone = all(kwargs.get(name) is None for name in ("attention_mask", "past_key_values"))
    if positions is None or not alone or positions.dim() != 2 or positions.shape[0] != 1:
        return None
    packed = PackedSequences.from_position_ids(positions, call_cost_on(positions.device.type))
    return packed if len(packed.lengths) > 1 else None


def _takes(model: nn.Module, name: str) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def mixer_forward(inner: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Run a layer that mixes tokens without attention (a state-space layer, a convolution) on each bucket by itself.

    Such layers are causal, so what fills a sequence up behind its end cannot reach its tokens.
    """
    packed: PackedSequences | None = kwargs.pop(PACKED, None)
    if packed is None:
        return inner(module, *args, **kwargs)
    for name in _CACHES:
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__} got {name} for a packed batch, whose states are not kept")
    for name in BOUNDARIES:
        kwargs.pop(name, None)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = None
    rows = tree_map_only(torch.Tensor, lambda t: _Rows(t, packed), (args, kwargs))
    outputs = []
    for bucket in packed.buckets:
        bucket_args, bucket_kwargs = tree_map_only(_Rows, functools.partial(_Rows.of, bucket=bucket), rows)
        output = inner(module, *bucket_args, **bucket_kwargs)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    whole = pack_rows(torch.cat([output.flatten(0, 1) for output in outputs]), packed)[None]
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


class _Rows:
    """An argument of a mixer: split by buckets where it has a row of packed tokens, whole otherwise."""

    def __init__(self, tensor: torch.Tensor, packed: PackedSequences) -> None:
        self.split = tensor.dim() >= 2 and tuple(tensor.shape[:2]) == (1, packed.total)
        self.tensor = unpack_rows(tensor[0], packed) if self.split else tensor

    def of(self, bucket: Bucket) -> torch.Tensor:
        if not self.split:
            return self.tensor
        rows = self.tensor.narrow(0, bucket.first_row, bucket.rows)
        return rows.view(len(bucket.members), bucket.length, *rows.shape[1:])
