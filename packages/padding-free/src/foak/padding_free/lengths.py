"""How many tokens each sample of a data set has: what multipack packs by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from foak.core import UnsupportedError

__all__ = ["sample_lengths"]

_COLUMN = "input_ids"
_FEW = 10_000
"""Samples up to this number are read by the process itself: starting others takes longer."""


def sample_lengths(dataset: Any, *, num_processes: int, length_column: str, key: str) -> np.ndarray:
    """The tokens of each sample.

    A column of lengths is believed; token columns of `datasets` are measured without being read into Python; samples
    of any other data set are read once.

    Args:
        dataset: of the training; it has a length, and its samples ``input_ids``.
        num_processes: processes that read the samples of a large data set.
        length_column: name of a column of lengths, which counts where the data set has it.
        key: the dotted key of multipack, for messages.

    Returns:
        int64 ``[N]``.

    Raises:
        UnsupportedError: the data set streams, or its samples have no tokens before they are collated.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UnsupportedError(
            f"{key} packs by the lengths of all samples, which a streamed data set ({type(dataset).__name__}) does not "
            "tell; load it as a whole, or take the section out: padding_free works without it"
        )
    columns = getattr(dataset, "column_names", None)
    transformed = getattr(dataset, "format", {}).get("type") == "custom"  # its samples are made as they are read
    if isinstance(columns, list) and hasattr(dataset, "with_format") and not transformed:
        if length_column in columns:
            return np.asarray(dataset.with_format("numpy")[length_column][:], dtype=np.int64)
        if _COLUMN in columns:
            return _arrow_lengths(dataset)
    workers = num_processes if len(dataset) > _FEW else 0
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=256, num_workers=workers, collate_fn=_lengths)
    found = [length for batch in loader for length in batch]
    if None in found:
        raise UnsupportedError(
            f"{key} packs by the length of input_ids, which sample {found.index(None)} of the data set has not; "
            "tokenize before training"
        )
    return np.asarray(found, dtype=np.int64)


def _arrow_lengths(dataset: Any) -> np.ndarray:
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    tables = dataset.select_columns([_COLUMN]).with_format("arrow").iter(batch_size=10_000)
    parts = [pc.list_value_length(table[_COLUMN]).to_numpy() for table in tables]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def _lengths(samples: list[Any]) -> list[int | None]:
    return [len(torch.as_tensor(sample[_COLUMN]).flatten()) if _COLUMN in sample else None for sample in samples]
