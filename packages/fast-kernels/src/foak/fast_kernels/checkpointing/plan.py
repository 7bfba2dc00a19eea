"""The arithmetic: what a step needs if its last segments keep their activations, and how many may.

A *segment* is one call of a checkpointed layer; ``n`` of them make a forward. In the order of a step, in bytes:

* ``base`` is what is allocated when the first segment starts: weights, optimizer states, gradients of earlier
  micro-batches, the embedded tokens;
* a checkpointed segment leaves its output, ``output[i]``; one that keeps its activations leaves ``kept[i]``, its output
  included;
* the loss, forward and backward, needs ``head`` on top of what the last segment has left;
* the backward of segment ``i`` frees what it has left and adds the gradients of its parameters. While it runs, a
  checkpointed one needs ``backward[i]`` on top: the recomputed activations, temporary tensors, and those gradients.

Where a quantity is known only between bounds, the upper one says what a plan may need, and the lower one what a step
needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foak.fast_kernels.checkpointing.record import Recording, Span


@dataclass(frozen=True)
class Size:
    """How much a segment has to do.

    Attributes:
        elements: numbers of elements of the hidden states, and of whatever else is as wide and comes with them.
        length: positions of a row.
        quadratic: whether memory may grow with the square of the length (attention that holds its scores).
    """

    elements: tuple[int, ...]
    length: int
    quadratic: bool

    def over(self, other: Size) -> float:
        """By which factor memory is greater than at `other`, at most; what is constant does not shrink."""
        if len(self.elements) != len(other.elements) or not self.elements:
            return float("inf")
        ratio = max(mine / its for mine, its in zip(self.elements, other.elements, strict=True))
        return ratio * max(1.0, self.length / other.length) if self.quadratic else ratio


@dataclass(frozen=True)
class Step:
    """What is known when the first segment of a forward starts.

    Attributes:
        start: allocated when the forward started.
        base: allocated when its first segment started.
        size: of its segments.
        gradients: bytes of the gradients that each segment's backward will allocate.
        gradients_before: of those that may come before any segment's (output head, last norm).
        gradients_all: of every gradient that the backward will allocate.
    """

    start: int
    base: float
    size: Size
    gradients: Sequence[int]
    gradients_before: int
    gradients_all: int


@dataclass
class Profile:
    """What the segments of one model need, in bytes at `size`: the largest that was seen.

    Attributes:
        size: of the segments.
        first: the first segment that may keep its activations: those before it differ in size from the last ones.
        output: what a checkpointed segment leaves.
        kept: what a segment leaves that keeps its activations, at most.
        measured: whether `kept` was measured on a segment that did.
        estimate: what `kept` would be by the recomputation of each segment, which holds a little more.
        kinds: a number for each segment, the same for those whose layers have the same structure.
        least: the smallest that `kept` was at any size: an upper bound of the part that does not shrink with the size.
        head: what the loss needs.
        backward: what the backward of a checkpointed segment needs.
        gradients_stay: whether gradients were still there at the end of the backward.
    """

    size: Size
    first: int
    output: list[float]
    kept: list[float]
    measured: list[bool]
    estimate: list[float]
    kinds: Sequence[int]
    least: list[float]
    head: Span
    backward: list[Span]
    gradients_stay: bool

    @classmethod
    def of(cls, recording: Recording, sizes: Sequence[Size], gradients: Sequence[int], kinds: Sequence[int]) -> Profile:
        """What a step has shown in which every segment was checkpointed.

        Args:
            recording: its readings, backward included.
            sizes: of its segments.
            gradients: bytes that the gradients of each segment take.
            kinds: of its segments' layers.
        """
        segments = recording.segments
        output: list[float] = [recording.left(index) for index in range(segments)]
        kept = [recording.recomputed(index) + output[index] for index in range(segments)]
        most = max(kept)  # what was not recomputed, nobody has seen
        kept = [amount if index in recording.done else most for index, amount in enumerate(kept)]
        first = max((index for index in range(1, segments) if sizes[index] != sizes[index - 1]), default=0)
        there = recording.again[0].allocated - recording.before[0].allocated if 0 in recording.again else 0
        return cls(
            size=sizes[-1],
            first=first,
            output=output,
            kept=kept,
            measured=[False] * segments,
            estimate=list(kept),
            kinds=kinds,
            least=list(kept),
            head=recording.head(),
            backward=recording.backward(),
            gradients_stay=there >= 0.9 * sum(gradients[1:]),
        )

    @property
    def segments(self) -> int:
        """How many segments a forward has."""
        return len(self.output)

    def learn(self, recording: Recording, size: Size) -> None:
        """Take over what a later forward has shown, some of whose segments kept their activations."""
        factor = size.over(self.size)
        if factor > 1:
            self.size = size
            self.output = [factor * amount for amount in self.output]
            self.kept = [factor * amount for amount in self.kept]
            self.estimate = [factor * amount for amount in self.estimate]
            self.head = self.head.times(factor)
            self.backward = [span.times(factor) for span in self.backward]
        for index in recording.kept:
            left = recording.left(index)
            self.least[index] = min(self.least[index], left) if self.measured[index] else left
            if factor >= 1:
                known = self.kept[index] if self.measured[index] and factor == 1 else 0
                self.kept[index] = max(known, left)
                self.measured[index] = True
        for index in range(self.segments):
            if not self.measured[index]:
                self.kept[index] = self._expected(index)

    def _expected(self, index: int) -> float:
        """What a segment would keep, by those of its kind that have kept theirs: as they did, if not more."""
        alike = [
            other for other in range(self.segments) if self.measured[other] and self.kinds[other] == self.kinds[index]
        ]
        more = (self.kept[other] + max(0.0, self.estimate[index] - self.estimate[other]) for other in alike)
        return max(more, default=self.kept[index])

    def has_to_learn(self, kept: int, factor: float) -> bool:
        """Whether a forward of `factor` times the size, whose last `kept` segments keep theirs, would show anything."""
        if factor >= 1:
            return factor > 1 or not all(self.measured[-kept:])
        return any(
            factor < 0.7 * least / amount for least, amount in zip(self.least[-kept:], self.kept[-kept:], strict=True)
        )

    def at(self, size: Size) -> Profile:
        """The same at another size: an upper bound, whatever part of each amount is constant."""
        factor = size.over(self.size)
        if factor == 1:
            return self
        up = max(1.0, factor)
        shrink = min(1.0, factor)
        return Profile(
            size,
            self.first,
            [up * amount for amount in self.output],
            [
                up * (least + (amount - least) * shrink if least < amount else amount)
                for amount, least in zip(self.kept, self.least, strict=True)
            ],
            self.measured,
            self.estimate,
            self.kinds,
            self.least,
            self.head.times(up),
            [span.times(up) for span in self.backward],
            self.gradients_stay,
        )


def peak(profile: Profile, step: Step, kept: int) -> float:
    """The most that the forward, and the backward of the last `kept` segments, need at most.

    What comes after (the backward of checkpointed segments, the optimizer) does not depend on `kept`.
    """
    first_kept = profile.segments - kept
    alive = step.base + sum(profile.output[:first_kept]) + sum(profile.kept[first_kept:])
    most = alive + profile.head.high
    gradients = step.gradients_before
    for index in reversed(range(first_kept, profile.segments)):
        alive -= profile.kept[index]
        # What it kept is what a checkpointed one would recompute now: with its own activations both need the same.
        most = max(most, alive + profile.output[index] + profile.backward[index].high + gradients)
        gradients += step.gradients[index]
    return most


def unavoidable(profile: Profile, step: Step) -> float:
    """The peak of a step in which every segment is checkpointed, at least."""
    alive = step.base + sum(profile.output)
    most = max(alive + profile.head.low, float(step.start))
    if profile.gradients_stay:
        most = max(most, step.start + step.gradients_all)
    gradients = 0
    for index in reversed(range(profile.segments)):
        alive -= profile.output[index]
        most = max(most, alive + gradients + profile.backward[index].low)
        if profile.gradients_stay:
            gradients += step.gradients[index]
    return most


def most_kept(profile: Profile, step: Step, limit: float) -> int:
    """How many of the last segments may keep their activations without the peak passing `limit`."""
    low, high = 0, profile.segments - profile.first
    while low < high:
        middle = (low + high + 1) // 2
        if peak(profile, step, middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
