"""Norms one by one: which formula each is taken for, and that the patched one gives the same in every dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pairs import BY_NAME, FP32_TOLERANCE, distance, pair, step
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from foak.core.patching import ModelPatcher
from foak.core.report import PatchRecord
from foak.fast_kernels.rules import norm

H = 48


class Written(nn.Module):
    """A norm whose formula is given; ``f(self, x)``."""

    def __init__(self, f: Callable[[Any, torch.Tensor], torch.Tensor], *, weight: bool = True, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.f = f
        self.register_parameter("weight", nn.Parameter(torch.ones(H)) if weight else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


class WithGate(Written):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = self.f(self, x)
        return y if gate is None else y * F.silu(gate)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def cast_last(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (m.weight * rms(x.float(), m.eps)).to(x.dtype)


def cast_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.weight * rms(x.float(), m.eps).to(x.dtype)


def one_plus(m: Any, x: torch.Tensor) -> torch.Tensor:
    return (rms(x.float(), m.eps) * (1.0 + m.weight.float())).type_as(x)


SERVED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "Llama": ("rms_norm", lambda: LlamaRMSNorm(H)),
    "Gemma, 1 + weight": ("rms_norm", lambda: Gemma2RMSNorm(H)),
    "OLMo 2, cast last": ("rms_norm", lambda: Olmo2RMSNorm(H)),
    "T5, called a LayerNorm": ("rms_norm", lambda: T5LayerNorm(H)),
    "torch's RMSNorm": ("rms_norm", lambda: nn.RMSNorm(H, eps=1e-6)),
    "torch's RMSNorm without weight": ("rms_norm", lambda: nn.RMSNorm(H, eps=1e-6, elementwise_affine=False)),
    "torch's LayerNorm": ("layer_norm", lambda: nn.LayerNorm(H)),
    "torch's LayerNorm without bias": ("layer_norm", lambda: nn.LayerNorm(H, bias=False)),
    "torch's LayerNorm without weight": ("layer_norm", lambda: nn.LayerNorm(H, elementwise_affine=False)),
    "cast last": ("rms_norm", lambda: Written(cast_last)),
    "cast first": ("rms_norm", lambda: Written(cast_first)),
    "1 + weight": ("rms_norm", lambda: Written(one_plus)),
    "no weight": ("rms_norm", lambda: Written(lambda m, x: rms(x.float(), m.eps).to(x.dtype), weight=False)),
    "large eps": ("rms_norm", lambda: Written(cast_first, eps=0.3)),
}

LEFT_ALONE: dict[str, Callable[[], nn.Module]] = {
    "2 + weight": lambda: Written(lambda m, x: rms(x, m.eps) * (2 + m.weight)),
    "weight squared": lambda: Written(lambda m, x: rms(x, m.eps) * m.weight**2),
    "eps outside of the root": lambda: Written(
        lambda m, x: m.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + m.eps), eps=0.1
    ),
    "L2 norm": lambda: Written(lambda m, x: m.weight * F.normalize(x, dim=-1)),
    "mean over positions": lambda: Written(
        lambda m, x: m.weight * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + m.eps)
    ),
    "half of the features": lambda: Written(
        lambda m, x: m.weight * torch.cat([rms(x[..., : H // 2], m.eps), x[..., H // 2 :]], -1)
    ),
    "grouped": lambda: Written(lambda m, x: m.weight * rms(x.unflatten(-1, (4, -1)), m.eps).flatten(-2)),
    "clamped": lambda: Written(lambda m, x: m.weight * rms(x.clamp(-10, 10), m.eps)),
    "noise in training": lambda: Written(
        lambda m, x: m.weight * rms(x, m.eps) * (1 + 0.1 * torch.randn_like(x) * m.training)
    ),
    "scaled in training": lambda: Written(lambda m, x: m.weight * rms(x, m.eps) * (1.5 if m.training else 1.0)),
    "scaled in evaluation": lambda: Written(lambda m, x: m.weight * rms(x, m.eps) * (1.0 if m.training else 1.5)),
    "with a gate": lambda: WithGate(cast_first),
    "batch norm": lambda: nn.BatchNorm1d(H),
    "group norm": lambda: nn.GroupNorm(4, H),
    "two dimensions": lambda: nn.LayerNorm((3, H)),
    "not a norm": lambda: Written(lambda m, x: m.weight * x + m.eps),
}


def perturbed(module: nn.Module) -> nn.Module:
    """Weights away from their initial ones and zeros, which would hide mistakes."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def patch(module: nn.Module) -> list[PatchRecord]:
    patcher = ModelPatcher()
    for rule in norm.rules(None):
        patcher.add(rule)
    return patcher.apply(module).records


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of the input and of every parameter."""
    x = x.detach().requires_grad_()
    y = module(x)
    upstream = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, [x, *module.parameters()], upstream)
    return [y.detach(), *gradients]


@dataclass(frozen=True)
class Dtypes:
    """The input's and the weight's dtype."""

    x: torch.dtype
    weight: torch.dtype


DTYPES = [
    Dtypes(torch.float32, torch.float32),
    Dtypes(torch.bfloat16, torch.bfloat16),
    Dtypes(torch.float16, torch.float16),
    Dtypes(torch.bfloat16, torch.float32),
    Dtypes(torch.float32, torch.bfloat16),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("training", [True, False], ids=["applied in training", "applied in evaluation"])
def test_served_norms_give_the_same(name: str, dtypes: Dtypes, training: bool) -> None:
    kernel, build = SERVED[name]
    plain = perturbed(build()).to(dtypes.weight).train(training)
    fast = copy.deepcopy(plain)
    records = patch(fast)
    assert [r.kernel for r in records] == [kernel]
    if torch.promote_types(dtypes.x, dtypes.weight) == dtypes.weight:
        assert records[0].outcome == "patched", records
    x = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(0)).to(dtypes.x)
    try:
        expected = run(plain.train(), x)
    except RuntimeError:  # an op that takes one dtype only
        return
    actual = run(fast.train(), x)
    exact = run(copy.deepcopy(plain).double(), x.double())
    for reference, theirs, ours in zip(exact, expected, actual, strict=True):
        assert ours.dtype == theirs.dtype
        floor = 4 * torch.finfo(theirs.dtype).eps
        assert distance(ours, reference) <= max(1.5 * distance(theirs, reference), floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_epsilon_that_follows_the_dtype(dtype: torch.dtype) -> None:
    plain = perturbed(nn.RMSNorm(H)).to(dtype)  # eps=None: that of the input's dtype
    fast = copy.deepcopy(plain)
    patch(fast)
    x = (torch.randn(3, H) * 1e-2).to(dtype)
    for expected, actual in zip(run(plain, x), run(fast, x), strict=True):
        assert actual.dtype == expected.dtype
        assert distance(actual, expected) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("training", [True, False], ids=["applied in training", "applied in evaluation"])
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_norms_are_left_alone(name: str, training: bool) -> None:
    module = perturbed(LEFT_ALONE[name]()).train(training)
    forward = module.forward
    records = patch(module)
    assert [r for r in records if r.outcome == "patched"] == []
    assert "forward" not in vars(module)
    assert module.forward == forward


def test_one_dimension_and_many() -> None:
    for shape in ((H,), (1, H), (0, H), (2, 3, 4, H)):
        plain = perturbed(LlamaRMSNorm(H))
        fast = copy.deepcopy(plain)
        patch(fast)
        for expected, actual in zip(run(plain, torch.randn(shape)), run(fast, torch.randn(shape) * 0), strict=True):
            assert actual.shape == expected.shape
        x = torch.randn(shape)
        for expected, actual in zip(run(plain, x), run(fast, x), strict=True):
            assert distance(actual, expected) <= FP32_TOLERANCE


def test_input_by_keyword_and_strided() -> None:
    plain = perturbed(LlamaRMSNorm(H))
    fast = copy.deepcopy(plain)
    patch(fast)
    x = torch.randn(3, H, 4).transpose(1, 2)
    assert distance(fast(hidden_states=x), plain(hidden_states=x)) <= FP32_TOLERANCE
    assert distance(fast(x[:, ::2]), plain(x[:, ::2])) <= FP32_TOLERANCE
    expanded = torch.randn(1, 1, H).expand(2, 3, H)
    assert distance(fast(expanded), plain(expanded)) <= FP32_TOLERANCE


def test_the_input_is_not_changed() -> None:
    norms = [perturbed(build()) for _, build in SERVED.values()]
    for module in norms:
        patch(module)
        x = torch.randn(3, H)
        kept = x.clone()
        module(x).sum().backward() if list(module.parameters()) else module(x)
        assert torch.equal(x, kept)


def test_frozen_weights_and_inputs() -> None:
    for name, (_, build) in SERVED.items():
        module = perturbed(build()).requires_grad_(False)
        patch(module)
        x = torch.randn(3, H, requires_grad=True)
        module(x).square().sum().backward()
        assert x.grad is not None, name
        assert all(parameter.grad is None for parameter in module.parameters())
        if list(module.parameters()):
            module.requires_grad_(True)
            module(x.detach()).square().sum().backward()
            assert all(parameter.grad is not None for parameter in module.parameters()), name


def test_eps_and_weight_are_read_when_called() -> None:
    plain = perturbed(LlamaRMSNorm(H))
    fast = copy.deepcopy(plain)
    patch(fast)
    x = torch.randn(3, H)
    fast(x)  # nothing that a first call has seen may stay
    for module in (plain, fast):
        module.variance_epsilon = 0.7
        module.weight = nn.Parameter(torch.linspace(-1, 1, H))
    assert distance(fast(x), plain(x)) <= FP32_TOLERANCE


def test_instances_of_one_class_with_their_own_settings() -> None:
    """Two formulas in one class, told apart by a flag: each instance is served by its own, or left alone."""

    def either(m: Any, x: torch.Tensor) -> torch.Tensor:
        return rms(x, m.eps) * (1.0 + m.weight if m.unit_offset else m.weight)

    model = nn.ModuleList([Written(either), Written(either), Written(either, eps=0.5)])
    for index, module in enumerate(model):
        module.unit_offset = index == 1
        perturbed(module)
    plain = copy.deepcopy(model)
    patch(model)
    x = torch.randn(3, H)
    for theirs, ours in zip(plain, model, strict=True):
        assert distance(ours(x), theirs(x)) <= FP32_TOLERANCE


def test_fp32_norms_inside_a_bf16_model() -> None:
    """Kept in fp32 as by prepare_model_for_kbit_training: outputs are promoted where the original promotes."""
    plain = BY_NAME["Qwen3"].build(torch.bfloat16)
    for module in plain.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    seen: list[list[torch.dtype]] = []
    fast = copy.deepcopy(plain)
    patched = {r.module for r in patch(fast) if r.outcome == "patched"}
    assert patched == {n for n, m in plain.named_modules() if type(m).__name__.endswith("RMSNorm")}
    for model in (plain, fast):
        dtypes: list[torch.dtype] = []
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.register_forward_hook(lambda m, i, o, dtypes=dtypes: dtypes.append(o.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            step(model, BY_NAME["Qwen3"].batch())
        seen.append(dtypes)
    assert seen[0] == seen[1]


def test_norms_per_head() -> None:
    both = pair("Qwen3", fast_loss=False, fast_rope_embeddings=False, fast_activation=False)
    patched = {r.module for r in both.report.patched}
    assert {f"model.layers.{i}.self_attn.{n}_norm" for i in (0, 1) for n in "qk"} <= patched
    for name, module in both.fast.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            x = torch.randn(2, 5, 3, module.weight.shape[0]).transpose(1, 2)
            assert distance(module(x), both.plain.get_submodule(name)(x)) <= FP32_TOLERANCE
