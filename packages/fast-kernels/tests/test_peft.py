"""PEFT models: adapters put on before and after foak, of every kind, train as without it and save the same files."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    BY_NAME,
    FP32_TOLERANCE,
    Pair,
    accelerate,
    assert_same_gradients,
    counting_computed,
    distance,
    pair_of,
    step,
)
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn

ORDERS = pytest.mark.parametrize("order", ["adapter first", "foak first"])


@dataclass(frozen=True)
class Adapter:
    """One way to adapt a model.

    Attributes:
        config: LoraConfig's fields.
        architecture: which model.
        tied: whether the head shares the embedding's weight.
        dtype: of the base.
        prepare: what is done to the base before the adapter is put on.
        computed: whether the head is one that needs its logits.
    """

    config: dict[str, Any]
    architecture: str = "Llama"
    tied: bool = False
    dtype: torch.dtype = torch.float32
    prepare: Callable[[Any], Any] = field(default=lambda model: model)
    computed: bool = False


def kbit(reentrant: bool) -> Callable[[Any], Any]:
    return lambda model: prepare_model_for_kbit_training(
        model, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )


def resized(model: Any) -> Any:
    torch.manual_seed(0)
    model.resize_token_embeddings(112, mean_resizing=False)
    return model


ALL = {"target_modules": "all-linear"}
QV = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, Adapter] = {
    "some": Adapter(QV),
    "only the up projection": Adapter({"target_modules": ["up_proj"]}),
    "all linear": Adapter(ALL),
    "dropout 0.1": Adapter({**ALL, "lora_dropout": 0.1}),
    "dropout 0.5": Adapter({**ALL, "lora_dropout": 0.5}),
    "rsLoRA": Adapter({**ALL, "use_rslora": True}),
    "DoRA": Adapter({**ALL, "use_dora": True, "lora_dropout": 0.1}),
    "LoRA bias": Adapter({**ALL, "lora_bias": True}),
    "base biases": Adapter({**ALL, "bias": "all"}, "Qwen2"),
    "patterns": Adapter({**ALL, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 5}}),
    "saved head": Adapter({**QV, "modules_to_save": ["lm_head"]}),
    "saved head and embedding": Adapter({**QV, "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved norms": Adapter({**QV, "modules_to_save": ["norm", "input_layernorm"]}),
    "LoRA on the head": Adapter({"target_modules": ["q_proj", "lm_head"]}, computed=True),
    "LoRA on the embedding": Adapter({"target_modules": ["q_proj", "embed_tokens"]}),
    "tied": Adapter(QV, tied=True),
    "tied, LoRA on the head": Adapter({"target_modules": ["q_proj", "lm_head"]}, tied=True, computed=True),
    "tied, saved embedding": Adapter({**QV, "modules_to_save": ["embed_tokens"]}, tied=True),
    "tied, both saved": Adapter(
        {**QV, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, tied=True, computed=True
    ),
    "tied, some tokens": Adapter({**QV, "trainable_token_indices": {"embed_tokens": [3, 4]}}, tied=True, computed=True),
    "resized": Adapter({**QV, "modules_to_save": ["lm_head", "embed_tokens"]}, prepare=resized),
    "prepared for k-bit": Adapter(ALL, dtype=torch.bfloat16, prepare=kbit(False)),
    "prepared for k-bit, reentrant": Adapter(ALL, dtype=torch.bfloat16, prepare=kbit(True)),
    "Gemma 2": Adapter(ALL, "Gemma 2", tied=True),
    "Phi-3": Adapter(ALL, "Phi-3"),
    "Mixtral": Adapter(QV, "Mixtral"),
    "GPTBigCode": Adapter({"target_modules": ["c_attn", "c_fc"]}, "GPTBigCode"),
    "GraniteMoeHybrid": Adapter({"target_modules": ["q_proj", "in_proj"]}, "GraniteMoeHybrid"),
}


def base_of(adapter: Adapter) -> Any:
    model: Any = BY_NAME[adapter.architecture].build(adapter.dtype)
    if adapter.tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return model


def adapted(base: Any, adapter: Adapter) -> PeftModel:
    """A copy of the base with an adapter whose every factor has a part in the result."""
    model = adapter.prepare(base)
    torch.manual_seed(1)
    peft_model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **adapter.config))
    fill(peft_model)
    return peft_model.train()


def fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name or "magnitude" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def models_of(adapter: Adapter, order: str) -> Pair:
    base = base_of(adapter)
    plain = adapted(copy.deepcopy(base), adapter)
    # Fused adapters draw masks of their own: what they compute with dropout is compared in test_fused_lora.
    lora = "auto" if not adapter.config.get("lora_dropout") or adapter.config.get("use_dora") else False
    if order == "foak first":
        framework = accelerate(base)
        fast = adapted(base, adapter)
    else:
        fast = adapted(base, adapter)
        framework = accelerate(fast, fused_lora=lora)
    return Pair(plain, fast, framework, None)  # type: ignore[arg-type]


@ORDERS
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_alike(name: str, order: str) -> None:
    adapter = ADAPTERS[name]
    models = models_of(adapter, order)
    assert models.plain.state_dict().keys() == models.fast.state_dict().keys()
    trainable = [n for n, p in models.plain.named_parameters() if p.requires_grad]
    assert trainable == [n for n, p in models.fast.named_parameters() if p.requires_grad]
    losses: list[list[torch.Tensor]] = []
    with counting_computed() as computed:
        for model in models.both:
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-5)
            losses.append([])
            for seed in range(3):
                torch.manual_seed(seed)  # the same dropout
                losses[-1].append(step(model, BY_NAME["Llama"].batch(seed=seed)))
                if seed:
                    optimizer.step()
    for expected, actual in zip(*losses, strict=True):
        assert distance(actual, expected) <= FP32_TOLERANCE
    # AdamW has divided by the gradients' sizes twice by now
    assert_same_gradients(*models.both, tolerance=20 * FP32_TOLERANCE)
    assert adapter.computed or not computed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_adapters_of_another_dtype(dtype: torch.dtype, autocast: torch.dtype | None) -> None:
    """PEFT keeps adapters in fp32 over a 16-bit base: no dtype error, as near to fp32 as the plain model."""
    adapter = Adapter({**ALL, "modules_to_save": ["lm_head"]}, dtype=dtype)
    plain = adapted(base_of(adapter), adapter)
    exact = copy.deepcopy(plain).float()
    step(exact, BY_NAME["Llama"].batch())
    models = pair_of(plain, fused_lora="auto")
    errors = []
    for model in models.both:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            try:
                step(model, BY_NAME["Llama"].batch())
            except RuntimeError:  # fp32 head over 16-bit hidden states without autocast
                errors.append(None)
                continue
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        squares = [distance(p.grad, r.grad) ** 2 for p, r in pairs if p.grad is not None and r.grad is not None]
        errors.append((sum(squares) / len(squares)) ** 0.5)
    assert (errors[0] is None) == (errors[1] is None)
    if errors[0] is not None and errors[1] is not None:
        assert errors[1] <= max(1.5 * errors[0], FP32_TOLERANCE)


def both_do(models: Pair, act: Callable[[Any], Any]) -> None:
    for model in models.both:
        act(model)


def assert_same_logits(models: Pair) -> None:
    ids = BY_NAME["Llama"].batch()["input_ids"]
    with torch.no_grad():
        expected, actual = (model(input_ids=ids).logits for model in models.both)
    assert distance(actual, expected) <= FP32_TOLERANCE


@ORDERS
@pytest.mark.parametrize("name", ["all linear", "saved head", "LoRA on the head", "DoRA"])
def test_switching_disabling_and_merging(name: str, order: str) -> None:
    models = models_of(ADAPTERS[name], order)
    batch = BY_NAME["Llama"].batch()

    def second(model: PeftModel) -> None:
        torch.manual_seed(2)
        model.add_adapter("other", LoraConfig(r=2, task_type="CAUSAL_LM", **ADAPTERS[name].config))
        torch.manual_seed(3)
        for key, parameter in model.named_parameters():
            if "other" in key:
                nn.init.normal_(parameter, std=0.1)

    both_do(models, second)
    for active in ("other", "default", "other"):
        both_do(models, lambda model, active=active: model.set_adapter(active))
        losses = []
        for model in models.both:
            torch.manual_seed(0)  # the same dropout
            losses.append(step(model, batch))
        assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
        assert_same_gradients(*models.both)
    both_do(models, lambda model: model.eval())
    assert_same_logits(models)

    def without(model: PeftModel) -> torch.Tensor:
        with model.disable_adapter(), torch.no_grad():
            return model(**batch).loss + 0

    expected, actual = (without(model) for model in models.both)
    assert distance(actual, expected) <= FP32_TOLERANCE
    both_do(models, lambda model: model.merge_adapter())
    assert_same_logits(models)
    both_do(models, lambda model: model.unmerge_adapter())
    assert_same_logits(models)
    unloaded = Pair(*(model.merge_and_unload() for model in models.both), models.framework, None)  # type: ignore[arg-type]
    assert_same_logits(unloaded)
    losses = [step(model.requires_grad_(True), batch) for model in unloaded.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*unloaded.both)


@ORDERS
@pytest.mark.parametrize("name", ["all linear", "saved head", "LoRA on the head", "tied, both saved", "DoRA"])
def test_saved_adapters_are_plain_ones(name: str, order: str, tmp_path: Path) -> None:
    adapter = ADAPTERS[name]
    models = models_of(adapter, order)
    both_do(models, lambda model: step(model, BY_NAME["Llama"].batch()))
    for folder, model in zip(("plain", "fast"), models.both, strict=True):
        model.save_pretrained(tmp_path / folder)
    files = [{f.name for f in (tmp_path / folder).iterdir()} for folder in ("plain", "fast")]
    assert files[0] == files[1]
    configs = [(tmp_path / folder / "adapter_config.json").read_text() for folder in ("plain", "fast")]
    assert configs[0] == configs[1]
    weights = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("plain", "fast")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    # what foak saved loads on a plain base, and what plain PEFT saved on an accelerated one
    plain = PeftModel.from_pretrained(base_of(adapter), tmp_path / "fast").eval()
    base = base_of(adapter)
    accelerate(base)
    fast = PeftModel.from_pretrained(base, tmp_path / "plain").eval()
    both_do(models, lambda model: model.eval())
    assert_same_logits(Pair(models.plain, plain, models.framework, None))  # type: ignore[arg-type]
    assert_same_logits(Pair(models.plain, fast, models.framework, None))  # type: ignore[arg-type]
