"""LoRA layers that share their input, as autograd sees them: a promise first, its product later.

A promise saves all that the backward needs, and computes only the thin products. Fulfilling it computes the base
product and saves nothing. So activation checkpointing, whose recomputation ends when the last saved tensor is there,
never computes the last product of a layer a second time.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foak.kernels.autograd import once_differentiable, without_autocast
from foak.kernels.backend import backend_for
from foak.kernels.launch import next_power_of_two
from foak.kernels.lora import concatenation, reference
from foak.kernels.lora.dropout import draw_seed
from foak.kernels.lora.parts import ROUNDED, SPLIT, WIDE


class LoraMember(NamedTuple):
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
        p = self.dropout_p
        return self.scaling if p == 0 else 0.0 if p >= 1 else self.scaling / (1 - p)


class Recipe(NamedTuple):
    """How the products of layers on one input are computed, forward and backward.

    Attributes:
        members: the layers.
        dtype: of the products and outputs.
        thin: the module with the thin products, `project` and `reduce_rows`: the kernels' or their twins'.
        parts: what becomes of the factors; see `parts.py`.
        rank: the last dimension of `z`, which is as wide as the thin products want it.
        scales: the members' factors of the thin products.
        drops: the members' dropout probabilities.
        seed: of the masks.
    """

    members: tuple[LoraMember, ...]
    dtype: torch.dtype
    thin: Any
    parts: int
    rank: int
    scales: list[float]
    drops: list[float]
    seed: int

    @property
    def on_triton(self) -> bool:
        """Whether the thin products are the kernels'."""
        return self.thin is not reference

    def through_b(self, dy: Tensor, b: Tensor, z: Tensor, dz: Tensor, index: int, *, needs_db: bool) -> Tensor | None:
        """Writes the gradient of a member's z into `dz`, [N, rank], from its output's, [N, O]; gives b's."""
        scales = self.scales[index : index + 1]
        self.thin.project(dy, [b], scales, _NO_DROPS, 0, self.parts, dz, transposed=True)
        if not needs_db:
            return None
        db: Tensor = self.thin.reduce_rows(dy, z, [b], _NO_DROPS, 0, self.parts, transposed=True)[0]
        return db


_NO_DROPS = [0.0]


def recipe_of(members: tuple[LoraMember, ...], x: Tensor, dtype: torch.dtype, rounds_factors: bool) -> Recipe:
    """Chooses the implementation for an input `x` [..., K], which is cast to `dtype`; draws the seed."""
    factors: list[Tensor] = []
    narrow, rank = True, 1
    for member in members:
        factors += (member.a, member.b)
        narrow = narrow and member.a.dtype is dtype and member.b.dtype is dtype
        rank = max(rank, member.a.shape[0])
    parts = WIDE if dtype is torch.float16 else ROUNDED if rounds_factors or narrow else SPLIT
    thin: ModuleType = reference
    if dtype.itemsize == 2 and backend_for(x, *factors) == "triton":
        thin = kernels("thin_triton")
        rank = max(16, next_power_of_two(rank))
    drops = [m.dropout_p for m in members]
    return Recipe(
        members, dtype, thin, parts, rank, [m.scale for m in members], drops, draw_seed() if any(drops) else 0
    )


@functools.cache
def kernels(name: str) -> Any:
    """A module of this package that needs triton, which is imported when a kernel runs for the first time."""
    return importlib.import_module(f"foak.kernels.lora.{name}")


class Call:
    """One application of layers to one input: what the promise computes and the fulfilment uses."""

    __slots__ = ("recipe", "shape", "x", "z")

    recipe: Recipe
    shape: torch.Size
    x: Tensor
    z: Tensor

    def __init__(self, members: Sequence[LoraMember], x: Tensor, dtype: torch.dtype, rounds_factors: bool) -> None:
        """`dtype` is that of the products, and `x` [..., K] is cast to it."""
        self.recipe = recipe_of(tuple(members), x, dtype, rounds_factors)
        self.shape = x.shape

    def project(self, x: Tensor, a: Sequence[Tensor]) -> None:
        """Computes `z`, [M, N, rank] (of one layer [N, rank]), from `x` [..., K]."""
        recipe = self.recipe
        if x.dtype is not recipe.dtype:
            x = x.to(recipe.dtype)
        if x.dim() != 2 and not x.is_contiguous():
            x = x.reshape(-1, x.shape[-1])
        self.x = x
        length = x.shape[-1]
        row_count = x.numel() // length if length else 0
        shape = (row_count, recipe.rank) if len(a) == 1 else (len(a), row_count, recipe.rank)
        self.z = x.new_empty(shape, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
        factors = [factor.contiguous() for factor in a]
        recipe.thin.project(x, factors, recipe.scales, recipe.drops, recipe.seed, recipe.parts, self.z)

    def product(self, index: int) -> Tensor:
        """The output of one member, [..., O]; ValueError where its layer is on another device than the input."""
        recipe, x = self.recipe, self.x
        member = recipe.members[index]
        weight = member.weight(recipe.dtype)
        bias = None if member.bias is None else member.bias.contiguous()
        for name, operand in (("weight", weight), ("bias", bias)):
            if operand is not None and operand.device != x.device:  # a kernel would read at its address all the same
                raise ValueError(
                    f"lora_linear: the input is on {x.device}, the layer's {name} on {operand.device}; allowed is one "
                    "device for all"
                )
        z = self.z if self.z.dim() == 2 else self.z[index]
        operands = (x, weight, z, member.b.contiguous(), bias, recipe.parts)
        y: Tensor = _product_of(recipe, x, weight).product(*operands)
        return y if x.dim() == len(self.shape) else y.view(*self.shape[:-1], member.out_features)

    def placeholder(self, index: int) -> Tensor:
        """One element that stands for the output of a member, [..., O], and takes its gradient."""
        shape = (*self.shape[:-1], self.recipe.members[index].out_features)
        return self.z.new_empty_strided(shape, (0,) * len(shape), dtype=self.recipe.dtype)


def _product_of(recipe: Recipe, x: Tensor, weight: Tensor) -> ModuleType:
    if not recipe.on_triton or x.numel() == 0:
        return reference
    own: ModuleType = kernels("product_triton")
    return own if own.fits(x, weight, recipe.rank, recipe.parts) else concatenation


class Promise(torch.autograd.Function):
    """Saves the input, the thin products and the factors; gives a placeholder of one element for each output."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        with without_autocast(x.device.type):
            call.project(x, factors[::2])
        ctx.recipe = recipe = call.recipe
        ctx.input_shape, ctx.input_dtype = x.shape, x.dtype
        ctx.save_for_backward(x if x.dtype is recipe.dtype else call.x, call.z, *factors)
        ctx.set_materialize_grads(False)
        return tuple([call.placeholder(index) for index in range(len(recipe.members))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        x, z, *factors = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        missing = [dy is None for dy in upstream]
        if all(missing):
            return (None,) * (2 + len(factors))
        _, needs_dx, *needs = ctx.needs_input_grad
        factors = [factor.contiguous() for factor in factors]
        found: list[Tensor | None] = [None] * len(factors)
        dx: Tensor | None = None
        dz = torch.empty_like(z)
        alone = len(upstream) == 1
        of_member = ((z, dz),) if alone else zip(z.unbind(), dz.unbind(), strict=True)
        with without_autocast(x.device.type):
            for index, (dy, (z_part, dz_part)) in enumerate(zip(upstream, of_member, strict=True)):
                if dy is None:
                    dz_part.zero_()
                    continue
                dy = rows_of(dy, recipe.dtype)
                b = factors[2 * index + 1]
                needs_db = needs[2 * index + 1]
                found[2 * index + 1] = recipe.through_b(dy, b, z_part, dz_part, index, needs_db=needs_db)
                if needs_dx:
                    weight = recipe.members[index].weight(recipe.dtype)
                    dx = torch.mm(dy, weight) if dx is None else dx.addmm_(dy, weight)
            if dx is not None or any(needs[::2]):
                a = factors[::2]
                da = recipe.thin.reduce_rows(x, dz, a, recipe.drops, recipe.seed, recipe.parts, dx=dx)
                for index, gradient in enumerate(da):
                    if needs[2 * index] and not missing[index]:
                        found[2 * index] = gradient
        if dx is not None:
            dx = dx if dx.shape == ctx.input_shape else dx.view(ctx.input_shape)
            dx = dx if dx.dtype is ctx.input_dtype else dx.to(ctx.input_dtype)
        return None, dx, *found


def rows_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor [..., K] as [N, K] in `dtype`."""
    if tensor.dim() != 2:
        tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Fulfil(torch.autograd.Function):
    """The product that a placeholder stands for. Saves nothing; its gradient is the placeholder's."""

    @staticmethod
    def forward(ctx: Any, call: Call, index: int, placeholder: Tensor) -> Tensor:
        with without_autocast(placeholder.device.type):
            return call.product(index)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None, Tensor]:
        return None, None, upstream
