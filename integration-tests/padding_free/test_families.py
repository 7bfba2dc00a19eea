"""The families that foak names, padding-free: equal to padded at either side, with kernels and without, in bf16."""

from __future__ import annotations

import copy
from typing import Any

import packs
import pytest
import torch
from architectures import ARCHITECTURES, Architecture

from foak.core import AccelerationFramework
from foak.padding_free.packed import PACKED

EXAMPLES = packs.sequences((5, 17, 1, 9, packs.MAX_LENGTH, 2))
KERNELS = {
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": "auto",
    "fast_rope_embeddings": "auto",
    "fast_activation": "auto",
}
families = pytest.mark.parametrize("family", ARCHITECTURES, ids=lambda family: family.name)


def framework(*, kernels: bool = False) -> AccelerationFramework:
    training: dict[str, Any] = {"attention": {"padding_free": {}}}
    if kernels:
        training["fused_ops_and_kernels"] = KERNELS
    return AccelerationFramework({"plugins": {"training": training}})


@families
@pytest.mark.parametrize("kernels", [False, True], ids=["alone", "with kernels"])
def test_loss_and_every_gradient_equal_padded_training(family: Architecture, kernels: bool) -> None:
    plain = family.build()
    fast = copy.deepcopy(plain)
    framework(kernels=kernels).apply(fast)
    mine = packs.step(fast, packs.packed(EXAMPLES))
    for side in ("right", "left"):
        packs.assert_equal_steps(mine, packs.step(plain, packs.padded(EXAMPLES, side)))  # type: ignore[arg-type]


@families
def test_changing_a_sequence_leaves_the_others_bit_for_bit(family: Architecture) -> None:
    model = family.build()
    framework().apply(model)
    batch = packs.packed(EXAMPLES)
    layout = batch[PACKED]
    with torch.no_grad():
        before = model(**batch).logits.split(layout.lengths, dim=1)
        for number in (0, 4):
            own = layout.sequence_ids == number
            tokens = torch.where(own, (batch["input_ids"] + 7) % packs.VOCAB_SIZE, batch["input_ids"])
            after = model(**{**batch, "input_ids": tokens}).logits.split(layout.lengths, dim=1)
            for other, (one, two) in enumerate(zip(before, after, strict=True)):
                # experts multiply all tokens routed to them at once: how many there are decides the order of sums
                limit = 0.0 if "Mo" not in family.name and family.name != "Mixtral" else 1e-5
                equal = torch.equal(one, two) if limit == 0.0 else torch.allclose(one, two, rtol=limit, atol=limit)
                assert equal is (other != number), other


@families
def test_bf16_is_no_further_from_float32_than_padded(family: Architecture) -> None:
    plain = family.build()
    half = copy.deepcopy(plain).bfloat16()
    exact = packs.step(plain, packs.padded(EXAMPLES)).gradients

    def distance(step: packs.Step) -> float:
        pairs = [(step.gradients[name], gradient) for name, gradient in exact.items() if gradient is not None]
        apart = sum(float((mine.float() - theirs).norm() ** 2) for mine, theirs in pairs if mine is not None)
        return (apart / sum(float(theirs.norm() ** 2) for _, theirs in pairs)) ** 0.5

    padded = distance(packs.step(half, packs.padded(EXAMPLES)))
    framework().apply(half)
    # the same roundings in another order; they were equal to 4 % in every family
    assert distance(packs.step(half, packs.packed(EXAMPLES))) <= 1.25 * padded
