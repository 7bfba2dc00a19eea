"""What is known of a packed batch: where its sequences begin, and how they are laid out for attention.

Made once for each batch on the host, by the collator; moved to the device with the batch. Nothing that reads it has to
ask the device for a length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from foak.padding_free.buckets import CALL_COST, Bucket, choose_buckets

__all__ = ["BOUNDARIES", "PACKED", "PackedSequences"]

PACKED = "foak_packed"
"""The key of a batch, and the argument of a model's forward, that holds the `PackedSequences`."""

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Names under which transformers hands sequence boundaries to kernels that know them."""


class _Rows(NamedTuple):
    """The dense sub-batches of a layout, and how tokens get into their rows and back."""

    buckets: tuple[Bucket, ...]
    gather: torch.Tensor
    restore: torch.Tensor
    is_dense: bool


class PackedSequences:
    """The layout of sequences that were laid end to end into one row of T tokens.

    Not a dataclass and not a tensor: what walks over a batch to move, cast or copy it (DDP, FSDP, accelerate, pytrees)
    sees one object that has `to` and `pin_memory`, and leaves it whole.

    Args:
        lengths: the length of each sequence, in the order in which they lie in the row; each at least 1.
        call_cost: of a further bucket where the batch will be computed; see `foak.padding_free.buckets`.
        rows: whether the rows of the buckets are found now; else they are when something first asks for them, which is
            right as well, but makes a layer wait for their way to the device.

    Attributes:
        lengths: the same as a tuple.
        total: T, the sum of the lengths.
        max_length: the longest.
        cu_seqlens: where each sequence begins, and T: int32 ``[N + 1]``.
        sequence_ids: which sequence a token belongs to: int32 ``[1, T]``.
        buckets: the dense sub-batches into which attention may be split; see `foak.padding_free.buckets`.
        gather: int64 ``[P]``, P = rows of all buckets together: which token stands in each row. A row that only fills a
            sequence up holds that sequence's last token once more, so that no value in it can be infinite.
        restore: int64 ``[T]``: in which row each token stands.
        is_dense: whether the rows are the tokens as they lie, so that nothing has to be moved.
        restarts: whether the positions of the batch are those of `position_ids`, not others that its collator gave.
    """

    def __init__(self, lengths: Sequence[int], call_cost: float = CALL_COST, *, rows: bool = True) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed batch needs sequences of at least one token each, not lengths {list(lengths)}")
        self.lengths = tuple(int(length) for length in lengths)
        self.total = sum(self.lengths)
        self.max_length = max(self.lengths)
        sizes = np.asarray(self.lengths)
        starts = np.concatenate([[0], sizes.cumsum()]).astype(np.int32)
        # through numpy, which is on the host whatever torch's default device is
        self.cu_seqlens = torch.from_numpy(starts)
        self.sequence_ids = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))[None]
        self.call_cost = call_cost
        self.restarts = True
        self._rows: _Rows | None = _rows_of(self.lengths, call_cost) if rows else None
        self._masks: dict[Any, torch.Tensor] = {}
        self._pieces: dict[int, Self] = {}

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor, call_cost: float = CALL_COST) -> Self:
        """The layout that positions ``[1, T]`` tell: a sequence begins wherever they do not go on by one.

        Reads the values: on a device this waits for it.
        """
        positions = position_ids.reshape(-1)
        starts = torch.nn.functional.pad(positions[1:] != positions[:-1] + 1, (1, 0), value=True)
        places = [*starts.nonzero().flatten().tolist(), positions.numel()]
        return cls([end - begin for begin, end in itertools.pairwise(places)], call_cost, rows=False)

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: torch.Tensor, call_cost: float = CALL_COST) -> Self:
        """The layout of ``cu_seqlens`` ``[N + 1]``. Reads the values: on a device this waits for it."""
        return cls(cu_seqlens.diff().tolist(), call_cost, rows=False)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        return self._found().buckets

    @property
    def gather(self) -> torch.Tensor:
        return self._found().gather

    @property
    def restore(self) -> torch.Tensor:
        return self._found().restore

    @property
    def is_dense(self) -> bool:
        return self._found().is_dense

    @property
    def has_rows(self) -> bool:
        """Whether the rows of the buckets have been found."""
        return self._rows is not None

    def is_uniform(self, least: int = 1) -> bool:
        """Whether all sequences have one length, of at least ``least`` tokens."""
        return self.max_length >= least and self.max_length * len(self.lengths) == self.total

    @property
    def padded_total(self) -> int:
        """The tokens that the same sequences take as a padded batch."""
        return len(self.lengths) * self.max_length

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.cu_seqlens.device

    def position_ids(self) -> torch.Tensor:
        """Positions that restart with each sequence: int64 ``[1, T]``, on the layout's device."""
        starts = self.cu_seqlens[:-1].long()
        return (torch.arange(self.total, device=self.device) - starts[self.sequence_ids[0].long()])[None]

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """The layout with its tensors on another device; itself where they are there."""
        target = torch.device(device)
        if self.device == target or (self.device.type == target.type and target.index is None):
            return self
        return self._map(lambda tensor: tensor.to(target, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The layout with its tensors in pinned memory, as a data loader makes a batch."""
        return self._map(lambda tensor: tensor.pin_memory())

    def split(self, size: int) -> Self:
        """The layout of the same tokens in pieces of at most ``size``; itself where no sequence is longer."""
        if self.max_length <= size:
            return self
        if size not in self._pieces:
            pieces = [min(size, length - begin) for length in self.lengths for begin in range(0, length, size)]
            whole = type(self)(pieces, self.call_cost, rows=self.has_rows)
            self._pieces[size] = whole.to(self.device, non_blocking=True)
        return self._pieces[size]

    def mask(self, key: Any, make: Any) -> torch.Tensor:
        """A tensor that depends on the layout alone, made by ``make()`` when it is first asked for."""
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]

    def __repr__(self) -> str:
        return f"PackedSequences({list(self.lengths)})"

    def _found(self) -> _Rows:
        if self._rows is None:
            self._rows = _moved(_rows_of(self.lengths, self.call_cost), lambda tensor: tensor.to(self.device))
        return self._rows

    def _map(self, function: Any) -> Self:
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        for name in ("cu_seqlens", "sequence_ids"):
            setattr(copy, name, function(getattr(self, name)))
        copy._rows = None if self._rows is None else _moved(self._rows, function)
        copy._masks, copy._pieces = {}, {}
        return copy


def _moved(rows: _Rows, function: Callable[[torch.Tensor], torch.Tensor]) -> _Rows:
    return rows._replace(gather=function(rows.gather), restore=function(rows.restore))


def _rows_of(lengths: tuple[int, ...], call_cost: float) -> _Rows:
    buckets = choose_buckets(lengths, call_cost)
    sizes = np.asarray(lengths)
    starts = sizes.cumsum() - sizes
    total = int(sizes.sum())
    rows = []
    for bucket in buckets:
        members = np.asarray(bucket.members)
        offsets = np.minimum(np.arange(bucket.length), sizes[members, None] - 1)
        rows.append((starts[members, None] + offsets).ravel())
    gather = np.concatenate(rows)
    restore = np.empty(total, dtype=np.int64)
    # backwards, so that a token's own row is written after the rows that repeat it
    restore[gather[::-1]] = np.arange(len(gather))[::-1]
    is_dense = len(gather) == total and bool((gather == np.arange(total)).all())
    return _Rows(buckets, torch.from_numpy(gather), torch.from_numpy(restore), is_dense)
