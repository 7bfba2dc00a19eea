"""An adapted layer behind a gated activation: `lora_linear(act(gate) * up)`, of which only gate and up are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foak.kernels.autograd import once_differentiable
from foak.kernels.geglu import geglu
from foak.kernels.lora.autograd import Call, LoraMember, through_b
from foak.kernels.swiglu import swiglu

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class GatedCall(Call):
    """One application of a layer to `act(gate) * up`, each [..., K] of one dtype."""

    def __init__(
        self, member: LoraMember, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype, rounds_factors: bool
    ) -> None:
        """`dtype` is that of the layer's product."""
        super().__init__([member], gate, dtype, rounds_factors)
        # the fused kernels read gate and up in the dtype that they multiply in
        self.fuses = self.on_triton and gate.dtype is dtype and up.dtype is dtype and up.device == gate.device
        self.activation = activation

    def project_gated(self, gate: Tensor, up: Tensor, a: Tensor) -> None:
        """Computes h, which stays until the product has read it, and z."""
        if not self.fuses:
            self.project(activate(gate, up, self.activation), [a])
            return
        from foak.kernels.lora import gated_triton

        (member,) = self.members
        gate, up = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
        how = (member.scale, member.dropout_p, self.seed, self.parts, self.rank)
        self.x, z = gated_triton.project(gate, up, self.activation, a.contiguous(), *how)
        self.z = z[None]


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` in the dtype of both, computed in fp32 or wider."""
    if activation == "silu":
        return swiglu(gate, up)
    return geglu(gate, up, "tanh" if activation == "gelu_tanh" else "none")


class GatedPromise(torch.autograd.Function):
    """Saves gate, up, the thin product and the factors; gives a placeholder of one element for the output."""

    @staticmethod
    def forward(ctx: Any, call: GatedCall, gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast(gate.device.type, enabled=False):
            call.project_gated(gate, up, a)
        (member,) = call.members
        ctx.call_of = (member, call.dtype, call.activation, call.seed, call.parts, call.rank, call.thin, call.fuses)
        ctx.save_for_backward(gate, up, call.z, a, b)
        place: Tensor = call.z.new_empty((), dtype=call.dtype).expand(*call.leading, member.out_features)
        return place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, z, a, b = ctx.saved_tensors
        member, dtype, activation, seed, parts, rank, thin, fuses = ctx.call_of
        p = member.dropout_p
        a, b = a.contiguous(), b.contiguous()
        with torch.autocast(gate.device.type, enabled=False):
            dy = dy.reshape(-1, member.out_features).to(dtype)
            dz, db = through_b(thin, dy, b, z, member.scale, parts, rank, needs_db=ctx.needs_input_grad[4])
            dh = torch.mm(dy, member.weight(dtype))
            gate_rows, up_rows = (t.reshape(-1, t.shape[-1]) for t in (gate, up))
            if fuses:
                from foak.kernels.lora import gated_triton

                dgate, dup, da = gated_triton.backward(dh, gate_rows, up_rows, activation, dz, a, p, seed, parts)
            else:
                dgate, dup, da = _backward(dh, gate_rows, up_rows, activation, dz, a, p, seed, parts, thin)
        return (
            None,
            dgate.view(gate.shape) if ctx.needs_input_grad[1] else None,
            dup.view(up.shape) if ctx.needs_input_grad[2] else None,
            da[: a.shape[0]].to(a.dtype) if ctx.needs_input_grad[3] else None,
            db,
        )


def _backward(
    dh: Tensor, gate: Tensor, up: Tensor, activation: str, dz: Tensor, a: Tensor, p: float, seed: int, parts: int,
    thin: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `gated_triton.backward` computes, by autograd's own formulas."""
    with torch.enable_grad():
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        h = activate(gate, up, activation)
    da = thin.reduce_rows(h.detach().to(dh.dtype), dz[None], [p], seed, parts, factors=[a], dx=dh)[0]
    dgate, dup = torch.autograd.grad(h, (gate, up), dh.to(h.dtype))
    return dgate, dup, da
