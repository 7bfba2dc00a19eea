"""Rotary embedding: positions of every kind, and the layouts that are none of the kernel's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, Architecture
from pairs import BY_NAME, FP32_TOLERANCE, assert_same_gradients, distance, pair, pair_of, step
from torch import nn

from foak.core.patching import ModelPatcher
from foak.core.report import PatchRecord
from foak.fast_kernels.rules import rope

ONLY = {"fast_loss": False, "fast_rms_layernorm": False, "fast_activation": False}
B, S = 3, 11

POSITIONS: dict[str, torch.Tensor] = {
    "from zero": torch.arange(S)[None],
    "one row for all": torch.arange(5, 5 + S)[None].expand(B, -1),
    "past zero": torch.arange(20, 20 + S)[None],
    "one row each": torch.stack([torch.arange(S), torch.arange(3, 3 + S), torch.arange(30, 30 + S)]),
    "restarting": torch.cat([torch.arange(4), torch.arange(1), torch.arange(S - 5)])[None],
    "restarting elsewhere in each row": torch.stack(
        [
            torch.cat([torch.arange(4), torch.arange(S - 4)]),
            torch.cat([torch.arange(9), torch.arange(S - 9)]),
            torch.arange(S),
        ]
    ),
    "backwards": torch.arange(S).flip(0)[None],
    "all the same": torch.full((B, S), 7),
    "left padded": (torch.arange(S)[None] - torch.tensor([[0], [3], [6]])).clamp(min=0),
}

ROTARY = ["Llama", "Granite", "Qwen3", "Gemma 2", "Gemma 3", "Phi-3", "OLMo 2", "SmolLM3", "Mixtral"]


def batch(rows: int = B, length: int = S) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def sharp(architecture: str) -> nn.Module:
    """A model whose attention depends on positions: with initial weights the scores are nearly equal everywhere."""
    model = BY_NAME[architecture].build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.dim() == 2:
                parameter.mul_(10)
    return model


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("architecture", ROTARY)
def test_positions(architecture: str, name: str) -> None:
    models = pair_of(sharp(architecture), **ONLY)
    assert {r.rule for r in models.report.patched} == {"rope"}
    positions = POSITIONS[name]
    for rows in (B,) if positions.shape[0] > 1 else (1, B):
        given = {**batch(rows), "position_ids": positions.expand(rows, -1)}
        losses = [step(model, given) for model in models.both]
        assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
        assert_same_gradients(*models.both)


@pytest.mark.parametrize("architecture", ROTARY)
def test_positions_matter(architecture: str) -> None:
    """The comparison above can fail: other positions give other gradients (but for a shift of all)."""
    model = pair_of(sharp(architecture), **ONLY).fast
    weight = next(model.model.layers[0].self_attn.parameters())
    seen: list[torch.Tensor] = []
    for name in ("from zero", "restarting", "restarting elsewhere in each row", "backwards", "all the same"):
        step(model, {**batch(), "position_ids": POSITIONS[name].expand(B, -1)})
        assert weight.grad is not None
        assert all(distance(weight.grad, other) > 100 * FP32_TOLERANCE for other in seen), name
        seen.append(weight.grad.clone())


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 16), (7, 3), (16, 1), (4, 4)])
def test_sizes(rows: int, length: int) -> None:
    models = pair("Qwen3", **ONLY)
    for model in models.both:
        model(**batch(rows, length)).logits.square().sum().backward()
    assert_same_gradients(*models.both)


CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "one KV head": ("Llama", {"num_key_value_heads": 1}),
    "all KV heads": ("Llama", {"num_key_value_heads": 4}),
    "three heads": ("Llama", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "head size 6": ("Llama", {"head_dim": 6}),
    "head size 2": ("Llama", {"head_dim": 2}),
    "head size 20": ("Qwen3", {"head_dim": 20}),
    "partial rotary": ("Phi3", {"partial_rotary_factor": 0.25, "resid_pdrop": 0.0}),
    "biases": ("Llama", {"attention_bias": True}),
    "scaled frequencies": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic frequencies": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn, with attention scaling": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations(name: str) -> None:
    prefix, fields = CONFIGURATIONS[name]
    models = pair(Architecture(name, prefix, {**BY_NAME["Llama"].config, **fields}), **ONLY)
    assert {(r.rule, r.outcome) for r in models.report} == {("rope", "patched")}
    losses = [step(model, batch(2, 40)) for model in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


@pytest.mark.parametrize("architecture", [name for name in ROTARY if name != "Gemma 2"])  # it has no such attention
@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast"])
def test_attention_sees_the_plain_dtypes(architecture: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode, torch.float32)
    models = pair(architecture, dtype, **ONLY)
    attention = torch.nn.functional.scaled_dot_product_attention
    seen: list[list[tuple[torch.dtype, ...]]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen[-1].append((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    for model in models.both:
        model.set_attn_implementation("sdpa")
        seen.append([])
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            step(model, batch())
    assert len(seen[0]) == 2
    assert seen[1] == seen[0]


@pytest.mark.parametrize("architecture", ROTARY)
def test_a_cache_of_keys(architecture: str) -> None:
    """Positions past zero come with a cache: one token at a time gives the logits of the whole sequence."""
    models = pair(architecture, fast_loss=False)
    ids = batch(2, 8)["input_ids"]
    generated = []
    for model in models.both:
        model.eval()
        generated.append(model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=True))
        cached = model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=False)
        assert torch.equal(generated[-1], cached)
    assert torch.equal(*generated)


# -- what is not the rotate-half form --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Calls a rotary function by its global name, as transformers' attentions do."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.q_proj, self.k_proj = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return (q @ k.mT).sum(-1)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return ROTATION(q, cos, sin), ROTATION(k, cos, sin)


def half(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + rotate_half(x) * sin


ROTATIONS = {
    "interleaved": lambda x, cos, sin: x * cos + rotate_pairs(x) * sin,
    "other direction": lambda x, cos, sin: x * cos - rotate_half(x) * sin,
    "half swapped": lambda x, cos, sin: x * cos + torch.cat(x.chunk(2, -1)[::-1], -1) * sin,
    "scaled": lambda x, cos, sin: (x * cos + rotate_half(x) * sin) * 1.01,
    "first sine only": lambda x, cos, sin: x * cos + rotate_half(x) * sin[..., :1],
    "normed": lambda x, cos, sin: half(torch.nn.functional.normalize(x, dim=-1), cos, sin),
}

ROTATION: Any = half


def patch(model: nn.Module) -> list[PatchRecord]:
    patcher = ModelPatcher()
    for rule in rope.rules(None):
        patcher.add(rule)
    return patcher.apply(model).records


def test_the_rotate_half_form_is_served() -> None:
    assert [record.outcome for record in patch(Attention())] == ["patched"]


@pytest.mark.parametrize("name", ROTATIONS)
def test_other_rotations_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROTATION", ROTATIONS[name])
    module = Attention()
    records = patch(module)
    assert [record.outcome for record in records] == ["kept"]
    assert "differs" in records[0].reason
    assert "forward" not in vars(module)


INTERLEAVED = {
    "Cohere": {"vocab_size": VOCAB_SIZE},
    "Glm": {"vocab_size": VOCAB_SIZE, "partial_rotary_factor": 0.5, "head_dim": 16},
    "Helium": {"vocab_size": VOCAB_SIZE, "head_dim": 16},
    "GPTJ": {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8},
}


@pytest.mark.parametrize("prefix", INTERLEAVED)
def test_interleaved_architectures_train_alike(prefix: str) -> None:
    common = {} if prefix == "GPTJ" else BY_NAME["Llama"].config
    models = pair_of(Architecture(prefix, prefix, {**common, **INTERLEAVED[prefix]}).build())
    assert not [r for r in models.report.patched if r.rule == "rope"]
    losses = [step(model, batch()) for model in (m.eval() for m in models.both)]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def test_other_models_of_the_class_keep_their_function() -> None:
    plain = pair("Llama", **ONLY).plain
    other = copy.deepcopy(plain)
    module = __import__(type(plain).__module__, fromlist=["_"])
    function = module.apply_rotary_pos_emb
    models = pair_of(plain, **ONLY)
    assert module.apply_rotary_pos_emb is function
    forward = type(other.model.layers[0].self_attn).forward
    assert other.model.layers[0].self_attn.forward.__func__ is forward
    assert models.fast.model.layers[0].self_attn.forward.__func__ is not forward
