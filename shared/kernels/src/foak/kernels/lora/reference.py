"""LoRA's products in plain PyTorch: what runs where the kernels do not, and what they are tested against.

    z = scale * (mask * x) @ A.T                 `project`, with scale = scaling / (1 - p)
    y = x @ W.T + z @ B.T + bias                 `product`, rounded once
    dz = scale * dy @ B                          `project` again
    dB = dy.T @ z,  dA = dz.T @ (mask * x)       `reduce_rows`
    dx = dy @ W + mask * (dz @ A)                its second part by `reduce_rows`

Everything is computed in fp32 (fp64 for fp64 operands). The signatures are those of the kernels; `parts` says only
whether factors are first rounded to the dtype of the wide operand (`ROUNDED`, as autocast does) or not.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from foak.kernels.lora.dropout import keep_mask
from foak.kernels.lora.parts import ROUNDED


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def _factor(factor: Tensor, narrow: torch.dtype, parts: int) -> Tensor:
    return _wide(factor.to(narrow) if parts == ROUNDED else factor)


def _masked(x: Tensor, stream: int, p: float, seed: int) -> Tensor:
    return x if p == 0 else x * keep_mask(seed, stream, x.shape[0], x.shape[1], p, x.device)


def project(
    x: Tensor,
    factors: Sequence[Tensor],
    scales: Sequence[float],
    drops: Sequence[float],
    seed: int,
    parts: int,
    out: Tensor,
    *,
    transposed: bool = False,
) -> None:
    """Writes `scale_i * (mask_i * x) @ factor_i.T` into `out` [M, N, R]; see `thin_triton.project`."""
    x = x.reshape(-1, x.shape[-1])
    out = out.view(len(factors), *out.shape[-2:]).zero_()
    for index, (factor, scale, p) in enumerate(zip(factors, scales, drops, strict=True)):
        wide = _factor(factor, x.dtype, parts)
        product = _wide(_masked(x, index, p, seed)) @ (wide if transposed else wide.t())
        out[index, :, : product.shape[1]] = product * scale


def reduce_rows(
    x: Tensor,
    z: Tensor,
    factors: Sequence[Tensor],
    drops: Sequence[float],
    seed: int,
    parts: int,
    *,
    dx: Tensor | None = None,
    transposed: bool = False,
) -> list[Tensor]:
    """`z_i.T @ (mask_i * x)`, like each factor; adds `mask_i * (z_i @ factor_i)` to `dx`; see `reduce_triton`."""
    x = x.reshape(-1, x.shape[-1])
    z = z.view(len(factors), *z.shape[-2:])
    sums = []
    for index, (factor, p) in enumerate(zip(factors, drops, strict=True)):
        found = z[index, :, : factor.shape[1 if transposed else 0]].t() @ _wide(_masked(x, index, p, seed))
        sums.append((found.t() if transposed else found).to(factor.dtype, memory_format=torch.contiguous_format))
    if dx is not None:
        share = sum(
            _masked(z[i, :, : factor.shape[0]] @ _factor(factor, x.dtype, parts), i, p, seed)
            for i, (factor, p) in enumerate(zip(factors, drops, strict=True))
        )
        dx.copy_(_wide(dx) + share)
    return sums


def product(x: Tensor, weight: Tensor, z: Tensor, b: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """`x @ weight.T + z @ b.T + bias` in x's dtype: [..., O]; see `product_triton.product`."""
    y = _wide(x).reshape(-1, x.shape[-1]) @ _wide(weight).t()
    y.addmm_(z[:, : b.shape[1]], _factor(b, x.dtype, parts).t())
    return (y if bias is None else y.add_(bias)).to(x.dtype).view(*x.shape[:-1], weight.shape[0])
