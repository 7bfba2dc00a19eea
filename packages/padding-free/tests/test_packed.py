"""The layout of a packed batch, its buckets, and the moves between the two."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foak.padding_free.buckets import CALL_COST, CPU_CALL_COST, MAX_BUCKETS, ROW_COST, choose_buckets
from foak.padding_free.packed import PackedSequences
from foak.padding_free.rows import pack_rows, unpack_rows

some_lengths = st.lists(st.integers(1, 300), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(some_lengths, st.sampled_from([0.0, CPU_CALL_COST, CALL_COST]))
def test_every_token_has_its_row(lengths: list[int], call_cost: float) -> None:
    packed = PackedSequences(lengths, call_cost)
    assert sorted(member for bucket in packed.buckets for member in bucket.members) == list(range(len(lengths)))
    assert len(packed.buckets) <= MAX_BUCKETS
    assert all(bucket.length == max(lengths[m] for m in bucket.members) for bucket in packed.buckets)
    assert packed.gather.numel() == sum(bucket.rows for bucket in packed.buckets)
    assert torch.equal(packed.gather[packed.restore], torch.arange(sum(lengths)))
    starts = packed.cu_seqlens.tolist()
    for bucket in packed.buckets:
        rows = packed.gather.narrow(0, bucket.first_row, bucket.rows).view(-1, bucket.length)
        for row, member in zip(rows.tolist(), bucket.members, strict=True):
            own = list(range(starts[member], starts[member + 1]))
            assert row[: len(own)] == own
            assert set(row[len(own) :]) <= {own[-1]}


@settings(max_examples=60, deadline=None)
@given(some_lengths)
def test_positions_and_boundaries_tell_the_same_layout(lengths: list[int]) -> None:
    packed = PackedSequences(lengths)
    positions = packed.position_ids()
    assert positions[0].tolist() == [place for length in lengths for place in range(length)]
    assert PackedSequences.from_position_ids(positions).lengths == tuple(lengths)
    assert PackedSequences.from_cu_seqlens(packed.cu_seqlens).lengths == tuple(lengths)
    assert packed.sequence_ids[0].bincount().tolist() == lengths


def test_more_buckets_are_worth_it_where_lengths_differ() -> None:
    ragged = [30] * 20 + [200] * 9 + [2000]
    assert [bucket.length for bucket in choose_buckets(ragged, CALL_COST)] == [200, 2000]
    assert [bucket.length for bucket in choose_buckets(ragged, CPU_CALL_COST)] == [30, 200, 2000]
    assert len(choose_buckets([1001, 1003, 1008], CPU_CALL_COST)) == 1


def test_rows_move_there_and_back_and_so_do_gradients() -> None:
    packed = PackedSequences((3, 1, 12, 5), 0.0)
    tokens = torch.randn(packed.total, 2, 3, dtype=torch.float64, requires_grad=True)
    assert not packed.is_dense
    torch.testing.assert_close(pack_rows(unpack_rows(tokens, packed), packed), tokens, rtol=0, atol=0)
    weights = torch.randn(packed.gather.numel(), 2, 3, dtype=torch.float64)
    weights[[i for i in range(len(weights)) if i not in set(packed.restore.tolist())]] = 0  # as after a dropped output
    (gradient,) = torch.autograd.grad((unpack_rows(tokens, packed) * weights).sum(), tokens)
    (expected,) = torch.autograd.grad((tokens[packed.gather] * weights).sum(), tokens)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)
    rows = torch.randn(packed.gather.numel(), 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: pack_rows(r, packed), (rows,))


def test_equal_lengths_are_not_moved() -> None:
    packed = PackedSequences((4, 4, 4))
    tokens = torch.randn(12, 2)
    assert packed.is_dense
    assert unpack_rows(tokens, packed) is tokens


@settings(max_examples=30, deadline=None)
@given(some_lengths)
def test_rows_are_the_same_whenever_they_are_found(lengths: list[int]) -> None:
    at_once, later = PackedSequences(lengths), PackedSequences(lengths, rows=False)
    assert (at_once.has_rows, later.has_rows) == (True, False)
    assert later.to(torch.device("meta")).has_rows is False
    assert later.buckets == at_once.buckets
    assert torch.equal(later.gather, at_once.gather)
    assert torch.equal(later.restore, at_once.restore)
    assert later.has_rows
    assert later.is_dense == at_once.is_dense
    assert later.is_uniform() == (len(set(lengths)) == 1)
    assert later.is_uniform(max(lengths) + 1) is False


def test_rows_that_are_found_late_lie_where_the_layout_lies() -> None:
    on_meta = PackedSequences((3, 10), rows=False).to(torch.device("meta"))
    assert (on_meta.gather.device.type, on_meta.buckets[0].length) == ("meta", 10)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=7), st.sampled_from([0.0, 500.0, CPU_CALL_COST]))
def test_no_split_is_cheaper(lengths: list[int], call_cost: float) -> None:
    def price(groups: list[list[int]]) -> float:
        rows = [(len(group), max(group)) for group in groups]
        return sum(count * (length**2 / 2 + ROW_COST * length) + call_cost for count, length in rows)

    found = [[lengths[member] for member in bucket.members] for bucket in choose_buckets(lengths, call_cost)]
    ordered = sorted(lengths)
    every = (
        [ordered[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(ordered)))]
        for count in range(len(ordered))
        for cuts in itertools.combinations(range(1, len(ordered)), count)
    )
    # lengths that round up to the same multiple of eight count as equal
    slack = sum(8 * (length + 4 + ROW_COST) for length in lengths)
    assert price(found) <= min(map(price, every)) + slack


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_a_sequence_without_tokens_is_no_layout(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedSequences(lengths)


def test_pieces_of_a_layout() -> None:
    packed = PackedSequences((3, 10, 8))
    assert packed.split(4).lengths == (3, 4, 4, 2, 4, 4)
    assert packed.split(4) is packed.split(4)
    assert packed.split(10) is packed


def test_moving_to_where_it_is_keeps_it() -> None:
    packed = PackedSequences((3, 10))
    assert packed.to("cpu") is packed
    on_meta = packed.to(torch.device("meta"), non_blocking=True)
    assert (on_meta.device.type, on_meta.lengths, on_meta.split(4).device.type) == ("meta", (3, 10), "meta")


def test_it_is_made_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        packed = PackedSequences((3, 10))
    assert packed.device.type == packed.cu_seqlens.device.type == packed.sequence_ids.device.type == "cpu"
    assert packed.position_ids().device.type == "cpu"
