"""Multipack: every sample once, near-equal tokens, the same from the same seed, on one rank and on many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foak.core import ConfigError
from foak.padding_free.sampler import MultipackSampler


def flan_like(count: int, seed: int = 0) -> np.ndarray:
    """Short with a heavy tail: median 200, up to 2048."""
    values = np.exp(np.random.default_rng(seed).normal(5.3, 0.9, count))
    return np.clip(values, 16, 2048).astype(np.int64)


def samples(batches: list[list[list[int]]]) -> list[int]:
    return sorted(sample for dealt in batches for batch in dealt for sample in batch)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=8, max_size=80), st.integers(1, 3), st.integers(0, 5), st.integers(0, 9))
def test_every_sample_once_within_the_budget(lengths: list[int], world_size: int, seed: int, epoch: int) -> None:
    sampler = MultipackSampler(np.array(lengths), 120, world_size=world_size, seed=seed)
    dealt = sampler.deal(epoch)
    assert samples(dealt) == list(range(len(lengths)))
    assert len(dealt) == len(sampler)
    for batches in dealt:
        assert len(batches) == world_size
        assert all(batch and sum(lengths[sample] for sample in batch) <= 120 for batch in batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_share_an_epoch_and_find_it_again(world_size: int) -> None:
    lengths = flan_like(500)
    ranks = [MultipackSampler(lengths, 4096, world_size=world_size, rank=r, seed=3) for r in range(world_size)]
    for sampler in ranks:
        sampler.set_epoch(2)
    batches = [list(sampler) for sampler in ranks]
    assert sorted(sample for rank in batches for batch in rank for sample in batch) == list(range(500))
    assert [list(sampler) for sampler in ranks] == batches
    assert len({len(rank) for rank in batches}) == 1
    ranks[0].set_epoch(3)
    assert list(ranks[0]) != batches[0]


def test_batches_are_full_and_ranks_have_equal_work() -> None:
    lengths = flan_like(4000)
    sampler = MultipackSampler(lengths, 8192, world_size=4, seed=0)
    tokens = np.array([[lengths[batch].sum() for batch in dealt] for dealt in sampler.deal(0)])
    assert tokens.mean() / 8192 > 0.95
    spread = (tokens.max(axis=1) - tokens.min(axis=1)) / tokens.max(axis=1)
    assert np.median(spread) < 0.01
    random_spread = []
    for part in np.array_split(np.random.default_rng(0).permutation(4000), 30):
        work = [lengths[rank].sum() for rank in np.array_split(part, 4)]
        random_spread.append((max(work) - min(work)) / max(work))
    assert np.median(random_spread) > 10 * np.median(spread)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_of_one_length_fill_the_budget_exactly(world_size: int) -> None:
    sampler = MultipackSampler(np.full(36, 4), 12, world_size=world_size, seed=0)
    assert len(sampler) == 12 // world_size
    for epoch in range(5):
        dealt = sampler.deal(epoch)
        assert samples(dealt) == list(range(36))
        assert {len(batch) for batches in dealt for batch in batches} == {3}


def test_a_sample_as_long_as_the_budget_goes_alone() -> None:
    dealt = MultipackSampler(np.array([12, 1, 12, 11]), 12, seed=0).deal(0)
    assert sorted(batch for (batch,) in dealt) == [[0], [2], [3, 1]]


def test_batches_do_not_grow_with_the_epoch() -> None:
    sampler = MultipackSampler(flan_like(300), 4096, seed=1)
    assert {len(sampler.deal(epoch)) for epoch in range(40)} == {len(sampler)}


def test_companions_change_from_epoch_to_epoch() -> None:
    sampler = MultipackSampler(flan_like(600), 4096, seed=0)
    pairs = []
    for epoch in (0, 1):
        bins = [set(batch) for dealt in sampler.deal(epoch) for batch in dealt]
        pairs.append({(a, b) for batch in bins for a in batch for b in batch if a < b})
    assert len(pairs[0] & pairs[1]) < 0.2 * len(pairs[0])


def test_a_sample_that_fits_in_no_batch_is_named() -> None:
    with pytest.raises(ConfigError, match=r"multipack\.max_tokens is 100, but the longest sample has 101 tokens"):
        MultipackSampler(np.array([5, 101]), 100, key="plugins.training.dataloader.multipack.max_tokens")


@pytest.mark.parametrize(
    ("lengths", "message"), [([7], "1 samples are too few for 2 processes"), ([7, 7, 7], "without leaving one idle")]
)
def test_what_cannot_be_dealt_is_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MultipackSampler(np.array(lengths), 8, world_size=2)


def test_many_samples_are_packed() -> None:
    sampler = MultipackSampler(flan_like(30_000), 16384, world_size=8, seed=0)
    assert samples(sampler.deal(0)) == list(range(30_000))
