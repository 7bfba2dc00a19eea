"""Packed attention against the model's own on each sequence alone: values and every gradient, for both forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma2Config, GptOssConfig, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

from foak.core import UnsupportedError
from foak.padding_free import varlen
from foak.padding_free.attention import attention
from foak.padding_free.masks import PackedMask
from foak.padding_free.packed import PackedSequences

LENGTHS = (5, 17, 1, 9, 23, 2)
TOLERANCE = 64 * torch.finfo(torch.float32).eps
"""Of fp32 sums of some 30 products that are added in another order, relative to values of size one."""


def states(q_heads: int, kv_heads: int, size: int, value_size: int | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((q_heads, size), (kv_heads, size), (kv_heads, value_size or size))
    return [torch.randn(1, heads, sum(LENGTHS), d).requires_grad_() for heads, d in shapes]


def layer(groups: int, module: Any = llama, config: Any = LlamaConfig) -> torch.nn.Module:
    """An attention layer of transformers, of which only its forward's globals and the number of groups are used."""
    name = next(n for n in ("LlamaAttention", "Gemma2Attention", "GptOssAttention") if hasattr(module, n))
    heads = max(4, groups)
    sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": heads // groups}
    sizes["head_dim"] = 8
    return getattr(module, name)(config(**sizes), layer_idx=0).train()  # type: ignore[no-any-return]


def one_by_one(
    function: Callable[..., Any], module: Any, tensors: list[torch.Tensor], seen: Callable[[int], Any], **kwargs: Any
) -> torch.Tensor:
    """The function on each sequence alone, under the mask ``seen(length)``."""
    outputs, begin = [], 0
    for length in LENGTHS:
        parts = [tensor[:, :, begin : begin + length] for tensor in tensors]
        outputs.append(function(module, *parts, seen(length), **kwargs)[0])
        begin += length
    return torch.cat(outputs, dim=1)


def pairs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.arange(length)
    return places[:, None], places[None]


def visible(length: int, window: int | None = None, chunk: int | None = None) -> torch.Tensor:
    query, key = pairs(length)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    if chunk is not None:
        seen &= query // chunk == key // chunk
    return seen[None, None]


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(actual, tensors, upstream)
    theirs = torch.autograd.grad(expected, tensors, upstream)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=8 * TOLERANCE)


@pytest.mark.parametrize("call_cost", [0.0, 1e9], ids=["buckets", "one bucket"])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize(("q_heads", "kv_heads", "size", "value_size"), [(4, 4, 16, 16), (4, 1, 7, 7), (4, 2, 24, 16)])
def test_sdpa_over_buckets(
    q_heads: int, kv_heads: int, size: int, value_size: int, window: int | None, call_cost: float
) -> None:
    tensors = states(q_heads, kv_heads, size, value_size)
    module = layer(q_heads // kv_heads)
    mask = PackedMask(PackedSequences(LENGTHS, call_cost), "auto", window)
    actual, weights = attention(module, *tensors, mask, base="sdpa", scaling=0.3, dropout=0.0)
    assert weights is None
    expected = one_by_one(sdpa_attention_forward, module, tensors, lambda n: visible(n, window), scaling=0.3)
    assert_equal(actual, expected, tensors)


def test_chunks_are_sequences_of_their_own() -> None:
    tensors, module = states(4, 2, 16), layer(2)
    mask = PackedMask(PackedSequences(LENGTHS, 0.0).split(4), "auto")
    actual, _ = attention(module, *tensors, mask, base="sdpa")
    expected = one_by_one(sdpa_attention_forward, module, tensors, lambda n: visible(n, chunk=4))
    assert_equal(actual, expected, tensors)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    ("family", "config", "kwargs"),
    [
        (llama, LlamaConfig, {}),
        (gemma2, Gemma2Config, {"softcap": 1.5}),
        (gpt_oss, GptOssConfig, {}),
    ],
    ids=["plain", "soft cap", "sinks"],
)
def test_eager_attention_keeps_what_it_does_besides(
    family: Any, config: Any, kwargs: dict[str, Any], window: int | None
) -> None:
    tensors, module = states(4, 2, 8), layer(2, family, config)
    if family is gpt_oss:
        torch.nn.init.normal_(module.sinks)  # type: ignore[arg-type]
    mask = PackedMask(PackedSequences(LENGTHS, 0.0), "auto", window)
    options = {"scaling": 0.4, "dropout": 0.0, **kwargs}
    actual, _ = attention(module, *tensors, mask, base="eager", **options)
    function = family.eager_attention_forward
    expected = one_by_one(function, module, tensors, lambda n: additive(visible(n, window)), **options)
    assert_equal(actual, expected, tensors)
    plain = one_by_one(
        llama.eager_attention_forward, module, tensors, lambda n: additive(visible(n, window)), scaling=0.4
    )
    assert (kwargs == {} and family is llama) is torch.allclose(actual, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_dropout_is_drawn_and_keeps_the_mean(base: str) -> None:
    module, count = layer(1), 4000
    lengths = (40, 8) * 4
    packed = PackedSequences(lengths, 0.0)
    query, key = (torch.randn(1, 4, packed.total, 8) for _ in range(2))
    value = torch.ones(1, 4, packed.total, 1)
    torch.manual_seed(0)
    draws = [
        attention(module, query, key, value, PackedMask(packed, "auto"), base=base, scaling=0.3, dropout=0.5)[0]
        for _ in range(count // packed.total)
    ]
    samples = torch.stack(draws).flatten()
    assert samples.std() > 0.1
    assert abs(float(samples.mean()) - 1) < 6 * float(samples.std()) / len(samples) ** 0.5


def test_what_is_not_packed_goes_to_the_models_own() -> None:
    module, tensors = layer(2), states(4, 2, 8)
    mask = additive(visible(sum(LENGTHS), 6))
    for base, function in (("sdpa", sdpa_attention_forward), ("eager", llama.eager_attention_forward)):
        actual = attention(module, *tensors, mask, base=base, scaling=0.3)[0]
        torch.testing.assert_close(actual, function(module, *tensors, mask, scaling=0.3)[0], rtol=0, atol=0)


@pytest.mark.parametrize("base", ["sdpa", "eager"])
def test_no_sequence_sees_another_bit_for_bit(base: str) -> None:
    tensors, module = [t.detach() for t in states(4, 2, 16)], layer(2)
    mask = PackedMask(PackedSequences(LENGTHS, 0.0), "auto", 6)
    before = attention(module, *tensors, mask, base=base, scaling=0.3)[0].split(LENGTHS, dim=1)
    for number, length in enumerate(LENGTHS):
        begin = sum(LENGTHS[:number])
        changed = [tensor.clone() for tensor in tensors]
        for tensor in changed:
            tensor[:, :, begin : begin + length] += 1.0
        after = attention(module, *changed, mask, base=base, scaling=0.3)[0].split(LENGTHS, dim=1)
        equal = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert equal == [other != number for other in range(len(LENGTHS))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: ((q, torch.cat([k, k], dim=2), torch.cat([v, v], dim=2)), {}), "caches and cross attention"),
        (lambda q, k, v: ((q.expand(2, -1, -1, -1), k, v), {}), "a packed batch of 57 tokens met queries"),
        (lambda q, k, v: ((q, k, v), {"position_bias": torch.zeros(1)}), "a bias over positions"),
    ],
)
def test_what_cannot_be_packed_is_refused(change: Callable[..., Any], message: str) -> None:
    tensors, kwargs = change(*states(4, 4, 8))
    with pytest.raises(UnsupportedError, match=message):
        attention(layer(1), *tensors, PackedMask(PackedSequences(LENGTHS), "auto"), base="sdpa", **kwargs)


# -- varlen_attn, whose kernel needs a GPU: its call, against functions of the signatures that releases have


def _each(q: Any, k: Any, v: Any, starts: Any, scale: float | None, window: int) -> torch.Tensor:
    outputs = []
    for begin, end in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True):
        parts = (t[begin:end].transpose(0, 1)[None] for t in (q, k, v))
        seen = visible(end - begin, window + 1 if window >= 0 else None)
        outputs.append(F.scaled_dot_product_attention(*parts, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outputs)


def first_signature(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # type: ignore[no-untyped-def]
    assert is_causal
    assert max_q == max_k == max(LENGTHS)
    assert cu_seq_q.dtype == torch.int32
    return _each(query, key, value, cu_seq_q, None, -1)


def later_signature(  # type: ignore[no-untyped-def]
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert window_size[1] == 0
    return _each(query, key, value, cu_seq_q, scale, window_size[0])


@pytest.fixture(params=[first_signature, later_signature], ids=["first signature", "later signature"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    import inspect

    monkeypatch.setattr(varlen, "_function", lambda: request.param)
    monkeypatch.setattr(varlen, "_parameters", lambda: frozenset(inspect.signature(request.param).parameters))
    return request.param


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_varlen_is_called_as_its_release_wants(
    kernel: Any, window: int | None, kv_heads: int, scaling: float | None
) -> None:
    tensors = states(4, kv_heads, 16)
    mask = PackedMask(PackedSequences(LENGTHS), "auto", window)
    if kernel is first_signature and window is not None:
        assert _refusal(window=window) == "this varlen_attn has no window"
        return
    actual = varlen.attend(mask, *tensors, scaling)
    module = layer(4 // kv_heads)
    expected = one_by_one(sdpa_attention_forward, module, tensors, lambda n: visible(n, window), scaling=scaling)
    assert_equal(actual, expected, tensors)


def _refusal(
    *, backend: str = "auto", base: str = "sdpa", window: int | None = None, device: str = "cuda", **changes: Any
) -> str | None:
    kwargs, lengths = changes.pop("kwargs", {}), changes.pop("lengths", LENGTHS)
    size, value_size = changes.pop("size", 64), changes.pop("value_size", None)
    dtype = changes.pop("dtype", torch.bfloat16)
    mask = PackedMask(PackedSequences(lengths), backend, window)

    def stub(last: int) -> Any:  # what `refusal` reads of a tensor on a GPU
        return SimpleNamespace(shape=(1, 4, 57, last), device=SimpleNamespace(type=device), dtype=dtype)

    return varlen.refusal(mask, stub(size), stub(size), stub(value_size or size), base, kwargs)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"window": 4}, None),
        ({"backend": "sdpa"}, "SDPA was asked for"),
        ({"base": "eager"}, "own eager attention"),
        ({"device": "cpu"}, "does not run on cpu"),
        ({"dtype": torch.float32}, "does not take torch.float32"),
        ({"size": 20}, "heads of size 20"),
        ({"size": 264}, "heads of size 264"),
        ({"size": 192, "value_size": 128}, "heads of size 192, 128"),
        ({"kwargs": {"dropout": 0.1}}, "no dropout"),
        ({"kwargs": {"softcap": 30.0}}, "no softcap"),
        ({"kwargs": {"s_aux": torch.ones(4)}}, "no s_aux"),
        ({"lengths": (1024, 1024)}, "one length are a dense batch"),
        ({"lengths": (2048,)}, "one length are a dense batch"),
        ({"lengths": (1024, 1023)}, None),
        ({"lengths": (1023, 1023)}, None),
        ({"lengths": (1024, 1024), "backend": "varlen"}, None),
        ({"lengths": (1024, 1024), "window": 100}, None),
    ],
)
def test_when_varlen_is_not_used(changes: dict[str, Any], reason: str | None) -> None:
    found = _refusal(**changes)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_autocast_makes_the_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert varlen._dtype(torch.ones(1)) == torch.bfloat16
    assert varlen._dtype(torch.ones(1)) == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize(("kv_heads", "size"), [(8, 128), (2, 64), (1, 80)])
def test_both_forms_on_a_gpu(backend: str, window: int | None, kv_heads: int, size: int) -> None:
    lengths = (300, 1, 77, 512, 40)
    packed = PackedSequences(lengths, 0.0).to("cuda")
    torch.manual_seed(0)
    shapes = ((8, size), (kv_heads, size), (kv_heads, size))
    tensors = [torch.randn(1, h, packed.total, d, device="cuda").bfloat16().requires_grad_() for h, d in shapes]
    mask = PackedMask(packed, backend, window)
    if backend == "varlen" and window is None:
        assert varlen.refusal(mask, *tensors, "sdpa", {}) is None
    actual, _ = attention(layer(8 // kv_heads), *tensors, mask, base="sdpa", scaling=0.1)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    outputs = []
    for parts in zip(*(tensor.split(lengths, dim=2) for tensor in wide), strict=True):
        query, key, value = (
            p.repeat_interleave(8 // kv_heads, dim=1) if i and kv_heads != 8 else p for i, p in enumerate(parts)
        )
        seen = visible(query.shape[2], window).cuda()
        outputs.append(F.scaled_dot_product_attention(query, key, value, seen, scale=0.1).transpose(1, 2))
    expected = torch.cat(outputs, dim=1)
    upstream = torch.randn(expected.shape, device="cuda").bfloat16()
    mine = torch.autograd.grad(actual, tensors, upstream)
    theirs = torch.autograd.grad(expected, wide, upstream.double())
    # values are rounded to bf16, and so are the weights of sums of up to 512 products: their errors add like sqrt(n)
    limit = 4 * torch.finfo(torch.bfloat16).eps * math.sqrt(2)
    for one, other in zip([actual, *mine], [expected, *theirs], strict=True):
        assert float((one.double() - other).norm() / other.norm()) <= limit
