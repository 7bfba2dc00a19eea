"""On a GPU, with the compiled kernels: every architecture in every precision mode, dtypes under autocast, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture
from pairs import BY_NAME, FP32_TOLERANCE, Pair, assert_same_gradients, counting_computed, distance, pair_of, step

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def on_device(architecture: Architecture, dtype: torch.dtype = torch.float32, **switches: Any) -> Pair:
    return pair_of(architecture.build(dtype).to(DEVICE), **switches)


def batch_of(architecture: Architecture, **sizes: int) -> dict[str, torch.Tensor]:
    return {key: value.to(DEVICE) for key, value in architecture.batch(**sizes).items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("fast_loss", ["fused_linear", True])
def test_fp32(architecture: Architecture, fast_loss: bool | str) -> None:
    models = on_device(architecture, fast_loss=fast_loss)
    with counting_computed() as computed:
        expected, actual = (step(model, batch_of(architecture)) for model in models.both)
    assert not computed
    assert distance(actual, expected) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


DENSE = [a for a in ARCHITECTURES if "num_local_experts" not in a.config]
"""Without experts: one rounding can send a token to another expert, which says nothing about exactness."""


@pytest.mark.parametrize("architecture", DENSE, ids=lambda a: a.name)
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_16_bits_are_as_near_to_fp32_as_the_plain_model(architecture: Architecture, mode: str) -> None:
    models = on_device(architecture, torch.bfloat16 if mode == "bf16" else torch.float32)
    exact = copy.deepcopy(models.plain).float()
    batch = batch_of(architecture, size=4, length=40)
    loss = step(exact, batch)
    errors = []
    for model in models.both:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mode == "autocast"):
            loss_error = distance(step(model, batch), loss)
        squares = [
            distance(p.grad, reference.grad) ** 2
            for p, reference in zip(model.parameters(), exact.parameters(), strict=True)
            if p.grad is not None and reference.grad is not None and reference.grad.norm() > 0
        ]
        errors.append((loss_error, (sum(squares) / len(squares)) ** 0.5))
    (plain_loss, plain_gradient), (fast_loss, fast_gradient) = errors
    # where the plain loss is nearer by luck: within half a unit of bf16 of a loss of about 4.6
    assert fast_loss <= max(1.5 * plain_loss, torch.finfo(torch.bfloat16).eps / 2)
    assert fast_gradient <= 1.5 * plain_gradient


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_every_module_gives_the_plain_dtype(architecture: Architecture, mode: str) -> None:
    """Autocast has its own opinion on some ops: it runs torch's LayerNorm in fp32 on a GPU, and not on a CPU."""
    models = on_device(architecture, torch.bfloat16 if mode == "bf16" else torch.float32, fast_loss=False)
    seen: list[dict[str, torch.dtype]] = []
    for model in models.both:
        dtypes: dict[str, torch.dtype] = {}
        for name, module in model.named_modules():

            def record(m: Any, i: Any, o: Any, name: str = name, dtypes: dict[str, torch.dtype] = dtypes) -> None:
                if isinstance(o, torch.Tensor):
                    dtypes[name] = o.dtype

            module.register_forward_hook(record)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=mode == "autocast"):
            step(model, batch_of(architecture))
        seen.append(dtypes)
    assert len(seen[0]) > 10
    # the activation inside of a fused MLP is no longer called as a module
    fused = {name for name in seen[0] if name not in seen[1]}
    assert all(name.endswith(("act_fn", "activation_fn", "act", "activation")) for name in fused)
    assert seen[1] == {name: dtype for name, dtype in seen[0].items() if name not in fused}


def test_a_step_has_no_room_for_the_logits() -> None:
    """The logits alone are 256 MiB here, and the plain step holds several copies; the kernel's chunks are bounded."""
    wide = Architecture(
        "wide", "Llama", {**BY_NAME["Llama"].config, "vocab_size": 65536, "max_position_embeddings": 2048}
    )
    model = wide.build(torch.bfloat16).to(DEVICE)
    model.lm_head.weight.requires_grad_(False)  # a trained head adds its gradient, which is no smaller
    models = pair_of(model)
    batch = batch_of(wide, size=4, length=512)
    logits = batch["input_ids"].numel() * 65536 * 2
    peaks = []
    for candidate in models.both:
        step(candidate, batch)
        candidate.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(candidate, batch)
        candidate.zero_grad(set_to_none=True)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] > 2 * logits
    assert peaks[1] < logits
