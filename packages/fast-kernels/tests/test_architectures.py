"""Every named architecture: what must be patched in it, and that it trains exactly as without foak."""

from __future__ import annotations

import copy
import importlib
from unittest import mock

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from pairs import (
    BY_NAME,
    FP32_TOLERANCE,
    LargestTensor,
    accelerate,
    assert_same_gradients,
    assert_untouched,
    counting_computed,
    distance,
    pair,
    pair_of,
    snapshot,
    step,
)
from torch import nn

EVERY = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)

# name: (gated MLPs that are patched, rotary attentions that are patched)
MLPS_AND_ATTENTIONS = {
    "Llama": (2, 2),
    "Mistral": (2, 2),
    "Mixtral": (0, 2),
    "Granite": (2, 2),
    "GraniteMoe": (0, 2),
    "GraniteMoeShared": (2, 2),
    "GraniteMoeHybrid": (2, 1),
    "GPTBigCode": (0, 0),
    "Qwen2": (2, 2),
    "Qwen3": (2, 2),
    "Gemma 2": (2, 2),
    "Gemma 3": (2, 2),
    "Phi-3": (2, 2),
    "OLMo 2": (2, 2),
    "SmolLM3": (2, 2),
}


def of_class(model: nn.Module, *endings: str) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__.endswith(endings)}


@EVERY
def test_what_must_be_patched(architecture: Architecture) -> None:
    both = pair(architecture)
    patched: dict[str, set[str]] = {}
    for record in both.report.patched:
        patched.setdefault(record.kernel, set()).add(record.module)
    activations = patched.get("swiglu", set()) | patched.get("geglu", set())
    mlps, attentions = MLPS_AND_ATTENTIONS[architecture.name]

    assert patched.get("rms_norm", set()) == of_class(both.plain, "RMSNorm")
    assert patched.get("layer_norm", set()) == of_class(both.plain, "LayerNorm")
    assert len(patched.get("rms_norm", set()) | patched.get("layer_norm", set())) >= 5
    assert len(patched.get("rope", set())) == attentions
    assert patched.get("rope", set()) <= of_class(both.plain, "Attention")
    assert len(activations) == mlps
    assert activations <= of_class(both.plain, "MLP")
    assert patched["linear_cross_entropy"] == {"", "lm_head"}


@EVERY
def test_nothing_is_kept_without_a_known_reason(architecture: Architecture) -> None:
    kept = {(r.module_class, r.reason.partition(":")[0].partition(" (")[0]) for r in pair(architecture).report.kept}
    expected = {
        "Mixtral": {("MixtralExperts", "packed experts")},
        "GraniteMoe": {("GraniteMoeExperts", "packed experts")},
        "GraniteMoeShared": {("GraniteMoeSharedExperts", "packed experts")},
        "GraniteMoeHybrid": {
            ("GraniteMoeHybridExperts", "packed experts"),
            ("GraniteMoeHybridRMSNormGated", "a norm whose forward takes more than its input"),
        },
    }
    assert kept == expected.get(architecture.name, set())


@EVERY
@pytest.mark.parametrize("fast_loss", ["fused_linear", True])
def test_loss_and_every_gradient(architecture: Architecture, fast_loss: bool | str) -> None:
    both = pair(architecture, fast_loss=fast_loss)
    batch = architecture.batch()
    with counting_computed() as computed:
        expected, actual = (step(model, batch) for model in both.both)
    assert not computed
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert distance(actual, expected) <= FP32_TOLERANCE
    assert_same_gradients(*both.both)


@EVERY
def test_logits_are_the_plain_ones(architecture: Architecture) -> None:
    both = pair(architecture)
    for training in (True, False):
        expected, actual = (model.train(training)(**architecture.batch()).logits for model in both.both)
        assert actual.dtype == expected.dtype
        assert distance(actual + 0, expected) <= FP32_TOLERANCE


@EVERY
def test_five_optimizer_steps(architecture: Architecture) -> None:
    """AdamW divides by a gradient's size, so the rounding of small ones counts in full: 100 times the tolerance."""
    both = pair(architecture)
    losses, updates = [], []
    for model in both.both:
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
        losses.append([])
        for seed in range(5):
            losses[-1].append(step(model, architecture.batch(seed=seed)))
            optimizer.step()
        updates.append([p.detach() - old for p, old in zip(model.parameters(), start, strict=True)])
    for expected, actual in zip(*losses, strict=True):
        assert distance(actual, expected) <= FP32_TOLERANCE
    for expected, actual in zip(*updates, strict=True):
        assert distance(actual, expected) <= 100 * FP32_TOLERANCE
    assert any(update.abs().max() > 1e-3 for update in updates[0])


@EVERY
def test_bf16_is_as_near_to_fp32_as_the_plain_model(architecture: Architecture) -> None:
    plain = architecture.build(torch.bfloat16)
    exact = copy.deepcopy(plain).float()  # not fp64, which grouped products of experts do not take
    both = pair_of(plain)
    batch = architecture.batch()
    loss = step(exact, batch)
    errors = []
    for model in both.both:
        loss_error = distance(step(model, batch), loss)
        squares = [
            distance(p.grad, reference.grad) ** 2
            for p, reference in zip(model.parameters(), exact.parameters(), strict=True)
            if reference.grad is not None and reference.grad.norm() > 0
        ]
        errors.append((loss_error, (sum(squares) / len(squares)) ** 0.5))
    (plain_loss, plain_gradient), (fast_loss, fast_gradient) = errors
    # a loss of about 4.6 that comes out in fp32: within two roundings of a bf16 value where plain was luckier
    assert fast_loss <= max(1.5 * plain_loss, 2 * torch.finfo(torch.bfloat16).eps / 4)
    assert fast_gradient <= 1.5 * plain_gradient


@EVERY
def test_restore_leaves_no_trace(architecture: Architecture) -> None:
    model = architecture.build()
    before = snapshot(model)
    framework = accelerate(model)
    assert any(snapshot(model)[name].keys() != attributes.keys() for name, attributes in before.items())
    step(model, architecture.batch())
    model.zero_grad()
    framework.restore()
    assert_untouched(model, before)


@EVERY
def test_no_tensor_of_the_size_of_the_logits(architecture: Architecture) -> None:
    """With V far above all other sizes, nothing in a step has N * V elements (and the plain step does).

    The plain twin of the loss works on chunks of a fixed number of bytes; here of 128 rows, its least.
    """
    vocab_size = 4099
    tiny = Architecture(architecture.name, architecture.model, {**architecture.config, "vocab_size": vocab_size})
    model = tiny.build()
    # tokens more than H, so that the product is larger than the head's weight and its gradient
    length = 60
    batch = {key: value.repeat(5, 1) for key, value in BY_NAME["Llama"].batch(length=length).items()}
    rows = batch["input_ids"].numel()
    both = pair_of(model)
    largest = []
    chunks = importlib.import_module("foak.kernels.linear_cross_entropy.chunks")
    for candidate in both.both:
        with LargestTensor() as mode, mock.patch.object(chunks, "CPU_BYTES", 1):
            step(candidate, batch)
        largest.append(mode.numel)
    assert rows > 2 * 64
    assert batch["input_ids"].max() < VOCAB_SIZE
    assert largest[0] >= (rows - 10) * vocab_size
    assert largest[1] < rows * vocab_size // 2
