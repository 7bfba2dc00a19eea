"""Few rows of a table that still hold every pair of values of two columns that any row holds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence

Row = Sequence[Hashable]
Pair = tuple[int, Hashable, int, Hashable]


def pairs_of(row: Row) -> set[Pair]:
    """Each two columns of a row with their values."""
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def pairwise(rows: Sequence[Row]) -> list[int]:
    """Indices of rows that together hold every pair that any row holds; the same for the same rows, in their order.

    Takes the row with the most pairs that are still missing, the earlier of equals, until none is. A row's count only
    falls while others are taken, so that a count made earlier is a bound, and only the most promising are made anew.
    """
    found = [pairs_of(row) for row in rows]
    missing = set().union(*found)
    queue = [(-len(pairs), index) for index, pairs in enumerate(found)]
    heapq.heapify(queue)
    chosen = []
    while missing:
        _, index = heapq.heappop(queue)
        gain = -len(found[index] & missing)
        if queue and (gain, index) > queue[0]:
            heapq.heappush(queue, (gain, index))
            continue
        chosen.append(index)
        missing -= found[index]
    return sorted(chosen)
