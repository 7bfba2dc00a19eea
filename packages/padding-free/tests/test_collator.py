"""The collator: from examples, from padded batches at either side, from batches that are flat already."""

from __future__ import annotations

from typing import Any

import numpy as np
import packs
import pytest
import torch
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PreTrainedTokenizerFast

from foak.core import UnsupportedError
from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.packed import PACKED

EXAMPLES = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
    {"input_ids": [8], "labels": [8]},
    {"input_ids": [9, 10, 11, 12], "labels": [-100, -100, -100, -100]},
]
FLAT = {
    "input_ids": [5, 6, 7, 8, 9, 10, 11, 12],
    "labels": [-100, 6, 7, -100, -100, -100, -100, -100],
    "position_ids": [0, 1, 2, 0, 0, 1, 2, 3],
}


def assert_flat(batch: dict[str, Any]) -> None:
    assert batch[PACKED].lengths == (3, 1, 4)
    assert {name: value.tolist() for name, value in batch.items() if name != PACKED} == {
        name: [value] for name, value in FLAT.items()
    }


def test_examples_are_laid_end_to_end() -> None:
    assert_flat(PaddingFreeCollator()(EXAMPLES))


def test_without_labels_every_token_is_learned() -> None:
    batch = PaddingFreeCollator()([{"input_ids": [5, 6]}, {"input_ids": torch.tensor([7, 8, 9])}])
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9]]


def test_examples_of_arrays_and_of_no_tokens() -> None:
    arrays = [{name: np.array(values, np.int32) for name, values in example.items()} for example in EXAMPLES]
    batch = PaddingFreeCollator()([arrays[0], {"input_ids": [], "labels": []}, *arrays[1:]])
    assert_flat(batch)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_inside_examples_is_left_out(side: packs.Side) -> None:
    rows = packs.padded(EXAMPLES, side)
    names = ("input_ids", "labels", "attention_mask")
    assert_flat(PaddingFreeCollator()([{name: rows[name][number] for name in names} for number in range(3)]))


def test_labels_that_do_not_belong_to_their_tokens_are_refused() -> None:
    examples = [{"input_ids": [4, 5, 6], "labels": [4, 5]}, {"input_ids": [4, 5], "labels": [4, 5, 6]}]
    with pytest.raises(ValueError, match="example 0 of a batch has 3 input_ids, but 2 labels"):
        PaddingFreeCollator()(examples)


@pytest.mark.parametrize("flat", [False, True], ids=["examples", "already flat"])
def test_rows_of_buckets_are_found_where_a_model_needs_them(flat: bool) -> None:
    def found(lengths: tuple[int, ...], rows: bool) -> bool:
        collator = DataCollatorWithFlattening() if flat else None
        batch = PaddingFreeCollator(collator, rows=rows)(packs.sequences(lengths))
        assert batch[PACKED].lengths == lengths
        return batch[PACKED].has_rows

    assert found((3, 9, 2), True)
    assert not found((3, 9, 2), False)
    assert found((4, 4), False), "a dense batch may be taken as one"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_flattened(side: packs.Side) -> None:
    assert_flat(PaddingFreeCollator(lambda examples: packs.padded(examples, side))(EXAMPLES))


def test_a_collator_of_transformers_is_wrapped() -> None:
    from tokenizers import Tokenizer, models

    words = {str(number): number for number in range(20)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="0")
    assert_flat(PaddingFreeCollator(DataCollatorForSeq2Seq(tokenizer))([dict(example) for example in EXAMPLES]))


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_what_is_flat_already_is_recognised(options: dict[str, bool]) -> None:
    assert_flat(PaddingFreeCollator(DataCollatorWithFlattening(**options))([dict(example) for example in EXAMPLES]))


def test_other_values_of_tokens_go_along() -> None:
    batch = packs.padded(EXAMPLES) | {"token_type_ids": torch.arange(12).view(3, 4), "weights": torch.ones(3, 4, 2)}
    flat = PaddingFreeCollator(lambda examples: batch)(EXAMPLES)
    assert flat["token_type_ids"].tolist() == [[0, 1, 2, 4, 8, 9, 10, 11]]
    assert flat["weights"].shape == (1, 8, 2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_that_the_batch_brings_are_kept(side: packs.Side) -> None:
    for shift in (0, 7):
        batch = packs.padded(EXAMPLES, side)
        batch["position_ids"] += shift
        flat = PaddingFreeCollator(lambda examples, batch=batch: batch)(EXAMPLES)
        assert flat["position_ids"].tolist() == [[place + shift for place in FLAT["position_ids"]]]
        assert flat[PACKED].lengths == (3, 1, 4)
        assert flat[PACKED].restarts == (shift == 0)


def test_an_empty_row_of_a_padded_batch_is_left_out() -> None:
    batch = packs.padded(EXAMPLES)
    batch["attention_mask"][1] = 0
    assert PaddingFreeCollator(lambda examples: batch)(EXAMPLES)[PACKED].lengths == (3, 4)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"pixel_values": torch.ones(1, 3)}, "the data collator gives pixel_values"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, "needs an attention_mask in the data collator's batch"),
        (packs.padded(EXAMPLES) | {"pixel_values": torch.ones(3, 2, 2)}, r"which pixel_values .* has not \(\(3, 2, 2"),
        (packs.padded(EXAMPLES) | {"position_ids": torch.ones(3, 3, 4)}, r"which position_ids .* has not \(\(3, 3, 4"),
        (
            packs.padded(EXAMPLES) | {"attention_mask": torch.tensor([[1, 0, 1, 0]] * 3)},
            "hides tokens inside a sequence",
        ),
        (packs.padded(EXAMPLES) | {"names": ["a", "b", "c"]}, "which names .* has not"),
        (packs.padded(EXAMPLES) | {"attention_mask": torch.ones(3, 1, 4, 4)}, r"but .* gives one of \(3, 1, 4, 4\)"),
        ({"input_ids": torch.ones(1, 2), "attention_mask": torch.zeros(1, 2)}, "no token at all"),
    ],
)
def test_what_cannot_be_flattened_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        PaddingFreeCollator(lambda examples: batch)(EXAMPLES)
