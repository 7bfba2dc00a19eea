"""LoRA layers that share their input, as autograd sees them: a promise first, its product later.

A promise saves all that the backward needs, and computes only the thin products. Fulfilling it computes the base
product and saves nothing. So activation checkpointing, whose recomputation ends when the last saved tensor is there,
never computes the last product of a layer a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foak.kernels.autograd import once_differentiable
from foak.kernels.backend import backend_for
from foak.kernels.launch import next_power_of_two
from foak.kernels.lora import concatenation, reference
from foak.kernels.lora.dropout import draw_seed

ROUNDED, SPLIT, WIDE = 1, 3, 0
"""What becomes of factors beside 16-bit activations: rounded to their dtype; split into three numbers of it; or all is
multiplied as fp32, because fp16 has not the range for what lies between the factors."""


@dataclass(frozen=True)
class LoraMember:
    """One linear layer and its adapter.

    Attributes:
        weight: `weight(dtype)` gives the frozen weight, dense, [O, K] in `dtype`; called once in the forward and once
            in the backward.
        out_features: O.
        a: [rank, K].
        b: [O, rank].
        scaling: what the adapter's product is multiplied with.
        dropout_p: probability with which the adapter's input is dropped, each adapter by its own mask.
        bias: [O], frozen, or None.
    """

    weight: Callable[[torch.dtype], Tensor]
    out_features: int
    a: Tensor
    b: Tensor
    scaling: float
    dropout_p: float = 0.0
    bias: Tensor | None = None

    @property
    def scale(self) -> float:
        """The factor of both thin products that lead to the rank: scaling / (1 - p)."""
        return 0.0 if self.dropout_p >= 1 else self.scaling / (1 - self.dropout_p)


class Call:
    """One application of layers to one input: what the promise computes and the fulfilment uses."""

    def __init__(self, members: Sequence[LoraMember], x: Tensor, dtype: torch.dtype, rounds_factors: bool) -> None:
        """Chooses the implementation; `dtype` is that of the products, and `x` [..., K] is cast to it."""
        self.members = tuple(members)
        self.dtype = dtype
        self.leading = x.shape[:-1]
        narrow = all(m.a.dtype is dtype and m.b.dtype is dtype for m in members)
        self.parts = WIDE if dtype is torch.float16 else ROUNDED if rounds_factors or narrow else SPLIT
        tensors = [t for m in members for t in (m.a, m.b)]
        self.on_triton = dtype.itemsize == 2 and backend_for(x, *tensors) == "triton"
        self.thin: Any = _thin_kernels() if self.on_triton else reference
        rank = max(m.a.shape[0] for m in members)
        self.rank = max(16, next_power_of_two(rank)) if self.on_triton else rank
        self.seed = draw_seed() if any(m.dropout_p > 0 for m in members) else 0
        self.x: Tensor = x
        self.z: Tensor = x

    @property
    def drops(self) -> list[float]:
        """The dropout probability of each member."""
        return [m.dropout_p for m in self.members]

    def project(self, x: Tensor, a: Sequence[Tensor]) -> None:
        """Computes `z`, [M, N, rank], from `x` [..., K]."""
        self.x = x.reshape(-1, x.shape[-1]).to(self.dtype)
        scales = [m.scale for m in self.members]
        a = [factor.contiguous() for factor in a]
        self.z = self.thin.project(self.x, a, scales, self.drops, self.seed, self.parts, self.rank)

    def product(self, index: int) -> Tensor:
        """The output of one member, [..., O]."""
        member = self.members[index]
        weight = member.weight(self.dtype)
        bias = None if member.bias is None else member.bias.contiguous()
        operands = (self.x, weight, self.z[index], member.b.detach().contiguous(), bias, self.parts)
        y: Tensor = _product_of(self, self.x, weight).product(*operands)
        return y.view(*self.leading, member.out_features)


def _thin_kernels() -> ModuleType:
    from foak.kernels.lora import thin_triton

    return thin_triton


def through_b(
    thin: Any, dy: Tensor, b: Tensor, z: Tensor, scale: float, parts: int, rank: int, *, needs_db: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of z, [N, rank] wide, and of b, from that of the output, [N, O]; `z` is [1, N, rank]."""
    dz = thin.project(dy, [b], [scale], [0.0], 0, parts, rank, transposed=True)[0]
    if not needs_db:
        return dz, None
    db = thin.reduce_rows(dy, z, [0.0], 0, parts)[0, : b.shape[1]].t()
    return dz, db.to(b.dtype, memory_format=torch.contiguous_format)


def _product_of(call: Call, x: Tensor, weight: Tensor) -> ModuleType:
    if not call.on_triton or x.shape[0] == 0:
        return reference
    from foak.kernels.lora import product_triton

    return product_triton if product_triton.fits(x, weight, call.rank, call.parts) else concatenation


class Promise(torch.autograd.Function):
    """Saves the input, the thin products and the factors; gives a placeholder of one element for each output."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast(x.device.type, enabled=False):
            call.project(x, factors[::2])
        ctx.call_of = (call.members, call.dtype, call.drops, call.seed, call.parts, call.rank, call.thin)
        ctx.x_of = (x.shape, x.dtype)
        ctx.save_for_backward(x if x.dtype is call.dtype else call.x, call.z, *factors)
        ctx.set_materialize_grads(False)
        place = call.x.new_empty(())
        return tuple(place.expand(*call.leading, m.out_features) for m in call.members)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, z, *factors = ctx.saved_tensors
        members, dtype, drops, seed, parts, rank, thin = ctx.call_of
        x = x.reshape(-1, x.shape[-1])
        factors = [factor.contiguous() for factor in factors]
        shape, x_dtype = ctx.x_of
        needs_dx, needs_factors = ctx.needs_input_grad[1], ctx.needs_input_grad[2:]
        if all(dy is None for dy in upstream):
            return (None,) * (2 + len(factors))
        with torch.autocast(x.device.type, enabled=False):
            dx: Tensor | None = None
            dz = torch.zeros_like(z) if any(dy is None for dy in upstream) else torch.empty_like(z)
            found: list[Tensor | None] = [None] * len(factors)
            for index, (member, dy) in enumerate(zip(members, upstream, strict=True)):
                if dy is None:
                    continue
                b = factors[2 * index + 1]
                dy = dy.reshape(-1, member.out_features).to(dtype)
                through = (thin, dy, b, z[index : index + 1], member.scale, parts, rank)
                dz[index], found[2 * index + 1] = through_b(*through, needs_db=needs_factors[2 * index + 1])
                if needs_dx:
                    weight = member.weight(dtype)
                    dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
            if dx is not None or any(needs_factors[::2]):
                da = thin.reduce_rows(x, dz, drops, seed, parts, factors=factors[::2], dx=dx)
                for index, a in enumerate(factors[::2]):
                    if needs_factors[2 * index] and upstream[index] is not None:
                        found[2 * index] = da[index, : a.shape[0]].to(a.dtype)
        return None, None if dx is None else dx.view(shape).to(x_dtype), *found


class Fulfil(torch.autograd.Function):
    """The product that a placeholder stands for. Saves nothing; its gradient is the placeholder's."""

    @staticmethod
    def forward(ctx: Any, call: Call, index: int, placeholder: Tensor) -> Tensor:
        with torch.autocast(placeholder.device.type, enabled=False):
            return call.product(index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        return None, None, upstream
