"""LoRA layers fused with their base: which are, which stay and why, dropout as PEFT means it, and what is called."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from pairs import BY_NAME, FP32_TOLERANCE, Pair, assert_same_gradients, distance, pair_of, step
from peft import LoraConfig, get_peft_model
from torch import nn

from foak.core import AccelerationFramework
from foak.fast_kernels.lora.shared_input import ATTRIBUTE, groups_of
from foak.kernels.lora.dropout import keep_mask

SEED = 987654321
ALL = {"target_modules": "all-linear"}


def adapted(architecture: str = "Llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    model: Any = BY_NAME[architecture].build(dtype)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **ALL, **config}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model.train()


def records(models: Pair, outcome: str) -> dict[str, str]:
    return {r.module: r.reason for r in models.report if r.rule == "fused_lora" and r.outcome == outcome}


def lora_layers(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Phi-3", "Gemma 2", "GPTBigCode", "Granite"])
def test_every_layer_on_a_linear_base_is_fused(architecture: str) -> None:
    """Base biases (Qwen2), packed projections (Phi-3), another MLP (GPTBigCode) included."""
    model = adapted(architecture)
    models = pair_of(model, fused_lora=True)
    assert records(models, "patched").keys() == lora_layers(model).keys()
    batch = BY_NAME[architecture].batch()
    losses = [step(m, batch) for m in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "a variant of LoRA (Dora)"),
        ({"lora_bias": True}, "the adapter has a bias"),
        ({"target_modules": ["embed_tokens"]}, "an adapter of another kind"),
    ],
)
def test_other_adapters_stay_and_the_report_says_why(config: dict[str, Any], reason: str) -> None:
    model = adapted(**config)
    models = pair_of(model, fused_lora="auto")
    kept = records(models, "kept")
    assert kept.keys() == lora_layers(model).keys()
    assert all(reason in text for text in kept.values())
    losses = [step(m, BY_NAME["Llama"].batch()) for m in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def test_a_trained_base_bias_stays() -> None:
    models = pair_of(adapted("Qwen2", bias="all"), fused_lora="auto")
    assert {n.rpartition(".")[2] for n in records(models, "kept")} == {"q_proj", "k_proj", "v_proj"}
    assert all("base's bias is trained" in reason for reason in records(models, "kept").values())
    assert records(models, "patched")


def test_two_active_adapters_stay() -> None:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=2, task_type="CAUSAL_LM", **ALL))
    model.base_model.set_adapter(["default", "other"])
    models = pair_of(model, fused_lora="auto")
    assert all("2 adapters are active" in reason for reason in records(models, "kept").values())
    assert not records(models, "patched")


class _KnownMask(nn.Module):
    """Dropout by the mask that the kernels draw from `SEED`."""

    def __init__(self, p: float, stream: int) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        kept = keep_mask(SEED, self.stream, *rows.shape, self.p, x.device)
        return (rows * kept / (1 - self.p)).view(x.shape)


STREAMS = {"k_proj": 1, "v_proj": 2, "up_proj": 1}
"""Which of a group's masks a layer has; the first of a group, and one alone, has 0."""


@pytest.fixture
def known_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foak.kernels.lora.autograd.draw_seed", lambda: SEED)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("use_rslora", [True, False])
@pytest.mark.parametrize("activation", ["auto", False])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_dropout_is_pefts_with_a_mask_for_each_adapter(
    p: float, use_rslora: bool, activation: Any, checkpointing: bool | None, known_seed: None
) -> None:
    model = adapted(lora_dropout=p, use_rslora=use_rslora)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    models = pair_of(model, fused_lora=True, fast_activation=activation)
    for name, layer in lora_layers(models.plain).items():
        layer.lora_dropout["default"] = _KnownMask(p, STREAMS.get(name.rpartition(".")[2], 0))
    losses = [step(m, BY_NAME["Llama"].batch()) for m in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


def test_dropout_is_off_in_evaluation() -> None:
    models = pair_of(adapted(lora_dropout=0.5), fused_lora=True)
    ids = BY_NAME["Llama"].batch()["input_ids"]
    with torch.no_grad():
        expected, actual = (m.eval()(input_ids=ids).logits for m in models.both)
    assert distance(actual, expected) <= FP32_TOLERANCE


def test_an_input_of_several_layers_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key and value make one call of the thin products, so do gate and up."""
    model = adapted()
    calls: list[int] = []
    from foak.fast_kernels.lora import forward

    promise = forward.promise_lora_linears
    monkeypatch.setattr(
        forward, "promise_lora_linears", lambda x, members, **k: calls.append(len(members)) or promise(x, members, **k)
    )
    models = pair_of(model, fused_lora=True, fast_activation=False)
    calls.clear()
    step(models.fast, BY_NAME["Llama"].batch())
    assert calls == [3, 1, 2, 1] * 2


def test_groups_are_read_from_the_source() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            q = self.q(x).relu()
            if y is not None:
                k = self.k(x)
            x = self.first(x) + k
            x = self.second(x)
            return self.third(x) + self.fourth(x) + q + self.k(y)

    class Layer(nn.Module):
        def __init__(self, in_features: int) -> None:
            super().__init__()
            self.in_features = in_features

    layers = {n: Layer(8) for n in ("q", "k", "first", "second", "third")} | {"fourth": Layer(9)}
    names = {id(layer): name for name, layer in layers.items()}
    found = [[names[id(layer)] for layer in group] for group in groups_of(Attention(), layers)]
    assert found == [["q", "k", "first"]]


def test_hooks_and_replaced_parts_are_called() -> None:
    models = pair_of(adapted(), fused_lora=True, fast_activation=True)
    layer: Any = next(m for n, m in lora_layers(models.fast).items() if n.endswith("down_proj"))
    seen: list[str] = []
    handles = [
        layer.register_forward_hook(lambda *_: seen.append("layer")),
        layer.lora_A["default"].register_forward_hook(lambda *_: seen.append("A")),
        layer.base_layer.register_forward_hook(lambda *_: seen.append("base")),
    ]
    losses = [step(m, BY_NAME["Llama"].batch()) for m in models.both]
    assert sorted(seen) == ["A", "base", "layer"]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    for handle in handles:
        handle.remove()
    step(models.fast, BY_NAME["Llama"].batch())
    assert len(seen) == 3


def test_global_backward_hooks_see_every_module() -> None:
    models = pair_of(adapted(), fused_lora=True, fast_activation=True)
    seen: list[list[str]] = []
    for model in models.both:
        seen.append([])
        handle = nn.modules.module.register_module_full_backward_hook(
            lambda module, *_: seen[-1].append(type(module).__name__)
        )
        step(model, BY_NAME["Llama"].batch())
        handle.remove()
    assert sorted(seen[0]) == sorted(seen[1])


def test_shapes_alone_and_forward_mode_go_to_the_own_forward() -> None:
    models = pair_of(adapted(), fused_lora=True, fast_activation=True)
    layer: Any = models.fast.base_model.model.model.layers[0].self_attn.q_proj
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(2, 64), torch.randn(2, 64))
        assert torch.autograd.forward_ad.unpack_dual(layer(x)).tangent is not None
    assert copy.deepcopy(layer).to("meta")(torch.empty(2, 64, device="meta")).is_meta


def test_nothing_is_kept_alive_between_steps() -> None:
    models = pair_of(adapted(), fused_lora=True)
    inputs: list[weakref.ref[torch.Tensor]] = []
    layer: Any = next(iter(lora_layers(models.fast).values()))
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    step(models.fast, BY_NAME["Llama"].batch())
    handle.remove()
    assert inputs
    assert all(reference() is None for reference in inputs)


def test_inference_mode() -> None:
    models = pair_of(adapted(), fused_lora=True)
    ids = BY_NAME["Llama"].batch()["input_ids"]
    with torch.inference_mode():
        expected, actual = (m(input_ids=ids).logits for m in models.both)
    assert distance(actual, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("change", ["lora_bias", "alpha dropout"])
def test_what_is_added_later_is_looked_at_in_every_call(change: str) -> None:
    models = pair_of(adapted(), fused_lora=True)
    for model in models.both:
        torch.manual_seed(3)
        if change == "lora_bias":
            model.add_adapter("other", LoraConfig(r=2, lora_bias=True, target_modules=["q_proj"]))
            model.set_adapter("other")
            nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["other"].bias)
        else:
            model.base_model.model.model.layers[0].self_attn.q_proj.lora_dropout["default"] = nn.AlphaDropout(0.5)
    losses = []
    for model in models.both:
        torch.manual_seed(4)
        losses.append(step(model, BY_NAME["Llama"].batch()))
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models.both)


@pytest.mark.parametrize(
    "change", ["adapter", "disabled", "values", "mode", "base", "input", "input in place", "grad mode"]
)
def test_a_promise_is_not_taken_when_the_layer_has_changed(change: str) -> None:
    model = adapted(lora_dropout=0.5 if change == "mode" else 0.0)
    model.add_adapter("other", LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **ALL))
    models = pair_of(model.train(change == "mode"), fused_lora=True)
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    found = []
    for model in models.both:
        attention = model.base_model.model.model.layers[0].self_attn
        attention.q_proj(x)
        if change == "adapter":
            model.set_adapter("other")
        elif change == "disabled":
            model.base_model.disable_adapter_layers()
        elif change == "values":
            with torch.no_grad():
                attention.k_proj.lora_B["default"].weight.mul_(3)
        elif change == "base":
            with torch.no_grad():
                attention.k_proj.base_layer.weight.mul_(3)
        elif change == "mode":
            model.eval()
        given = x
        if change == "input":
            given = x * 2
        elif change == "input in place":
            given = x.mul_(2)
        with torch.set_grad_enabled(change != "grad mode"):
            found.append(attention.k_proj(given))
        if change == "input in place":
            x.div_(2)
    assert distance(found[1], found[0]) <= FP32_TOLERANCE
    assert found[1].requires_grad == found[0].requires_grad


def test_a_forward_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory in one of the products must free the input, and the graph before it, at once."""
    models = pair_of(adapted(), fused_lora=True)
    attention = models.fast.base_model.model.model.layers[0].self_attn
    x = torch.randn(2, 3, 64, requires_grad=True)
    y = x.exp()
    alive = weakref.ref(y)

    def fail(self: Any, index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("foak.kernels.lora.autograd.Call.product", fail)
    with pytest.raises(torch.OutOfMemoryError):
        attention.q_proj(y)
    del y
    gc.collect()
    assert alive() is None


def test_a_frozen_weight_that_changes_before_the_backward_is_an_error() -> None:
    models = pair_of(adapted(), fused_lora=True)
    for model in models.both:
        loss = model(**BY_NAME["Llama"].batch()).loss
        with torch.no_grad():
            model.base_model.model.model.layers[0].mlp.gate_proj.base_layer.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_merged_and_disabled_model_is_left_as_it_is() -> None:
    model = adapted().eval()
    ids = BY_NAME["Llama"].batch()["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.merge_adapter()
        with model.disable_adapter():
            pair_of(model, fused_lora=True)
            framework = AccelerationFramework(
                {"plugins": {"training": {"fused_ops_and_kernels": {"fused_lora": True}}}}
            )
            framework.apply(model)
        assert all(layer.merged for layer in lora_layers(model).values())
        assert distance(model(input_ids=ids).logits, expected) <= FP32_TOLERANCE
        model.unmerge_adapter()
        assert distance(model(input_ids=ids).logits, expected) <= FP32_TOLERANCE


def test_copies_train_by_themselves_and_restore_leaves_no_trace() -> None:
    model = adapted()
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    framework = AccelerationFramework({"plugins": {"training": {"fused_ops_and_kernels": {"fused_lora": True}}}})
    framework.apply(model)
    copied = copy.deepcopy(model)
    batch = BY_NAME["Llama"].batch()
    losses = [step(m, batch) for m in (model, copied)]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(model, copied)
    assert any(ATTRIBUTE in vars(m) for m in model.modules())
    framework.restore()
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before


def test_under_torch_compile_a_layer_has_no_break_that_foak_adds() -> None:
    models = pair_of(adapted(), fused_lora=True, fast_activation="auto", fast_rms_layernorm="auto")
    hidden = torch.randn(2, 5, 64)
    breaks = []
    for model in models.both:
        decoder = model.base_model.model.model
        places = decoder.rotary_emb(hidden, torch.arange(5)[None])
        torch._dynamo.reset()
        breaks.append(torch._dynamo.explain(decoder.layers[0])(hidden, position_embeddings=places).graph_break_count)
    assert breaks[1] <= breaks[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_sixteen_bits_are_nearer_to_fp32_than_without(dtype: torch.dtype, autocast: bool) -> None:
    plain = adapted(dtype=dtype)
    exact = copy.deepcopy(plain).float()
    step(exact, BY_NAME["Llama"].batch())
    models = pair_of(plain, fused_lora=True)
    assert records(models, "patched").keys() == lora_layers(plain).keys()
    errors = []
    for model in models.both:
        with torch.autocast("cpu", dtype, enabled=autocast):
            step(model, BY_NAME["Llama"].batch())
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        squares = [distance(p.grad, r.grad) ** 2 for p, r in pairs if p.grad is not None and r.grad is not None]
        errors.append((sum(squares) / len(squares)) ** 0.5)
    assert errors[1] <= 1.1 * errors[0]
