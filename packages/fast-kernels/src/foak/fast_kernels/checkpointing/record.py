"""Readings along one step, and what they say about its segments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from foak.fast_kernels.checkpointing.meter import Meter, Reading


@dataclass(frozen=True)
class Span:
    """An amount of memory that lies between two bounds, in bytes."""

    low: float
    high: float

    def times(self, factor: float) -> Span:
        """Both bounds scaled."""
        return Span(self.low * factor, self.high * factor)


def rise(before: Reading, after: Reading, within: Reading | None = None) -> Span:
    """How far memory rose above `before` until `after`.

    A peak counter that has risen between the two says it exactly. Otherwise it is an upper bound, and so is all that
    was allocated in between; the readings are the lower bound. `within` is a reading that was taken between the two.
    """
    if after.peak > before.peak:
        exact = after.peak - before.allocated
        return Span(exact, exact)
    seen = max(0, after.allocated - before.allocated, 0 if within is None else within.allocated - before.allocated)
    high = after.total - before.total
    if after.peak == before.peak:  # else a user has set the counter back in between
        high = min(high, after.peak - before.allocated)
    return Span(seen, max(seen, high))


@dataclass
class Recording:
    """The readings of one forward and, where its segments are checkpointed, of its backward.

    Attributes:
        kept: the segments that kept their activations.
        before, after: around each segment's forward, in the order of the calls.
        again, done: around each segment's recomputation.
    """

    meter: Meter
    kept: set[int] = field(default_factory=set)
    before: list[Reading] = field(default_factory=list)
    after: list[Reading] = field(default_factory=list)
    again: dict[int, Reading] = field(default_factory=dict)
    done: dict[int, Reading] = field(default_factory=dict)

    @property
    def segments(self) -> int:
        """How many segments have run to their end."""
        return len(self.after)

    @property
    def complete(self) -> bool:
        """Whether two or more segments have run, and the backward has reached the first of them."""
        return self.segments > 1 and 0 in self.done and len(self.again) > 1

    def left(self, index: int) -> int:
        """What a segment has left behind in the forward."""
        end = self.before[index + 1] if index + 1 < len(self.before) else self.after[index]
        return max(0, end.allocated - self.before[index].allocated)

    def recomputed(self, index: int) -> int:
        """What a segment holds at the end of its recomputation: what it would keep, or a little more."""
        if index not in self.again or index not in self.done:
            return 0
        return max(0, self.done[index].allocated - self.again[index].allocated)

    def head(self) -> Span:
        """What the loss needed, forward and backward, on top of what the last segment had left."""
        last = max(self.again)
        return rise(self.after[-1], self.again[last])

    def backward(self) -> list[Span]:
        """What the backward of each checkpointed segment needed, on top of what was there when it started."""
        order = sorted(self.again, reverse=True)
        spans = {
            index: rise(self.again[index], self.again[following], self.done.get(index))
            for index, following in itertools.pairwise(order)
        }
        # The end of the last backward is not seen, and a segment may have been skipped: as much as any other needs.
        most = max(span.high for span in spans.values())
        return [spans.get(index, Span(self.recomputed(index), most)) for index in range(self.segments)]
