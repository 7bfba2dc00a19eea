"""`rope` against fp64: values and every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from foak.kernels import rope
from foak.kernels.rope.reference import rope_reference
from foak.kernels.testing import LAYOUTS, check_against_fp64, laid_out

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()


def angles(positions: Tensor, rotated: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`cos` and `sin` [B, S, rotated] of `positions` [B, S], as transformers' rotary modules make them."""
    frequencies = 100.0 ** (-torch.arange(0, rotated, 2, device=positions.device) / rotated)
    angle = positions[..., None].float() * frequencies
    both = torch.cat((angle, angle), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, **options: object) -> None:
    check_against_fp64(
        lambda *tensors: rope(*tensors, unsqueeze_dim),
        lambda *tensors: rope_reference(*tensors, unsqueeze_dim),
        [q, k, cos, sin],
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(("dtype", "angle_dtype"), itertools.product(DTYPES, DTYPES))
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_values_and_gradients(
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    unsqueeze_dim: int,
    backend: str,
    device: torch.device,
    poisoned: None,
) -> None:
    shape = (2, 6, 5, 12) if unsqueeze_dim == 1 else (2, 5, 6, 12)
    q = leaf(*shape, dtype=dtype, device=device)
    k = leaf(*shape, dtype=dtype, device=device, seed=1).narrow(unsqueeze_dim, 0, 2).detach().requires_grad_()
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 0, 1, 2]], device=device)
    cos, sin = angles(positions, 12, angle_dtype)
    check(q, k, cos, sin, unsqueeze_dim)
    rotated_q, rotated_k = rope(q, k, cos, sin, unsqueeze_dim)
    assert rotated_q.dtype is rotated_k.dtype is torch.promote_types(dtype, angle_dtype)


@pytest.mark.parametrize(
    ("head_size", "rotated", "q_heads", "k_heads"),
    [(2, 2, 1, 1), (6, 6, 3, 1), (64, 64, 9, 3), (80, 32, 5, 5), (13, 6, 3, 1), (24, 20, 4, 1), (70, 70, 40, 1)],
)
def test_head_sizes_and_counts(
    head_size: int, rotated: int, q_heads: int, k_heads: int, backend: str, device: torch.device, poisoned: None
) -> None:
    """Also partial rotary, an odd head of which an even part is rotated, and one head of keys for all queries."""
    q = leaf(2, q_heads, 3, head_size, dtype=torch.bfloat16, device=device)
    k = leaf(2, k_heads, 3, head_size, dtype=torch.bfloat16, device=device, seed=1)
    check(q, k, *angles(torch.arange(3, device=device)[None], rotated, torch.bfloat16))


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 7), (5, 3), (4, 4)])
@pytest.mark.parametrize("rows", ["one", "each", "expanded"])
def test_batches_and_positions(batch: int, length: int, rows: str, backend: str, device: torch.device) -> None:
    q = leaf(batch, 2, length, 8, dtype=torch.float32, device=device)
    k = leaf(batch, 1, length, 8, dtype=torch.float32, device=device, seed=1)
    positions = torch.arange(length, device=device)[None] + 100
    if rows == "each":
        positions = positions + 3 * torch.arange(batch, device=device)[:, None]
    cos, sin = angles(positions, 8, torch.float32)
    if rows == "expanded":
        cos, sin = cos.expand(batch, length, 8), sin.expand(batch, length, 8)
    check(q, k, cos, sin)


@pytest.mark.parametrize("layout", [*LAYOUTS, "projection", "packed"])
@pytest.mark.parametrize("upstream_layout", [*LAYOUTS, "expanded"])
def test_memory_layouts(layout: str, upstream_layout: str, backend: str, device: torch.device, poisoned: None) -> None:
    q = leaf(2, 4, 5, 8, dtype=torch.bfloat16, device=device).detach()
    k = leaf(2, 2, 5, 8, dtype=torch.bfloat16, device=device, seed=1).detach()
    if layout == "projection":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    elif layout == "packed":
        q, k = torch.cat((q, k), dim=1).transpose(1, 2).contiguous().transpose(1, 2).split((4, 2), dim=1)
    else:
        q, k = laid_out(q, layout), laid_out(k, layout)
    cos, sin = angles(torch.arange(5, device=device)[None], 8, torch.bfloat16)
    cos = laid_out(cos, "every_second")

    def upstream(index: int, output: Tensor) -> Tensor:
        if upstream_layout == "expanded":
            return torch.full((), 0.75 + index, dtype=output.dtype, device=device).expand(output.shape)
        return laid_out(leaf(*output.shape, dtype=output.dtype, device=device, seed=index).detach(), upstream_layout)

    check(q.requires_grad_(), k.requires_grad_(), cos, sin, upstream=upstream)


def test_the_layout_of_the_projection_is_kept(device: torch.device) -> None:
    """Elementwise ops keep it too; attention and the projection's backward would copy otherwise."""
    q = leaf(2, 5, 4, 8, dtype=torch.float32, device=device).transpose(1, 2)
    k = leaf(2, 5, 2, 8, dtype=torch.float32, device=device).transpose(1, 2)
    for rotated in rope(q, k, *angles(torch.arange(5, device=device)[None], 8, torch.float32)):
        assert rotated.transpose(1, 2).is_contiguous()


def test_halves_of_cos_that_differ(backend: str, device: torch.device) -> None:
    q = leaf(2, 3, 5, 8, dtype=torch.float32, device=device)
    k = leaf(2, 1, 5, 8, dtype=torch.float32, device=device, seed=1)
    cos, sin = (leaf(1, 5, 8, dtype=torch.float32, device=device, seed=seed).detach() for seed in (2, 3))
    check(q, k, cos, sin)


@pytest.mark.parametrize(("q_trains", "k_trains"), itertools.product([True, False], repeat=2))
def test_frozen_inputs(q_trains: bool, k_trains: bool, backend: str, device: torch.device, poisoned: None) -> None:
    q = leaf(2, 3, 5, 8, dtype=torch.bfloat16, device=device).requires_grad_(q_trains)
    k = leaf(2, 1, 5, 8, dtype=torch.bfloat16, device=device).requires_grad_(k_trains)
    check(q, k, *angles(torch.arange(5, device=device)[None], 8, torch.bfloat16))


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used: int, backend: str, device: torch.device, poisoned: None) -> None:
    q = leaf(2, 3, 5, 8, dtype=torch.float32, device=device)
    k = leaf(2, 3, 5, 8, dtype=torch.float32, device=device, seed=1)
    cos, sin = angles(torch.arange(5, device=device)[None], 8, torch.float32)
    check_against_fp64(
        lambda *tensors: rope(*tensors)[used], lambda *tensors: rope_reference(*tensors)[used], [q, k, cos, sin]
    )


def test_learned_angles_have_gradients(backend: str, device: torch.device) -> None:
    q = leaf(2, 3, 5, 8, dtype=torch.float32, device=device)
    k = leaf(2, 1, 5, 8, dtype=torch.float32, device=device, seed=1)
    cos, sin = (leaf(1, 5, 8, dtype=torch.float32, device=device, seed=seed) for seed in (2, 3))
    check(q, k, cos, sin, reduction_length=8)


def test_inputs_are_left_as_they_are(backend: str, device: torch.device) -> None:
    q = leaf(2, 3, 5, 8, dtype=torch.float32, device=device)
    k = leaf(2, 1, 5, 8, dtype=torch.float32, device=device, seed=1)
    cos, sin = angles(torch.arange(5, device=device)[None], 8, torch.float32)
    before = [tensor.detach().clone() for tensor in (q, k, cos, sin)]
    sum(rotated.sum() for rotated in rope(q, k, cos, sin)).backward()  # type: ignore[union-attr]
    for tensor, value in zip((q, k, cos, sin), before, strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 3, 0, 8), (2, 0, 5, 8)])
def test_nothing_to_rotate(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    q, k = (torch.empty(shape, device=device, requires_grad=True) for _ in range(2))
    cos, sin = angles(torch.arange(shape[2], device=device)[None], 8, torch.float32)
    rotated_q, rotated_k = rope(q, k, cos, sin)
    (rotated_q.sum() + rotated_k.sum()).backward()
    assert rotated_q.shape == rotated_k.shape == shape
    assert q.grad is not None
    assert q.grad.shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_magnitudes(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    q = (leaf(2, 3, 5, 8, dtype=torch.float32, device=device) * 5000).detach().to(dtype).requires_grad_()
    k = (leaf(2, 1, 5, 8, dtype=torch.float32, device=device) * 5000).detach().to(dtype).requires_grad_()
    check(q, k, *angles(torch.arange(5, device=device)[None], 8, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "head_size", "rotated"),
    [(32, 8, 128, 128), (9, 3, 64, 64), (32, 32, 80, 32), (8, 4, 256, 256), (71, 1, 64, 64), (40, 40, 512, 512)],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_of_real_models(
    dtype: torch.dtype, q_heads: int, k_heads: int, head_size: int, rotated: int, device: torch.device
) -> None:
    q = leaf(2, 333, q_heads, head_size, dtype=dtype, device=device).transpose(1, 2).detach().requires_grad_()
    k = leaf(2, 333, k_heads, head_size, dtype=dtype, device=device, seed=1).transpose(1, 2).detach().requires_grad_()
    check(q, k, *angles(torch.arange(333, device=device)[None], rotated, dtype))


@pytest.mark.parametrize(
    ("q", "k", "cos", "unsqueeze_dim", "message"),
    [
        ((2, 3, 5, 8), (2, 3, 5, 8), (1, 5, 8), 0, "unsqueeze_dim is 0"),
        ((2, 3, 5), (2, 3, 5, 8), (1, 5, 8), 1, "have 3, 4 and 3 dimensions"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (5, 8), 1, "have 4, 4 and 2 dimensions"),
        ((2, 3, 5, 8), (2, 3, 4, 8), (1, 5, 8), 1, "may differ in their heads only"),
        ((2, 3, 5, 8), (1, 3, 5, 8), (1, 5, 8), 1, "may differ in their heads only"),
        ((2, 3, 5, 8), (2, 3, 5, 6), (1, 5, 8), 1, "may differ in their heads only"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (3, 5, 8), 1, "cos has shape"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (1, 4, 8), 1, "cos has shape"),
        ((2, 3, 5, 8), (2, 3, 5, 8), (1, 5, 10), 1, "cos has shape"),
        ((2, 3, 5, 7), (2, 3, 5, 7), (1, 5, 7), 1, "odd number cannot be rotated"),
    ],
)
def test_other_shapes_are_refused(
    q: tuple[int, ...], k: tuple[int, ...], cos: tuple[int, ...], unsqueeze_dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rope(torch.ones(q), torch.ones(k), torch.ones(cos), torch.ones(cos), unsqueeze_dim)
