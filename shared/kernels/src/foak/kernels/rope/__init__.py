"""Rotary position embedding of queries and keys, in the rotate-half layout."""

import torch
from torch import Tensor

from foak.kernels.autograd import apply
from foak.kernels.backend import backend_for
from foak.kernels.rope.reference import rope_reference

__all__ = ["rope"]

_DYNAMO_TRACES_TWO_OUTPUTS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
"""With dynamic shapes, the Dynamo of torch 2.11 fails on an autograd function of two outputs; 2.13 traces it."""


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotates each pair (i, i + Dr/2) of the first Dr elements of every head by the angle of its position.

    `q * cos + rotate_half(q) * sin` and the same for `k`, where `rotate_half` turns (a, b) into (-b, a); elements from
    Dr on are passed through. This is transformers' `apply_rotary_pos_emb`; it is not the interleaved layout, whose
    pairs are neighbours.

    Args:
        q: `[B, Hq, S, D]` with `unsqueeze_dim=1`, `[B, S, Hq, D]` with `unsqueeze_dim=2`; of any floating-point dtype.
            Strided heads (a transposed projection, a slice of a packed one) are read where they lie.
        k: the same with Hk heads.
        cos: `[B, S, Dr]` or `[1, S, Dr]`, Dr even and at most D; expanded and strided ones are fine.
        sin: same shape as `cos`.
        unsqueeze_dim: where `cos` and `sin` lack the dimension of the heads, 1 or 2.

    Returns:
        The rotated `q` and `k`, in the dtype that PyTorch promotes each with `cos` and `sin` to, computed in fp32 (fp64
        for fp64 inputs) and rounded once; new tensors, `q` and `k` are left as they are. Differentiable in `q` and `k`;
        in `cos` and `sin` too when they require a gradient, for which the plain twin runs on every device.

    Raises:
        ValueError: if a shape is another one, Dr is odd, or `unsqueeze_dim` is neither 1 nor 2.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    _check(q, k, cos, sin, unsqueeze_dim)
    learned = (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled()
    # What is traced becomes one fused kernel of Inductor's in either case.
    untraceable = torch.compiler.is_compiling() and not _DYNAMO_TRACES_TWO_OUTPUTS
    if learned or untraceable or backend_for(q, k, cos, sin) == "reference":
        return rope_reference(q, k, cos, sin, unsqueeze_dim)
    from foak.kernels.rope.triton import Rope

    result: tuple[Tensor, Tensor] = apply(Rope, q, k, cos, sin, unsqueeze_dim)
    return result


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> None:
    if unsqueeze_dim not in (1, 2):
        raise ValueError(
            f"rope: unsqueeze_dim is {unsqueeze_dim}; allowed are 1 (heads, positions) and 2 (positions, heads)"
        )
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        raise ValueError(
            f"rope: q, k and cos have {q.dim()}, {k.dim()} and {cos.dim()} dimensions; "
            f"allowed are 4 ([B, H, S, D] or [B, S, H, D]), 4 and 3 ([B, S, Dr])"
        )
    batch, width = q.shape[0], q.shape[3]
    positions = q.shape[3 - unsqueeze_dim]
    if k.shape[0] != batch or k.shape[3 - unsqueeze_dim] != positions or k.shape[3] != width:
        raise ValueError(
            f"rope: q has shape {tuple(q.shape)}, k has shape {tuple(k.shape)}; they may differ in their heads only "
            f"(dimension {unsqueeze_dim})"
        )
    rotated = cos.shape[2]
    if cos.shape != sin.shape or cos.shape[0] not in (1, batch) or cos.shape[1] != positions or rotated > width:
        raise ValueError(
            f"rope: cos has shape {tuple(cos.shape)}, sin {tuple(sin.shape)}; allowed for q of shape {tuple(q.shape)} "
            f"is [1 or {batch}, {positions}, at most {width}] for both"
        )
    if rotated % 2:
        raise ValueError(f"rope: cos covers {rotated} elements of a head; an odd number cannot be rotated in pairs")
