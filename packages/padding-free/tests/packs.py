"""Ragged sequences, the same sequences padded and packed, and one step of a model on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

from foak.core import AccelerationFramework
from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.packed import PACKED, PackedSequences
from foak.padding_free.plugin import PaddingFreePlugin

VOCAB_SIZE = 101
MAX_LENGTH = 64
LENGTHS = (5, 17, 1, 9, 23, 2)
FP32 = 1e-5
"""Relative: two fp32 computations of a two-layer model that differ in the order of their sums."""

Side = Literal["left", "right"]


def framework(multipack: dict[str, Any] | None = None, **padding_free: Any) -> AccelerationFramework:
    training: dict[str, Any] = {"attention": {"padding_free": padding_free}}
    if multipack is not None:
        training["dataloader"] = {"multipack": multipack}
    return AccelerationFramework({"plugins": {"training": training}}, plugins=[PaddingFreePlugin])


def build(prefix: str = "Llama", **fields: Any) -> Any:
    """A two-layer model with random weights, those of the norms included."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LENGTH,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **fields,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def sequences(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[dict[str, list[int]]]:
    """Examples of which the second ignores half of its labels, as a prompt's."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
        ignored = length // 2 if number == 1 else 0
        examples.append({"input_ids": ids, "labels": [-100] * ignored + ids[ignored:]})
    return examples


def padded(examples: Sequence[dict[str, list[int]]], side: Side = "right") -> dict[str, torch.Tensor]:
    """The padded batch; positions count from a sequence's first token."""
    longest = max(len(example["input_ids"]) for example in examples)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for example in examples:
        length = len(example["input_ids"])
        fields = (("input_ids", example["input_ids"], 0), ("labels", [-100, *example["labels"][1:]], -100))
        for name, values, filler in (*fields, ("attention_mask", [1] * length, 0)):
            fill = [filler] * (longest - length)
            rows[name].append(fill + values if side == "left" else values + fill)
    batch = {name: torch.tensor(values) for name, values in rows.items()}
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


def packed(examples: Sequence[dict[str, list[int]]], *, call_cost: float = 0.0) -> dict[str, Any]:
    """The packed batch, with as many buckets as lengths suggest where calls cost nothing."""
    batch = PaddingFreeCollator()(examples)
    batch[PACKED] = PackedSequences(batch[PACKED].lengths, call_cost)
    return batch


@dataclass
class Step:
    """A training step: loss, and parameter name to gradient."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]


def step(model: Any, batch: dict[str, Any], **kwargs: Any) -> Step:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch, **kwargs).loss
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return Step(loss.detach(), gradients)


def assert_equal_steps(actual: Step, expected: Step, tolerance: float = FP32) -> None:
    """Equal losses and gradients; a gradient that is zero but for rounding counts by the model's largest."""
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance, atol=0.0)
    assert actual.gradients.keys() == expected.gradients.keys()
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g is not None)
    for name, gradient in expected.gradients.items():
        mine = actual.gradients[name]
        assert (mine is None) == (gradient is None), name
        if gradient is not None and mine is not None:
            distance = float((mine - gradient).abs().max())
            assert distance <= tolerance * max(float(gradient.abs().max()), 1e-3 * largest), (name, distance)
