"""LoRA: frozen linear layers with a low-rank update, the sum rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foak.kernels.autograd import apply, without_autocast
from foak.kernels.lora import traced
from foak.kernels.lora.autograd import Call, Fulfil, LoraMember, Promise
from foak.kernels.lora.gated import ACTIVATIONS, GatedCall, GatedPromise

__all__ = ["LoraMember", "PromisedLinear", "lora_gated_linear", "lora_linear", "promise_lora_linears"]


class PromisedLinear:
    """An output that has not been computed; each call of `fulfil` computes it."""

    def __init__(self, call: Call, index: int, placeholder: Tensor | None) -> None:
        """`placeholder` carries the gradient; None where none is recorded."""
        self._call, self._index, self._placeholder = call, index, placeholder

    def fulfil(self) -> Tensor:
        """The output, [..., O]; ValueError where the layer is on another device than the input."""
        if self._placeholder is None:
            with torch.no_grad(), without_autocast(self._call.x.device.type):
                return self._call.product(self._index)
        result: Tensor = apply(Fulfil, self._call, self._index, self._placeholder)
        return result


def promise_lora_linears(
    x: Tensor, members: Sequence[LoraMember], *, dtype: torch.dtype | None = None, rounds_factors: bool = False
) -> list[PromisedLinear]:
    """`lora_linear` of several layers on one input, up to 3, whose large products are computed one by one when asked.

    The thin products are computed at once, in one pass over `x`, and so are their gradients.

    Args:
        x: [..., K].
        members: the layers and their adapters; see `LoraMember`.
        dtype: of the products and outputs; `x` is cast to it. The dtype of `x` by default.
        rounds_factors: round `a` and `b` to `dtype` for the products, as autocast does; by default an fp32 factor is
            multiplied in full precision. Their gradients have their own dtype in either case.

    Returns:
        One promise for each member.

    Raises:
        ValueError: shapes that do not fit, more than 3 members, or a dropout probability outside [0, 1].
    """
    if not 1 <= len(members) <= 3:
        raise ValueError(f"promise_lora_linears: {len(members)} members; allowed are 1 to 3")
    for member in members:
        _check(x, member)
    call = Call(members, x, dtype or x.dtype, rounds_factors)
    factors = [factor for m in members for factor in (m.a, m.b)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *factors)):
        places = apply(Promise, call, x, *factors)
        return [PromisedLinear(call, index, place) for index, place in enumerate(places)]
    with torch.no_grad(), without_autocast(x.device.type):
        call.project(x, factors[::2])
    return [PromisedLinear(call, index, None) for index in range(len(members))]


def lora_linear(
    x: Tensor,
    weight: Tensor | Callable[[torch.dtype], Tensor],
    a: Tensor,
    b: Tensor,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    dtype: torch.dtype | None = None,
    rounds_factors: bool = False,
) -> Tensor:
    """`x @ weight.T + bias + scaling * dropout(x) @ a.T @ b.T`, the sum accumulated in fp32 and rounded once.

    Args:
        x: [..., K], fp32, bf16 or fp16 (fp64 runs in plain PyTorch).
        weight: [O, K], frozen: it gets no gradient. Or a function that gives it in the dtype it is called with (a
            quantized weight that is decoded), once for the forward and once for the backward.
        a: [rank, K].
        b: [O, rank].
        scaling: alpha / rank, or alpha / sqrt(rank) for rsLoRA.
        bias: [O], frozen, or None.
        dropout_p: probability with which an element of the adapter's input is dropped; the others are divided by
            1 - p. The mask comes from a seed that is drawn from PyTorch's default generator; it is not stored.
        dtype: of the products and the output, `x`'s by default.
        rounds_factors: see `promise_lora_linears`.

    Returns:
        [..., O] in `dtype`. Differentiable in `x`, `a` and `b`; the sums behind all three gradients are in fp32.

    Raises:
        ValueError: shapes that do not fit, a probability outside [0, 1], or a layer on another device than the input.

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """
    member = LoraMember(
        weight=_reader(weight) if isinstance(weight, Tensor) else weight,
        out_features=b.shape[0],
        a=a,
        b=b,
        scaling=scaling,
        dropout_p=dropout_p,
        bias=None if bias is None else bias.detach(),
    )
    if torch.compiler.is_compiling():
        _check(x, member)
        return traced.lora_linear(x, member, dtype or x.dtype)
    return promise_lora_linears(x, [member], dtype=dtype, rounds_factors=rounds_factors)[0].fulfil()


def lora_gated_linear(
    gate: Tensor,
    up: Tensor,
    activation: str,
    member: LoraMember,
    *,
    dtype: torch.dtype | None = None,
    rounds_factors: bool = False,
) -> Tensor:
    """`lora_linear(act(gate) * up)`: the last layer of a gated MLP, adapted, with the activation before it.

    The product `act(gate) * up` is not kept for the backward, which computes it again from gate and up while it reads
    them; it is rounded to their dtype, as without fusion.

    Args:
        gate: [..., K].
        up: [..., K].
        activation: "silu", "gelu" or "gelu_tanh".
        member: the layer and its adapter.
        dtype: of the layer's product and the output, that of `act(gate) * up` by default.
        rounds_factors: see `promise_lora_linears`.

    Returns:
        [..., O] in `dtype`. Differentiable in `gate`, `up`, and the member's `a` and `b`.

    Raises:
        ValueError: shapes that do not fit, an unknown activation, a dropout probability outside [0, 1], or a layer on
            another device than the input.
    """
    if activation not in ACTIVATIONS or gate.shape != up.shape:
        raise ValueError(
            f"lora_gated_linear: activation {activation!r}, gate {tuple(gate.shape)}, up {tuple(up.shape)}; allowed "
            f"are {', '.join(ACTIVATIONS)}, and equal shapes"
        )
    _check(gate, member)
    call = GatedCall(member, gate, up, activation, dtype or torch.promote_types(gate.dtype, up.dtype), rounds_factors)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (gate, up, member.a, member.b)):
        place = apply(GatedPromise, call, gate, up, member.a, member.b)
        return PromisedLinear(call, 0, place).fulfil()
    with torch.no_grad(), without_autocast(gate.device.type):
        call.project_gated(gate, up, member.a)
    return PromisedLinear(call, 0, None).fulfil()


def _reader(weight: Tensor) -> Callable[[torch.dtype], Tensor]:
    def read(dtype: torch.dtype) -> Tensor:
        return weight if weight.dtype is dtype else weight.detach().to(dtype)

    return read


def _check(x: Tensor, member: LoraMember) -> None:
    a, b = member.a, member.b
    if a.dim() != 2 or b.shape != (member.out_features, a.shape[0]) or a.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"lora_linear: x {tuple(x.shape)}, a {tuple(a.shape)} and b {tuple(b.shape)} do not fit; allowed are "
            f"x [..., K], a [rank, K] and b [{member.out_features}, rank]"
        )
    if not 0 <= member.dropout_p <= 1:
        raise ValueError(f"lora_linear: dropout_p is {member.dropout_p}; allowed is a probability from 0 to 1")
