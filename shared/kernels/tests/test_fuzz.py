"""Every op on shapes, memory layouts, dtypes and options that hypothesis thinks of, against its formula in fp64.

The formulas here are PyTorch's own, not the twins'. The same examples in every run;
`FOAK_FUZZ_EXAMPLES=20000 pytest shared/kernels/tests/test_fuzz.py` takes that many others instead.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foak.kernels import (
    cross_entropy,
    dequantize_gptq,
    geglu,
    layer_norm,
    linear_cross_entropy,
    lora_linear,
    rms_norm,
    rope,
    swiglu,
)
from foak.kernels.gptq.packing import pack_gptq
from foak.kernels.testing import LAYOUTS, check_against_fp64, laid_out

EXAMPLES = int(os.environ.get("FOAK_FUZZ_EXAMPLES", "0"))
FEW = {"reference": 50, "triton": 5}  # the kernels run in an interpreter here
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(LAYOUTS)
leading = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)
lengths = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 129, 200]))
seeds = st.integers(0, 2**16)
flags = st.booleans()


def explore(backend: str, check: Callable[[Any], None]) -> None:
    """Runs a check on drawn data; `check` draws from what it is given."""

    @settings(max_examples=EXAMPLES or FEW[backend], deadline=None, derandomize=not EXAMPLES, database=None)
    @given(st.data())
    def run(data: Any) -> None:
        check(data.draw)

    run()


def tensor(draw: Any, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal values in a drawn dtype, memory layout and need of a gradient."""
    generator = torch.Generator().manual_seed(draw(seeds))
    values = torch.randn(shape, generator=generator).to(draw(dtypes) if dtype is None else dtype).to(device)
    layout = draw(layouts)
    if values.dim() > 1 or layout != "transposed":
        values = laid_out(values, layout)
    return values.requires_grad_(draw(flags))


def rows_of(x: Tensor) -> int:
    return max(x.shape[-1], x.numel() // max(x.shape[-1], 1))


def test_rms_norm(backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        x = tensor(draw, device, (*draw(leading), draw(lengths)))
        weight = tensor(draw, device, x.shape[-1:]) if draw(flags) else None
        # Rows of few values leave the gradient little but rounding where epsilon is small.
        eps, offset = (0.5 if x.shape[-1] < 16 else draw(st.sampled_from([1e-6, 1e-3]))), float(draw(flags))

        def formula(x: Tensor, weight: Tensor | None) -> Tensor:
            y = F.rms_norm(x, x.shape[-1:], None, eps)
            return y if weight is None else y * (weight + offset)

        check_against_fp64(
            lambda x, w: rms_norm(x, w, eps, offset), formula, [x, weight], reduction_length=rows_of(x), roundings=2
        )

    explore(backend, check)


def test_layer_norm(backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        x = tensor(draw, device, (*draw(leading), draw(lengths.filter(lambda length: length > 3))))
        dtype = draw(dtypes)
        weight = tensor(draw, device, x.shape[-1:], dtype) if draw(flags) else None
        bias = tensor(draw, device, x.shape[-1:], dtype) if draw(flags) else None
        eps = 0.5 if x.shape[-1] < 16 else 1e-5
        check_against_fp64(
            lambda x, w, b: layer_norm(x, w, b, eps),
            lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps),
            [x, weight, bias],
            reduction_length=rows_of(x),
            roundings=2,
        )

    explore(backend, check)


@pytest.mark.parametrize("activation", ["silu", "none", "tanh"])
def test_gated_activations(activation: str, backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        shape = (*draw(leading), draw(lengths))
        gate, up = tensor(draw, device, shape), tensor(draw, device, shape)

        def run(g: Tensor, u: Tensor) -> Tensor:
            return swiglu(g, u) if activation == "silu" else geglu(g, u, activation)

        def formula(g: Tensor, u: Tensor) -> Tensor:
            return (F.silu(g) if activation == "silu" else F.gelu(g, approximate=activation)) * u

        check_against_fp64(run, formula, [gate, up])

    explore(backend, check)


def test_rope(backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        batch, positions, width = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(2, 40))
        half = draw(st.integers(1, width // 2))
        heads_dim = draw(st.sampled_from([1, 2]))
        states = []
        for _ in range(2):
            heads = draw(st.integers(1, 4))
            shape = (batch, heads, positions, width) if heads_dim == 1 else (batch, positions, heads, width)
            states.append(tensor(draw, device, shape))
        dtype, angles = draw(dtypes), (draw(st.sampled_from([1, batch])), positions, 2 * half)
        cos, sin = (tensor(draw, device, angles, dtype).detach() for _ in range(2))

        def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            turning, passing = x[..., : 2 * half], x[..., 2 * half :]
            low, high = turning[..., :half], turning[..., half:]
            cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
            return torch.cat((turning * cos + torch.cat((-high, low), -1) * sin, passing), -1)

        check_against_fp64(
            lambda q, k, c, s: rope(q, k, c, s, heads_dim),
            lambda q, k, c, s: (rotated(q, c, s), rotated(k, c, s)),
            [*states, cos, sin],
        )

    explore(backend, check)


def loss_options(draw: Any, vocab_size: int) -> dict[str, Any]:
    """Options of the losses.

    Smoothing makes the gradient a difference of a probability and a share, of which in a tiny vocabulary nothing may
    be left but what both were rounded by.
    """
    return {
        "reduction": draw(st.sampled_from(["mean", "sum", "none"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])) if vocab_size >= 16 else 0.0,
        "logit_scale": draw(st.sampled_from([1.0, 0.25, 3.0])),
        "softcap": draw(st.sampled_from([None, 5.0, 30.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
    }


def loss_formula(
    logits: Tensor, labels: Tensor, *, reduction: str, label_smoothing: float, logit_scale: float, z_loss: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    z = logits * logit_scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    kept = labels != -100
    losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=label_smoothing)
    losses = losses + torch.where(kept, z_loss * z.logsumexp(-1).square(), 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / (kept.sum().clamp(min=1) if reduction == "mean" else 1)


def drawn_labels(draw: Any, count: int, vocab_size: int, device: torch.device) -> Tensor:
    given_ = st.one_of(st.just(-100), st.integers(0, vocab_size - 1))
    found = draw(st.lists(given_, min_size=count, max_size=count))
    return torch.tensor(found, dtype=torch.int64, device=device)


def test_cross_entropy(backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        rows, vocab_size = draw(st.integers(0, 9)), draw(lengths)
        logits = tensor(draw, device, (rows, vocab_size)).detach().requires_grad_()
        labels, options = drawn_labels(draw, rows, vocab_size, device), loss_options(draw, vocab_size)
        check_against_fp64(
            lambda x: cross_entropy(x, labels, **options),
            lambda x: loss_formula(x, labels, **options),
            [logits],
            reduction_length=4 * vocab_size,
            roundings=2,
        )

    explore(backend, check)


def test_linear_cross_entropy(backend: str, device: torch.device, poisoned: None) -> None:
    def check(draw: Any) -> None:
        rows, vocab_size, width = draw(st.integers(0, 9)), draw(lengths), draw(st.integers(1, 33))
        hidden = tensor(draw, device, (rows, width), torch.float32)
        weight = tensor(draw, device, (vocab_size, width), torch.float32)
        bias = tensor(draw, device, (vocab_size,), torch.float32) if draw(flags) else None
        labels, options = drawn_labels(draw, rows, vocab_size, device), loss_options(draw, vocab_size)
        check_against_fp64(
            lambda h, w, b: linear_cross_entropy(h, w, labels, b, **options),
            lambda h, w, b: loss_formula(F.linear(h, w, b), labels, **options),
            [hidden, weight, bias],
            # logits of a size of sqrt(width), times the scale, lose as much more to rounding
            reduction_length=64 * max(vocab_size, width),
            roundings=2,
        )

    explore(backend, check)


def test_lora_linear(backend: str, device: torch.device) -> None:
    def check(draw: Any) -> None:
        dtype = draw(dtypes)
        narrow = draw(flags)
        sizes = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 9))
        width, out_features, rank = sizes
        x = tensor(draw, device, (*draw(leading), width), dtype)
        weight = tensor(draw, device, (out_features, width), dtype).detach()
        a = tensor(draw, device, (rank, width), dtype if narrow else torch.float32)
        b = tensor(draw, device, (out_features, rank), dtype if narrow else torch.float32)
        bias = tensor(draw, device, (out_features,), dtype).detach() if draw(flags) else None
        scaling = draw(st.sampled_from([0.0, 0.5, 2.0]))
        check_against_fp64(
            lambda x, w, a, b, bias: lora_linear(x, w, a, b, scaling, bias),
            lambda x, w, a, b, bias: F.linear(x, w, bias) + scaling * (x @ a.t()) @ b.t(),
            [x, weight, a, b, bias],
            reduction_length=max(*sizes, x.numel() // width),
            # a factor, what lies between the factors, and the sum of two gradients are rounded on their way
            roundings=6,
            rounded_to=dtype,
        )

    explore(backend, check)


def test_dequantize_gptq(backend: str, device: torch.device) -> None:
    def check(draw: Any) -> None:
        bits, offset = draw(st.sampled_from([2, 3, 4, 8])), draw(st.sampled_from([0, 1]))
        out_features, groups = draw(st.integers(1, 12)) * 32, draw(st.integers(1, 3))
        in_features = draw(st.integers(1, 4)) * 32
        generator = torch.Generator().manual_seed(draw(seeds))
        codes = torch.randint(0, 2**bits, (out_features, in_features), generator=generator, dtype=torch.int32)
        zeros = torch.randint(0, 2**bits, (groups, out_features), generator=generator, dtype=torch.int32)
        scales = torch.rand(groups, out_features, generator=generator).half()
        g_idx = torch.randint(0, groups, (in_features,), generator=generator, dtype=torch.int32)
        packed = pack_gptq(codes, zeros, scales, g_idx, bits, offset)
        stored = [t.to(device) for t in (packed.qweight, packed.qzeros, packed.scales, packed.g_idx)]
        found = dequantize_gptq(*stored, bits, zero_offset=offset, dtype=torch.float32)
        index = g_idx.long()
        expected = (codes - zeros.t()[:, index]).float() * scales.t()[:, index].float()
        assert torch.equal(found.cpu(), expected)

    explore(backend, check)
