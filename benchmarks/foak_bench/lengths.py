"""Lengths of instruction data, as functions of a seed: the shape of three data sets, without their texts.

Throughput depends on how long the samples are and how unequal, not on what they say. Token counts of instruction data
are near to log-normal, so a shape is a median, a spread (the standard deviation of the logarithm) and two limits. What
is published about each data set, and what is chosen here to fit it, stands with each; `python -m foak_bench.lengths`
prints what comes of it:

    flan       median 200, mean 297, 90th percentile 635, 99th 1,611, longest 2048; a padded batch of 16 is 28% full
    orca-math  median 290, mean 329, 90th percentile 551, 99th 924, longest 2048; a padded batch of 16 is 45% full
    alpaca     median 105, mean 126, 90th percentile 227, 99th 422, longest 512; a padded batch of 16 is 40% full
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["DISTRIBUTIONS", "LengthDistribution"]


@dataclass(frozen=True)
class LengthDistribution:
    """A log-normal law of token counts, cut at both ends.

    Attributes:
        median: tokens of the sample in the middle.
        spread: standard deviation of the natural logarithm.
        shortest, longest: what lies outside is drawn as the limit itself, as `max_length` cuts long samples.
        source: what is published about the data set, and how the numbers above follow from it.
    """

    median: int
    spread: float
    shortest: int
    longest: int
    source: str

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """The lengths of `count` samples; the first ones are the same whatever their number."""
        generator = random.Random(seed)
        drawn = (self.median * generator.lognormvariate(0.0, self.spread) for _ in range(count))
        return [max(self.shortest, min(self.longest, round(length))) for length in drawn]


DISTRIBUTIONS = {
    "flan": LengthDistribution(
        median=200,
        spread=0.9,
        shortest=16,
        longest=2048,
        source="Kundu et al. (arXiv:2407.09105, and Hugging Face's blog on packing with FlashAttention 2) take FLAN as "
        "their data set of widely spread lengths, prompts of a line beside articles to be summed up: packing doubles "
        "its throughput, and gives OrcaMath 1.4 times. Median and spread are chosen: a tail of one sample in a hundred "
        "beyond 1,600 tokens, so that a padded batch is between two thirds and three quarters padding.",
    ),
    "orca-math": LengthDistribution(
        median=290,
        spread=0.5,
        shortest=60,
        longest=2048,
        source="The data card of microsoft/orca-math-word-problems-200k: 225,322,861 bytes of questions and answers in "
        "200,035 samples, 1,126 bytes each, about 330 tokens at the 3.4 bytes that a token of worked arithmetic has. "
        "The spread is chosen: all answers are worked out step by step, so lengths differ less than FLAN's.",
    ),
    "alpaca": LengthDistribution(
        median=105,
        spread=0.6,
        shortest=40,
        longest=512,
        source="The data card of tatsu-lab/alpaca (in three splits): 47,764,738 bytes in 52,002 samples, in which the "
        "fields instruction, input and output stand beside a text of all three in a template of some 160 bytes: a text "
        "of 540 bytes, about 125 tokens at 4.3 bytes a token. Its training code cuts at 512; the template alone is 40. "
        "The spread is chosen.",
    ),
}
"""By the name that a work's `data` gives."""


def _describe(name: str, count: int = 48_000, batch: int = 16) -> str:
    lengths = DISTRIBUTIONS[name].draw(count)
    ordered = sorted(lengths)
    padded = sum(batch * max(lengths[begin : begin + batch]) for begin in range(0, count, batch))
    return (
        f"{name:<10} median {ordered[count // 2]}, mean {sum(lengths) / count:.0f}, 90th percentile "
        f"{ordered[count * 9 // 10]}, 99th {ordered[count * 99 // 100]:,}, longest {ordered[-1]}; "
        f"a padded batch of {batch} is {sum(lengths) / padded:.0%} full"
    )


if __name__ == "__main__":
    print("\n".join(map(_describe, DISTRIBUTIONS)))
