"""An adapted layer behind a gated activation: `lora_linear(act(gate) * up)`, of which only gate and up are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foak.kernels.autograd import once_differentiable, without_autocast
from foak.kernels.geglu import geglu
from foak.kernels.lora.autograd import Call, LoraMember, Recipe, kernels, rows_of
from foak.kernels.swiglu import swiglu

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class GatedCall(Call):
    """One application of a layer to `act(gate) * up`, each [..., K] of one dtype."""

    __slots__ = ("activation", "fuses")

    def __init__(
        self, member: LoraMember, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype, rounds_factors: bool
    ) -> None:
        """`dtype` is that of the layer's product."""
        super().__init__([member], gate, dtype, rounds_factors)
        # the fused kernels read gate and up in the dtype that they multiply in
        self.fuses = self.recipe.on_triton and gate.dtype is dtype and up.dtype is dtype and up.device == gate.device
        self.activation = activation

    def project_gated(self, gate: Tensor, up: Tensor, a: Tensor) -> None:
        """Computes h, which stays until the product has read it, and z."""
        if not self.fuses:
            self.project(activate(gate, up, self.activation), [a])
            return
        fused = kernels("gated_triton")
        self.x, self.z = fused.project(gate, up, self.activation, a.contiguous(), self.recipe)


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` in the dtype of both, computed in fp32 or wider."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, "tanh" if activation == "gelu_tanh" else "none")


class GatedPromise(torch.autograd.Function):
    """Saves gate, up, the thin product and the factors; gives a placeholder of one element for the output."""

    @staticmethod
    def forward(ctx: Any, call: GatedCall, gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with without_autocast(gate.device.type):
            call.project_gated(gate, up, a)
        ctx.recipe, ctx.activation, ctx.fuses = call.recipe, call.activation, call.fuses
        ctx.save_for_backward(gate, up, call.z, a, b)
        return call.placeholder(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, z, a, b = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        _, needs_dgate, needs_dup, needs_da, needs_db = ctx.needs_input_grad
        a = a.contiguous()
        dz = torch.empty_like(z)
        with without_autocast(gate.device.type):
            dy = rows_of(dy, recipe.dtype)
            db = recipe.through_b(dy, b.contiguous(), z, dz, 0, needs_db=needs_db)
            dh = torch.mm(dy, recipe.members[0].weight(recipe.dtype))
            backward = kernels("gated_triton").backward if ctx.fuses else _backward
            dgate, dup, da = backward(dh, gate, up, ctx.activation, dz, a, recipe)
        return (
            None,
            dgate.view(gate.shape) if needs_dgate else None,
            dup.view(up.shape) if needs_dup else None,
            da if needs_da else None,
            db,
        )


def _backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, dz: Tensor, a: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """What `gated_triton.backward` computes, by autograd's own formulas."""
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        h = activate(gate, up, activation)
    narrow = h.detach().to(dh.dtype)
    (da,) = recipe.thin.reduce_rows(narrow, dz, [a], recipe.drops, recipe.seed, recipe.parts, dx=dh)
    dgate, dup = torch.autograd.grad(h, (gate, up), dh.to(h.dtype).view(h.shape))
    return dgate, dup, da
