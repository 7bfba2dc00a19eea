"""The key `decode_once`: which layers keep a decoded weight between the reads of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from torch import nn

from foak.core.plugin import Key
from foak.kernels.decode_once import Keeper
from foak.kernels.dense_weight import dense_weight_of

__all__ = ["decode_once_key", "keepers"]

DecodeOnce = Literal[True, False, "recomputation"]


def decode_once_key(path: str) -> Key:
    """The key as each section has it."""
    return Key(
        "decode_once",
        (False, "recomputation", True),
        "recomputation: what activation checkpointing decodes anew serves the backward too; true: what the forward "
        "decodes serves the whole step, which takes the memory of the dense model",
        default=False,
        under=(path,),
    )


def keepers(model: nn.Module, decode_once: DecodeOnce) -> Iterator[tuple[nn.Module, Keeper]]:
    """Each layer whose weight has to be decoded, with what keeps it."""
    if decode_once is False:
        return
    for layer in model.modules():
        if type(layer) is nn.Linear:
            continue
        how = dense_weight_of(layer)
        if how is not None and how.refusal(layer) is None:
            yield layer, Keeper(of_forwards=decode_once is True)
