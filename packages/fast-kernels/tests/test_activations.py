"""Gated MLPs one by one: which are taken for SwiGLU or GeGLU, and that no other is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import FP32_TOLERANCE, distance
from torch import nn
from torch.nn import functional as F

from foak.core.patching import ModelPatcher
from foak.core.report import PatchRecord
from foak.fast_kernels.rules import activation

H, INTERMEDIATE = 24, 40

Formula = Callable[[Any, torch.Tensor], torch.Tensor]


class Gated(nn.Module):
    """Three layers (named as wanted) and a formula ``f(self, x)``."""

    def __init__(self, f: Formula, *, names: str = "gate_proj up_proj down_proj", bias: bool = False, **children: Any):
        super().__init__()
        gate, up, down = names.split()
        self.add_module(gate, nn.Linear(H, INTERMEDIATE, bias=bias))
        self.add_module(up, nn.Linear(H, INTERMEDIATE, bias=bias))
        self.add_module(down, nn.Linear(INTERMEDIATE, H, bias=bias))
        for name, child in children.items():
            setattr(self, name, child)
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


class Packed(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, f: Formula, width: int = 2 * INTERMEDIATE):
        super().__init__()
        self.gate_up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, H, bias=False)
        self.f = f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


class Plain(nn.Module):
    """An MLP without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc_out(F.silu(self.fc_in(x)))
        return result


def gated(act: Callable[[torch.Tensor], torch.Tensor]) -> Formula:
    return lambda m, x: m.down_proj(act(m.gate_proj(x)) * m.up_proj(x))


def packed(m: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = m.gate_up_proj(x).chunk(2, dim=-1)
    result: torch.Tensor = m.down_proj(F.silu(gate) * up)
    return result


def packed_up_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    up, gate = m.gate_up_proj(x).chunk(2, dim=-1)
    result: torch.Tensor = m.down_proj(up * F.gelu(gate))
    return result


def interleaved(m: Any, x: torch.Tensor) -> torch.Tensor:
    both = m.gate_up_proj(x)
    result: torch.Tensor = m.down_proj(F.silu(both[..., ::2]) * both[..., 1::2])
    return result


SERVED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "silu": ("swiglu", lambda: Gated(gated(F.silu))),
    "silu module": (
        "swiglu",
        lambda: Gated(lambda m, x: m.down_proj(m.act_fn(m.gate_proj(x)) * m.up_proj(x)), act_fn=nn.SiLU()),
    ),
    "gelu": ("geglu", lambda: Gated(gated(F.gelu))),
    "gelu tanh": ("geglu", lambda: Gated(gated(lambda g: F.gelu(g, approximate="tanh")))),
    "up before gate": ("swiglu", lambda: Gated(lambda m, x: m.down_proj(F.silu(m.up_proj(x)) * m.gate_proj(x)))),
    "other names": (
        "swiglu",
        lambda: Gated(lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)), names="w1 w3 w2"),
    ),
    "with biases": ("swiglu", lambda: Gated(gated(F.silu), bias=True)),
    "packed": ("swiglu", lambda: Packed(packed)),
    "packed, up first": ("geglu", lambda: Packed(packed_up_first)),
    "through fp32": (
        "swiglu",
        lambda: Gated(lambda m, x: m.down_proj((F.silu(m.gate_proj(x).float()) * m.up_proj(x).float()).to(x.dtype))),
    ),
}

LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: Gated(gated(F.relu)),
    "relu squared": lambda: Gated(gated(lambda g: F.relu(g).square())),
    "quick gelu": lambda: Gated(gated(lambda g: g * torch.sigmoid(1.702 * g))),
    "sigmoid": lambda: Gated(gated(torch.sigmoid)),
    "mish": lambda: Gated(gated(F.mish)),
    "no activation": lambda: Gated(gated(lambda g: g)),
    "both activated": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * F.silu(m.up_proj(x)))),
    "up + 1": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * (m.up_proj(x) + 1))),
    "clamped gate": lambda: Gated(gated(lambda g: F.silu(g.clamp(max=7)))),
    "clamped up": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x).clamp(-7, 7))),
    "clamped product": lambda: Gated(lambda m, x: m.down_proj((F.silu(m.gate_proj(x)) * m.up_proj(x)).clamp(-9, 9))),
    "clamped at 100": lambda: Gated(gated(lambda g: F.silu(g.clamp(max=100)))),
    "sum": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) + m.up_proj(x))),
    "scaled": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x)) * 0.5),
    "with a residual": lambda: Gated(lambda m, x: x + m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))),
    "normed": lambda: Gated(lambda m, x: m.down_proj(F.layer_norm(F.silu(m.gate_proj(x)) * m.up_proj(x), (40,)))),
    "mixes positions": lambda: Gated(lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x).roll(1, -2))),
    "interleaved": lambda: Packed(interleaved),
    "packed and clamped": lambda: Packed(
        lambda m, x: m.down_proj(
            F.silu(m.gate_up_proj(x)[..., :INTERMEDIATE].clamp(max=7)) * m.gate_up_proj(x)[..., INTERMEDIATE:]
        )
    ),
    "dropout module": lambda: Gated(
        lambda m, x: m.down_proj(m.drop(F.silu(m.gate_proj(x)) * m.up_proj(x))), drop=nn.Dropout(0.5)
    ),
    "dropout function": lambda: Gated(
        lambda m, x: m.down_proj(F.dropout(F.silu(m.gate_proj(x)) * m.up_proj(x), 0.5, m.training))
    ),
    "dropout at the end": lambda: Gated(
        lambda m, x: F.dropout(m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x)), 0.5, m.training)
    ),
    "other in evaluation": lambda: Gated(
        lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x)) * (1.0 if m.training else 2.0)
    ),
    "no gate": Plain,
}


def patch(module: nn.Module) -> list[PatchRecord]:
    patcher = ModelPatcher()
    for rule in activation.rules(None):
        patcher.add(rule)
    return patcher.apply(module).records


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], upstream)]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("training", [True, False], ids=["applied in training", "applied in evaluation"])
def test_served_mlps_give_the_same(name: str, dtype: torch.dtype, training: bool) -> None:
    kernel, make = SERVED[name]
    plain = build(make).to(dtype).train(training)
    fast = copy.deepcopy(plain)
    records = patch(fast)
    assert [(r.kernel, r.outcome) for r in records if r.outcome == "patched"] == [(kernel, "patched")], records
    x = (2 * torch.randn(2, 5, H)).to(dtype)
    exact = run(copy.deepcopy(plain).float(), x.float())
    for reference, theirs, ours in zip(exact, run(plain.train(), x), run(fast.train(), x), strict=True):
        assert ours.dtype == theirs.dtype
        assert distance(ours, reference) <= max(1.5 * distance(theirs, reference), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEFT_ALONE)
@pytest.mark.parametrize("training", [True, False], ids=["applied in training", "applied in evaluation"])
def test_other_mlps_are_left_alone(name: str, dtype: torch.dtype, training: bool) -> None:
    module = build(LEFT_ALONE[name]).to(dtype).train(training)
    records = patch(module)
    assert [r for r in records if r.outcome == "patched"] == []
    assert "forward" not in vars(module)


@pytest.mark.parametrize("name", ["relu squared", "clamped gate", "interleaved", "dropout module"])
def test_what_looks_like_one_and_is_none_has_a_reason(name: str) -> None:
    """By the activation's rule, or by those of both kernels: no candidate disappears from the report."""
    records = patch(build(LEFT_ALONE[name]))
    assert records
    assert all(record.outcome == "kept" and record.reason for record in records)


def test_layers_replaced_after_the_patch_are_the_ones_that_run() -> None:
    """As PEFT does when an adapter is added later."""
    plain = build(SERVED["silu"][1])
    fast = copy.deepcopy(plain)
    patch(fast)
    x = torch.randn(3, H)
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(H, 8), nn.Linear(8, INTERMEDIATE))
    for mlp in (plain, fast):
        mlp.up_proj = other
        mlp.gate_proj.register_forward_hook(lambda m, i, o: o * 0.5)
    assert distance(fast(x), plain(x)) <= FP32_TOLERANCE


def test_hooks_on_the_activation_module_still_run() -> None:
    """Steering and probing of activations hang on that module."""
    plain = build(SERVED["silu module"][1])
    fast = copy.deepcopy(plain)
    patch(fast)
    x = torch.randn(3, H)
    for mlp in (plain, fast):
        mlp.act_fn.register_forward_hook(lambda m, i, o: o * 0.5)
    assert distance(fast(x), plain(x)) <= FP32_TOLERANCE


def test_the_input_and_the_products_are_not_changed() -> None:
    for name, (_, make) in SERVED.items():
        module = build(make)
        patch(module)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for child in module.children():
            child.register_forward_hook(lambda m, i, o, seen=seen: seen.append((o, o.detach().clone())))
        x = torch.randn(3, H)
        kept = x.clone()
        loss = module(x).square().sum()
        torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        torch.autograd.grad(loss, list(module.parameters()))
        assert torch.equal(x, kept)
        assert seen
        assert all(torch.equal(now, then) for now, then in seen), name
