"""Lets one decoding of a quantized weight serve several of a step's reads.

Under activation checkpointing a layer reads its weight three times: in the forward, in the recomputation, and in the
backward that follows it at once. A `Keeper` on the layer lets the recomputation's decoding serve the backward, which
costs the dense weights of one checkpointed region; or the forward's decoding serve all three, which costs those of the
whole model. What is kept is the very tensor that would be decoded anew, so no result changes.

Who owns what is kept, and until when:

| decoded in | owner | freed |
|---|---|---|
| a recomputation | the layer's `Keeper` | by the layer's backward, or at the end of the backward pass |
| a forward | the graph, through the `Reading` that its functions hold | by the layer's backward; or with the graph |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ATTRIBUTE", "Keeper", "Reading"]

ATTRIBUTE = "_foak_keeper"
"""Where a layer finds its keeper: a plain attribute of the instance."""

Decode = Callable[[torch.dtype], Tensor]

_graph_task = torch._C._current_graph_task_id


class Keeper:
    """What one layer keeps of its decoded weight.

    Args:
        of_forwards: whether a forward's decoding is kept as well, for its recomputation and its backward.
    """

    def __init__(self, of_forwards: bool) -> None:
        self.of_forwards = of_forwards
        self._kept: tuple[Tensor, object] | None = None
        self._noted: tuple[weakref.ref[Tensor], object] | None = None

    def reading(self, decode: Decode, version: object) -> Reading:
        """The reads of one application of the layer: to be called in its forward, with gradients on where they are.

        Args:
            decode: `decode(dtype)` decodes the weight.
            version: equal for two readings only if the weight is the same one, and unchanged: its address and version.
        """
        return Reading(self, decode, version)

    def keep_for_backward(self, weight: Tensor, version: object) -> None:
        """Owns a recomputation's decoding until it is taken, but no longer than the present backward pass lasts.

        (What a pass that fails leaves behind, the next one takes away.)
        """
        self._kept = weight, version
        torch.autograd.Variable._execution_engine.queue_callback(self.clear)

    def note_forward(self, weight: Tensor, version: object) -> None:
        """Knows of a forward's decoding, which a `Reading` owns, as long as that lives."""
        self._noted = weakref.ref(weight), version

    def find(self, dtype: torch.dtype, version: object, *, take: bool) -> Tensor | None:
        """What is kept of this version in `dtype`; with `take`, a recomputation's is kept no longer."""
        kept = self._kept
        if take:
            self._kept = None
        if kept is None and self._noted is not None:
            weight = self._noted[0]()
            kept = None if weight is None else (weight, self._noted[1])
        return kept[0] if kept is not None and kept[0].dtype is dtype and kept[1] == version else None

    def clear(self) -> None:
        """Owns nothing."""
        self._kept = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Keeper:
        return Keeper(self.of_forwards)

    def __reduce__(self) -> tuple[Any, ...]:
        return Keeper, (self.of_forwards,)


class Reading:
    """The weight of a layer as one application of it reads it: first in the forward, then in the backward."""

    def __init__(self, keeper: Keeper, decode: Decode, version: object) -> None:
        self._keeper, self._decode, self._version = keeper, decode, version
        # A forward that runs inside a backward pass, recording a graph, is a recomputation, of either kind.
        self._recomputes = _graph_task() != -1 and torch.is_grad_enabled()
        self._keeps = keeper.of_forwards and not self._recomputes and torch.is_grad_enabled()
        self._is_read = False
        self._own: Tensor | None = None

    def __call__(self, dtype: torch.dtype) -> Tensor:
        """The dense weight in `dtype`."""
        if self._is_read:
            return self._again(dtype)
        self._is_read = True
        keeper = self._keeper
        weight = keeper.find(dtype, self._version, take=False) if self._recomputes else None
        if weight is None:
            weight = self._decode(dtype)
        if self._recomputes:
            keeper.keep_for_backward(weight, self._version)
        elif self._keeps:
            self._own = weight
            keeper.note_forward(weight, self._version)
        return weight

    def _again(self, dtype: torch.dtype) -> Tensor:
        own, self._own = self._own, None
        weight = self._keeper.find(dtype, self._version, take=True)
        if own is not None and own.dtype is dtype:
            return own
        return self._decode(dtype) if weight is None else weight
