"""The base product and the adapter's as one product of concatenated operands, for GPUs without the kernel's means.

    y = [x | z] @ [W | B].T                      one product, one rounding

It copies both operands, which costs a few percent of the product's time. For fp16, whose range is too small for `z`,
the base's product is given in fp32, and the adapter's is added before the one rounding.
"""

import torch
from torch import Tensor

from foak.kernels.lora.parts import WIDE

_ALIGNMENT = 8  # elements of 2 bytes: rows that begin at multiples of 16 bytes


def _parts(factor: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """`count` tensors of `dtype` that add up to `factor` as nearly as they can."""
    found = [factor.to(dtype)]
    while len(found) < count:
        factor = factor.float() - found[-1].float()
        found.append(factor.to(dtype))
    return found


def product(x: Tensor, weight: Tensor, z: Tensor, b: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    """`x @ weight.T + z @ b.T + bias` in x's dtype: [..., O]; see `product_triton.product`."""
    leading = x.shape[:-1]
    return _product(x.reshape(-1, x.shape[-1]), weight, z, b, bias, parts).view(*leading, weight.shape[0])


def _product(x: Tensor, weight: Tensor, z: Tensor, b: Tensor, bias: Tensor | None, parts: int) -> Tensor:
    if parts == WIDE:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().t()
        y.addmm_(z[:, : b.shape[1]], b.float().t())
        return (y if bias is None else y.add_(bias)).to(x.dtype)
    left, right = [x], [weight]
    factors = _parts(b, x.dtype, parts)
    for index, part in enumerate(_parts(z[:, : b.shape[1]], x.dtype, parts)):
        for factor in factors[: parts - index]:
            left.append(part)
            right.append(factor)
    if bias is not None:
        left.append(x.new_ones((x.shape[0], 1)))
        right.append(bias.to(x.dtype)[:, None])
    missing = -sum(t.shape[1] for t in left) % _ALIGNMENT
    left.append(x.new_zeros((x.shape[0], missing)))
    right.append(x.new_zeros((weight.shape[0], missing)))
    return torch.mm(torch.cat(left, dim=1), torch.cat(right, dim=1).t())
