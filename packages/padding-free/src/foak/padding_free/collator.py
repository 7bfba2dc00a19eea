"""From the batch that any collator makes, padded or already flattened, to a packed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from foak.core import UnsupportedError
from foak.padding_free.buckets import call_cost_on
from foak.padding_free.packed import BOUNDARIES, PACKED, PackedSequences

__all__ = ["PaddingFreeCollator"]

_IGNORED = -100


class PaddingFreeCollator:
    """Lays the sequences of a batch end to end; what makes the batch stays as it is, and so do its labels.

    Its batches have ``input_ids``, ``labels``, ``position_ids`` (int64 ``[1, T]``; positions restart with each
    sequence, and the first label of each is ignored, for no token before it is its own), every other tensor that has
    a value for each token, and under `foak_packed` the `PackedSequences`.

    Args:
        collator: makes the batch from examples: with ``attention_mask`` (padded at either side), or flattened already,
            with ``position_ids`` that restart (as TRL's does under ``padding_free`` and ``packing``). ``position_ids``
            beside a mask are kept as they are. None: examples are mappings with ``input_ids``, ``labels`` if not every
            token is learned, and ``attention_mask`` if some are padding.
        device_type: where the batches will be computed; the layout is chosen for it.
        rows: whether the model needs the rows of buckets, which are then found here; see `PackedSequences`.
    """

    def __init__(
        self,
        collator: Callable[[Any], Mapping[str, Any]] | None = None,
        device_type: str | None = None,
        *,
        rows: bool = True,
    ) -> None:
        self.collator = collator
        self.rows = rows
        self.call_cost = call_cost_on(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Make a packed batch.

        Raises:
            UnsupportedError: the collator's batch tells neither by a mask nor by positions where sequences are, holds
                something that does not belong to single tokens, has padding inside a sequence, or no token at all.
            ValueError: an example's labels are not as many as its tokens.
        """
        if self.collator is None:
            return self._from_examples(examples)
        batch = dict(self.collator(examples))
        tokens = batch.get("input_ids")
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            raise UnsupportedError(
                "padding-free training flattens batches with input_ids [B, S], but the data collator gives "
                + (f"{tuple(tokens.shape)}" if isinstance(tokens, torch.Tensor) else f"{', '.join(sorted(batch))}")
            )
        mask = batch.pop("attention_mask", None)
        if mask is None:
            return self._already_flat(batch)
        if mask.shape != tokens.shape:
            raise UnsupportedError(
                f"padding-free training reads where sequences are from an attention_mask of the tokens' shape "
                f"{tuple(tokens.shape)}, but the data collator gives one of {tuple(mask.shape)}"
            )
        return self._flatten(batch, mask.bool())

    def _flatten(self, batch: dict[str, Any], mask: torch.Tensor) -> dict[str, Any]:
        lengths = mask.sum(dim=1)
        begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
        if (begins.sum(dim=1) > 1).any():
            raise UnsupportedError(
                "the attention_mask of the data collator's batch hides tokens inside a sequence: without them the next "
                "token would be learned from another; padding stands at the ends of a row"
            )
        flat = self._pack(lengths[lengths > 0].tolist())
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor) or value.shape[:2] != mask.shape:
                raise UnsupportedError(
                    f"padding-free training flattens what has a value for each token, which {name} of the data "
                    f"collator's batch has not ({tuple(value.shape) if isinstance(value, torch.Tensor) else value})"
                )
            flat[name] = value[mask][None]
        flat[PACKED].restarts = torch.equal(flat["position_ids"], flat[PACKED].position_ids())
        return self._finished(flat)

    def _already_flat(self, batch: dict[str, Any]) -> dict[str, Any]:
        positions = batch.get("position_ids")
        if positions is None or positions.shape != batch["input_ids"].shape or positions.shape[0] != 1:
            raise UnsupportedError(
                "padding-free training needs an attention_mask in the data collator's batch, or position_ids [1, T] "
                f"that restart with each sequence; the batch has {', '.join(sorted(batch))}"
            )
        packed = self._layout(PackedSequences.from_position_ids(positions).lengths)
        kept = {name: value for name, value in batch.items() if name not in BOUNDARIES}
        return self._finished({**kept, PACKED: packed})

    def _from_examples(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for number, example in enumerate(examples):
            tokens = _integers(example["input_ids"])
            labels = _integers(example.get("labels", tokens))
            mask = _integers(example.get("attention_mask", torch.ones_like(tokens)))
            if not len(tokens) == len(labels) == len(mask):
                raise ValueError(
                    f"example {number} of a batch has {len(tokens)} input_ids, but {len(labels)} labels and an "
                    f"attention_mask of {len(mask)}"
                )
            for name, values in zip(rows, (tokens, labels, mask), strict=True):
                rows[name].append(values)
        fill = {"input_ids": 0, "labels": _IGNORED, "attention_mask": 0}
        batch = {
            name: torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill[name])
            for name, values in rows.items()
        }
        return self._flatten(batch, batch.pop("attention_mask").bool())

    def _pack(self, lengths: list[int]) -> dict[str, Any]:
        if not lengths:
            raise UnsupportedError("a batch has no token at all: leave empty examples out of the data")
        packed = self._layout(lengths)
        return {"position_ids": packed.position_ids(), PACKED: packed}

    def _layout(self, lengths: Sequence[int]) -> PackedSequences:
        rows = self.rows or len(set(lengths)) == 1  # a dense batch may be taken as one, whatever the model does else
        return PackedSequences(lengths, self.call_cost, rows=rows)

    @staticmethod
    def _finished(flat: dict[str, Any]) -> dict[str, Any]:
        if "labels" in flat:
            labels = flat["labels"].clone()
            labels[0, flat[PACKED].cu_seqlens[:-1].long()] = _IGNORED
            flat["labels"] = labels
        return flat


def _integers(values: Any) -> torch.Tensor:
    """A list, array or tensor of whole numbers, none of them included, as int64 ``[S]``."""
    return torch.as_tensor(values).flatten().long()
