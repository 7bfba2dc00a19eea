"""The batch sampler of multipack: every sample once an epoch, equally many batches for each rank and epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from foak.core import ConfigError
from foak.padding_free.packing import bins_of_epoch, rounds_of_epoch

__all__ = ["MultipackSampler"]

_PROBED = 4
"""Epochs whose need of batches sets the number of them all."""
_ATTEMPTS = 1000


class MultipackSampler(Sampler[list[int]]):
    """Batches of one rank, by tokens.

    The batches of an epoch depend on the lengths, the seed and the epoch alone, so that every rank computes the same
    deal by itself, and a run that is resumed finds its batches again. Their number is the same in every epoch, for a
    trainer counts its steps once: epochs that need fewer have bins split, one that would need more is shuffled anew.

    Args:
        lengths: tokens of each sample ``[N]``, each at least one.
        max_tokens: tokens of a batch at most.
        world_size: ranks.
        rank: the one whose batches these are.
        seed: of the run.
        key: the dotted key of ``max_tokens``, for messages.

    Raises:
        ConfigError: a sample is longer than ``max_tokens``, or there are fewer samples than ranks.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        max_tokens: int,
        *,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 0,
        key: str = "max_tokens",
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        longest = int(self.lengths.max(initial=0))
        if longest > max_tokens:
            raise ConfigError(
                f"{key} is {max_tokens}, but the longest sample has {longest} tokens: allow at least that many, or cut "
                "samples (max_length of SFTConfig)"
            )
        if len(self.lengths) < world_size:
            raise ConfigError(f"{key}: {len(self.lengths)} samples are too few for {world_size} processes")
        self.max_tokens, self.world_size, self.rank, self.seed = max_tokens, world_size, rank, seed
        self.epoch = 0
        needed = max(len(self._draw(epoch, 0)) for epoch in range(_PROBED))
        self.rounds = math.ceil(needed / world_size)
        if self.rounds * world_size > len(self.lengths):
            self.rounds = len(self.lengths) // world_size
            if self.rounds * world_size < needed:
                raise ConfigError(
                    f"{key} is {max_tokens}, which makes {needed} batches of {len(self.lengths)} samples: they "
                    f"cannot be dealt to {world_size} processes without leaving one idle; allow more tokens"
                )

    @property
    def sampler(self) -> MultipackSampler:
        """Itself: where accelerate looks for what to tell the epoch, behind a sampler that skips batches."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rounds

    def __iter__(self) -> Iterator[list[int]]:
        for dealt in self.deal(self.epoch):
            yield dealt[self.rank]

    def deal(self, epoch: int) -> list[list[list[int]]]:
        """The batches of an epoch: for each round one for each rank."""
        return rounds_of_epoch(self._bins(epoch), self.lengths, self.world_size, self.rounds, (self.seed, epoch))

    def _bins(self, epoch: int) -> list[list[int]]:
        for attempt in range(_ATTEMPTS):
            bins = self._draw(epoch, attempt)
            if len(bins) <= self.rounds * self.world_size:
                return bins
        raise AssertionError(f"no shuffle of {len(self.lengths)} samples fits {self.rounds} rounds")

    def _draw(self, epoch: int, attempt: int) -> list[list[int]]:
        return bins_of_epoch(self.lengths, self.max_tokens, (self.seed, epoch, attempt))
