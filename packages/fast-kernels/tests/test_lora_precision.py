"""Fused LoRA layers whose base, dtype or settings are not their siblings', or not those that they were applied to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import BY_NAME, FP32_TOLERANCE, assert_same_gradients, distance, pair_of, step
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from torch import nn
from torch.nn import functional as F

from foak.kernels import dense_weight


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config).train()


def attention_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn


@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])  # the first of those that share an input, and another
def test_a_base_that_begins_to_train_after_apply_has_its_gradient(what: str, projection: str) -> None:
    models = pair_of(adapted(BY_NAME["Qwen2"].build()), fused_lora=True)
    for model in models.both:
        getattr(getattr(attention_of(model), projection).base_layer, what).requires_grad_(True)
    losses = [step(model, BY_NAME["Qwen2"].batch()) for model in models.both]
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert getattr(getattr(attention_of(models.plain), projection).base_layer, what).grad.any()
    assert_same_gradients(*models.both)


def test_an_input_that_peft_would_not_cast_is_not_cast() -> None:
    """Adapters in fp32 on a base in bf16: PEFT casts the input to them, unless it is told not to."""
    models = pair_of(adapted(BY_NAME["Llama"].build(torch.bfloat16)), fused_lora=True)
    for model in models.both:
        with disable_input_dtype_casting(model), pytest.raises(RuntimeError, match="dtype"):
            step(model, BY_NAME["Llama"].batch())
        step(model, BY_NAME["Llama"].batch())


class _NarrowLinear(nn.Linear):
    """Multiplies in bf16 whatever the input is, as a quantized layer with a dtype of its own does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)


@pytest.mark.parametrize("narrow", ["q_proj", "k_proj", "v_proj"])
def test_each_of_the_layers_on_one_input_multiplies_in_its_own_dtype(
    narrow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[torch.dtype] = []

    def decode(layer: nn.Module, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
        read.append(dtype)
        weight = layer.weight.detach().to(dtype)  # type: ignore[union-attr, operator]
        return weight if out is None else out.copy_(weight)

    how = dense_weight.DenseWeight(lambda layer: None, decode, lambda layer, x: torch.bfloat16)
    monkeypatch.setitem(dense_weight._by_type, _NarrowLinear, how)
    model: Any = BY_NAME["Llama"].build()
    for layer in model.model.layers:
        getattr(layer.self_attn, narrow).__class__ = _NarrowLinear
    models = pair_of(adapted(model), fused_lora=True)
    losses = [step(model, BY_NAME["Llama"].batch()) for model in models.both]
    assert set(read) == {torch.bfloat16}
    # One of seven products of a layer is in bf16, in both models, but rounded in another place by the fused one.
    assert distance(losses[1], losses[0]) <= 2.0**-9
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    for name in ("q_proj", "k_proj", "v_proj"):
        expected, actual = (getattr(attention_of(model), name)(x) for model in models.both)
        assert distance(actual, expected) <= (2.0**-8 if name == narrow else FP32_TOLERANCE), name
