"""Whole models on a GPU: which form of attention runs, equal steps, sequences apart bit for bit, no waiting."""

from __future__ import annotations

import copy
from typing import Any

import packs
import pytest
import torch

from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.packed import PACKED

pytestmark = pytest.mark.gpu
EXAMPLES = packs.sequences((50, 200, 1, 90, 230, 2))
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 256}


LATE = ((50, 200, 1, 90), (7,), (64,) * 8, (1, 1, 250, 3), (2, 5, 120, 33, 90, 61, 8), (1024, 1024))
"""Lengths of batches that come one after another; the last is dense, and long enough for SDPA."""


def on_gpu(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to("cuda") for name, value in batch.items()}


def models(dtype: torch.dtype, attention: str, prefix: str = "Llama", **fields: Any) -> tuple[Any, Any, Any]:
    plain = packs.build(prefix, **SIZES, **fields).cuda().to(dtype)
    fast = copy.deepcopy(plain)
    return plain, fast, packs.framework(attention=attention).apply(fast)


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
def test_bf16_is_no_further_from_float32_than_padded(attention: str, window: int | None) -> None:
    plain, fast, report = models(torch.bfloat16, attention, "Mistral", sliding_window=window)
    (record,) = report.patched
    expected = "sdpa over buckets of sequences" if attention == "sdpa" else "varlen_attn"
    assert record.kernel is not None
    assert record.kernel.startswith(expected), record.reason
    exact = packs.step(copy.deepcopy(plain).float(), on_gpu(packs.padded(EXAMPLES)))
    steps = [packs.step(plain, on_gpu(packs.padded(EXAMPLES))), packs.step(fast, on_gpu(packs.packed(EXAMPLES)))]
    distances = []
    for step in steps:
        pairs = [(step.gradients[name], gradient) for name, gradient in exact.gradients.items()]
        apart = sum(float((a.float() - b).norm() ** 2) for a, b in pairs if a is not None and b is not None)
        distances.append((apart / sum(float(b.norm() ** 2) for _, b in pairs if b is not None)) ** 0.5)
    assert distances[1] <= 1.5 * distances[0]  # the same roundings in another order, by another kernel


def test_float32_goes_over_buckets_and_equals_padded() -> None:
    plain, fast, _ = models(torch.float32, "auto")
    expected = packs.step(plain, on_gpu(packs.padded(EXAMPLES)))
    packs.assert_equal_steps(packs.step(fast, on_gpu(packs.packed(EXAMPLES))), expected, 10 * packs.FP32)


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_no_sequence_sees_another_bit_for_bit(attention: str) -> None:
    _, fast, _ = models(torch.bfloat16, attention)
    batch = on_gpu(packs.packed(EXAMPLES))
    lengths = batch[PACKED].lengths
    with torch.no_grad():
        before = fast(**batch).logits.split(lengths, dim=1)
        own = batch[PACKED].sequence_ids == 1
        changed = torch.where(own, (batch["input_ids"] + 7) % packs.VOCAB_SIZE, batch["input_ids"])
        after = fast(**{**batch, "input_ids": changed}).logits.split(lengths, dim=1)
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [n != 1 for n in range(len(lengths))]


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_a_step_does_not_wait_for_the_device(attention: str) -> None:
    _, fast, _ = models(torch.bfloat16, attention)
    batch = on_gpu(packs.packed(EXAMPLES))
    packs.step(fast, batch)
    items = torch.tensor(500, device="cuda")
    fast.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(**batch, num_items_in_batch=items).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["auto", "varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 40])
def test_no_layer_waits_whatever_the_lengths(attention: str, window: int | None) -> None:
    model = packs.build("Mistral", **SIZES, sliding_window=window).cuda().bfloat16()
    packs.framework(attention=attention).apply(model)
    collator = PaddingFreeCollator(device_type="cuda")
    batches = [on_gpu(collator(packs.sequences(lengths))) for lengths in LATE]
    items = torch.tensor(500, device="cuda")
    model(**batches[0], num_items_in_batch=items).loss.backward()
    losses = []
    for batch in batches:
        model.zero_grad()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = model(**batch, num_items_in_batch=items).loss
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        losses.append(float(loss.detach()))
    assert all(loss > 0 for loss in losses), losses
