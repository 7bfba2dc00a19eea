"""Multipack: which samples make a batch, so that every rank and step gets about equally many tokens.

The samples of an epoch are packed into bins of at most ``max_tokens``, at random; bins of about equal tokens make a
round, one for each rank; the rounds are shuffled.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np

__all__ = ["bins_of_epoch", "rounds_of_epoch"]


def bins_of_epoch(lengths: np.ndarray, max_tokens: int, seed: Sequence[int]) -> list[list[int]]:
    """Pack the samples of an epoch, longest first, each into any bin that still takes it.

    The short ones, which come last, fill what the long ones left; that each bin is chosen at random is what changes a
    sample's companions from epoch to epoch.

    Args:
        lengths: of each sample ``[N]``; none passes ``max_tokens``.
        max_tokens: of a bin at most.
        seed: of the shuffle.

    Returns:
        Bins of sample numbers; each sample is in one of them.
    """
    generator = np.random.default_rng(list(seed))
    order = generator.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    draws = generator.random(len(order)).tolist()
    bins: list[list[int]] = [[] for _ in range(-(-int(lengths.sum()) // max_tokens))]
    space = [(max_tokens, number) for number in range(len(bins))]  # (tokens left, bin), ascending
    for sample, draw in zip(order.tolist(), draws, strict=True):
        need = int(lengths[sample])
        place = bisect.bisect_left(space, (need, -1))
        if place == len(space):
            left, number = max_tokens, len(bins)
            bins.append([])
        else:
            left, number = space.pop(place + int(draw * (len(space) - place)))
        bins[number].append(sample)
        bisect.insort(space, (left - need, number))
    return [members for members in bins if members]


def rounds_of_epoch(
    bins: Sequence[list[int]], lengths: np.ndarray, world_size: int, rounds: int, seed: Sequence[int]
) -> list[list[list[int]]]:
    """Deal bins to ranks.

    Args:
        bins: of the epoch, at most ``rounds * world_size``; bins of several samples are split to make as many.
        lengths: of each sample ``[N]``.
        world_size: ranks.
        rounds: batches of each rank.
        seed: of the order of rounds and ranks.

    Returns:
        For each round one bin for each rank, of about equally many tokens.
    """
    wanted = rounds * world_size
    whole = [list(members) for members in bins]
    totals = [int(lengths[members].sum()) for members in whole]
    splittable = [(-total, index) for index, total in enumerate(totals) if len(whole[index]) > 1]
    heapq.heapify(splittable)
    while len(whole) < wanted:
        _, index = heapq.heappop(splittable)
        whole[index], other = _halves(whole[index], lengths)
        whole.append(other)
        totals[index] = int(lengths[whole[index]].sum())
        totals.append(int(lengths[other].sum()))
        for place in (index, len(whole) - 1):
            if len(whole[place]) > 1:
                heapq.heappush(splittable, (-totals[place], place))
    by_size = sorted(range(wanted), key=lambda index: (totals[index], index))
    generator = np.random.default_rng([*seed, 1])
    dealt = []
    for number in generator.permutation(rounds):
        members = by_size[number * world_size : (number + 1) * world_size]
        dealt.append([whole[members[rank]] for rank in generator.permutation(world_size)])
    return dealt


def _halves(members: list[int], lengths: np.ndarray) -> tuple[list[int], list[int]]:
    """Two parts of about equally many tokens; longest first, each to the shorter part."""
    parts: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for member in sorted(members, key=lambda member: (-int(lengths[member]), member)):
        side = int(totals[1] < totals[0])
        parts[side].append(member)
        totals[side] += int(lengths[member])
    return parts
