"""How sequences of different lengths are split into few dense sub-batches with little padding in them.

A sub-batch (bucket) of n sequences, each filled up to the longest of them, s, costs attention n * s^2 / 2 products a
head, moves n * s rows, and is one call. Sorted by length, the cheapest split into neighbouring groups is found exactly,
by dynamic programming over the distinct lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["CALL_COST", "CPU_CALL_COST", "MAX_BUCKETS", "Bucket", "call_cost_on", "choose_buckets"]

CALL_COST = 2.0**20
"""Cost of a further bucket in units of one score of every head: what its launches cost on the host. A fast GPU computes
2^20 of them, for 32 heads of size 128, in some 40 microseconds."""
CPU_CALL_COST = 2.0**12
"""The same on a CPU: a core computes 2^12, for 9 heads of size 64, in some 200 microseconds."""
ROW_COST = 64.0
"""Cost of a row that only fills up, in scores: it is gathered, and carried through the softmax."""
MAX_BUCKETS = 16
_GRAIN = 8
"""Lengths that round up to the same multiple of this are never split."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that are computed together.

    Attributes:
        length: the rows that each takes.
        members: their places in the batch, shortest first.
        first_row: where the bucket's rows begin among those of all buckets.
    """

    length: int
    members: tuple[int, ...]
    first_row: int

    @property
    def rows(self) -> int:
        """Rows of the whole bucket."""
        return self.length * len(self.members)


def call_cost_on(device_type: str) -> float:
    """Cost of a further bucket on a kind of device."""
    return CPU_CALL_COST if device_type == "cpu" else CALL_COST


def choose_buckets(lengths: Sequence[int], call_cost: float = CALL_COST) -> tuple[Bucket, ...]:
    """Split sequences into buckets.

    Args:
        lengths: the length of each sequence, at least one.
        call_cost: cost of a further bucket: `CALL_COST` or `CPU_CALL_COST`.

    Returns:
        At most `MAX_BUCKETS` buckets that hold every sequence once.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.min() == sizes.max():
        return (Bucket(int(sizes[0]), tuple(range(len(sizes))), 0),)
    order = np.argsort(sizes, kind="stable")
    distinct, counts = np.unique(-(-sizes // _GRAIN) * _GRAIN, return_counts=True)
    below = np.concatenate([[0], counts.cumsum()])
    ends = _cheapest_split(distinct.astype(np.float64), below.astype(np.float64), call_cost)
    buckets: list[Bucket] = []
    begin = row = 0
    for end in ends:
        stop = int(below[end])
        length = int(sizes[order[stop - 1]])
        buckets.append(Bucket(length, tuple(int(member) for member in order[begin:stop]), row))
        row += buckets[-1].rows
        begin = stop
    return tuple(buckets)


def _cheapest_split(distinct: np.ndarray, below: np.ndarray, call_cost: float) -> list[int]:
    """Where to cut: ascending ends of groups, as counts of distinct lengths.

    Args:
        distinct: the distinct lengths, ascending ``[D]``.
        below: number of sequences among the first 0, 1, … D distinct lengths ``[D + 1]``.
        call_cost: cost of a group.
    """
    size = len(distinct)
    price = distinct**2 / 2 + ROW_COST * distinct  # of one sequence in a group that ends here
    counts = below[None, :] - below[:, None]  # of the sequences between two cuts [D + 1, D + 1]
    group = np.where(counts > 0, counts * np.concatenate([[0.0], price]) + call_cost, np.inf)
    best = np.full((MAX_BUCKETS + 1, size + 1), np.inf)
    best[0, 0] = 0.0
    cut = np.zeros((MAX_BUCKETS + 1, size + 1), dtype=np.int64)
    for used in range(1, MAX_BUCKETS + 1):
        costs = best[used - 1][:, None] + group
        cut[used] = costs.argmin(axis=0)
        best[used] = costs[cut[used], np.arange(size + 1)]
        if used > 1 and best[used, size] >= best[used - 1, size]:
            break
    used = int(best[:, size].argmin())
    ends: list[int] = []
    end = size
    while used:
        ends.append(end)
        end, used = int(cut[used, end]), used - 1
    return ends[::-1]
