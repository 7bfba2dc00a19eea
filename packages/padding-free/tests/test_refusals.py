"""What cannot be trained padding-free is refused, with the reason and what to change; nothing is left behind."""

from __future__ import annotations

import copy
from typing import Any

import packs
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    MambaConfig,
    MambaForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from foak.core import UnsupportedError
from foak.padding_free import support
from foak.padding_free.packed import PACKED, PackedSequences
from foak.padding_free.trial import LENGTHS, objection

TINY = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


class PositionsFromZero(LlamaForCausalLM):
    """Counts positions along the row, whatever its batch says, and adds an embedding of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.places = nn.Embedding(64, config.hidden_size)

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        embeds = self.get_input_embeddings()(input_ids) + self.places(places)
        return super().forward(inputs_embeds=embeds, position_ids=places[None], **kwargs)


class LeakingNorm(LlamaForCausalLM):
    """Looks at the token before, over the border of a sequence."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        embeds = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embeds + 0.1 * nn.functional.pad(embeds, (0, 0, 1, 0))[:, :-1], **kwargs)


def llama(model_class: Any = LlamaForCausalLM, **fields: Any) -> Any:
    torch.manual_seed(0)
    return model_class(LlamaConfig(**{**TINY, **fields}))


def bert() -> Any:
    return BertLMHeadModel(BertConfig(**TINY, is_decoder=False))


REFUSED: dict[str, tuple[Any, str]] = {
    "an encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "it is an encoder-decoder, whose cross attention has no packed form",
    ),
    "biases by position": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)),
        "reads attention masks outside of transformers' attention interface",
    ),
    "attention in both directions": (bert, "masks by bidirectional_mask_function"),
    "positions counted from tokens": (
        lambda: RobertaForCausalLM(RobertaConfig(**TINY, is_decoder=True, pad_token_id=1)),
        "the logits of packed sequences differ from those of padded ones",
    ),
    "positions counted along the row": (lambda: llama(PositionsFromZero), "the logits of packed sequences differ"),
    "states that run over the border": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=2, state_size=8)),
        "a layer mixes tokens across sequences",
    ),
    "a look at the token before": (lambda: llama(LeakingNorm), "a layer mixes tokens across sequences"),
    "a label for each token": (lambda: llama(LlamaForTokenClassification), "its loss (ForTokenClassification) is not"),
    "a label for each row": (
        lambda: llama(LlamaForSequenceClassification, pad_token_id=0),
        "its loss (ForSequenceClassification) is not that of the next token",
    ),
    "weights of attention": (
        lambda: llama(output_attentions=True, attn_implementation="eager"),
        "output_attentions is on",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_is_refused_with_the_reason(kind: str) -> None:
    make, reason = REFUSED[kind]
    model = make()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(UnsupportedError, match=r"plugins\.training\.attention\.padding_free") as caught:
        packs.framework().apply(model)
    assert reason in str(caught.value)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert all(before[name][key] is value for name in after for key, value in after[name].items())


@pytest.mark.parametrize("model_class", [PositionsFromZero, LeakingNorm])
def test_the_trial_sees_small_faults_in_bf16(model_class: Any) -> None:
    with pytest.raises(UnsupportedError, match="cannot be trained padding-free"):
        packs.framework().apply(llama(model_class).bfloat16())
    packs.framework().apply(llama().bfloat16())


def test_prompt_learning_is_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedError, match="puts virtual tokens before each row of a batch; use another PEFT"):
        packs.framework().apply(model)


def test_a_form_of_attention_that_the_models_own_would_not_leave() -> None:
    model = llama(attn_implementation="flex_attention")
    with pytest.raises(UnsupportedError, match="attention: varlen takes the place of the model's flex_attention"):
        packs.framework(attention="varlen").apply(model)


def test_other_implementations_pack_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    seen: dict[str, Any] = {}

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        seen.update(kwargs, attention_mask=attention_mask)

    monkeypatch.setattr(type(model), "forward", forward)
    monkeypatch.setattr(support, "_try", lambda *args: "tried")
    model.config._attn_implementation_internal = "flash_attention_2"
    report = packs.framework().apply(model)
    assert report.patched[0].kernel == "flash_attention_2"
    assert model.config._attn_implementation == "flash_attention_2"
    model(**packs.packed(packs.sequences((2, 3))))
    assert seen["attention_mask"] is None
    assert seen["cu_seq_lens_q"].tolist() == seen["cu_seq_lens_k"].tolist() == [0, 2, 5]
    assert (seen["max_length_q"], seen["max_length_k"]) == (3, 3)
    assert seen["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    batch = packs.packed(packs.sequences((2, 3)))
    batch[PACKED].restarts = False
    with pytest.raises(UnsupportedError, match="flash_attention_2 finds sequences by positions that restart"):
        model(**batch)


def test_on_the_meta_device_nothing_is_tried() -> None:
    with torch.device("meta"):
        model = llama()
    report = packs.framework().apply(model)
    assert "not tried" in report.patched[0].reason


def test_a_form_that_fails_the_trial_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU on which `varlen_attn` computes something else."""
    from foak.padding_free import attention, varlen

    monkeypatch.setattr(support, "_on_cuda", lambda language: True)
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    monkeypatch.setattr(
        attention.varlen, "refusal", lambda mask, *args: None if mask.backend != "sdpa" else "SDPA was asked for"
    )
    monkeypatch.setattr(varlen, "attend", lambda mask, q, k, v, scaling: v[0].transpose(0, 1)[None].repeat(1, 1, 1, 1))
    model = llama(num_key_value_heads=4)
    plain = copy.deepcopy(model)
    with pytest.raises(UnsupportedError, match="the logits of packed sequences differ"):
        packs.framework(attention="varlen").apply(copy.deepcopy(model))
    report = packs.framework().apply(model)
    assert report.patched[0].kernel == "sdpa over buckets of sequences"
    assert "not by varlen_attn (the logits of packed sequences differ" in report.patched[0].reason
    examples = packs.sequences()
    packs.assert_equal_steps(packs.step(model, packs.packed(examples)), packs.step(plain, packs.padded(examples)))


def test_the_form_of_dense_batches_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU on which buckets go wrong: then sequences of one length stay with `varlen_attn`."""
    from foak.padding_free import attention

    inner = attention._bucketed
    monkeypatch.setattr(support, "_on_cuda", lambda language: True)
    monkeypatch.setattr(
        attention, "_bucketed", lambda *args, **kwargs: inner(*args, **kwargs) * (2 if args[5].backend == "sdpa" else 1)
    )
    report = packs.framework().apply(llama())
    assert "not by SDPA over buckets (the logits of packed sequences differ" in report.patched[0].reason


def test_a_model_that_cannot_be_judged_is_refused() -> None:
    class Noisy(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids=input_ids, **kwargs)
            output.logits = output.logits + torch.randn_like(output.logits)
            return output

    assert "nothing can be held against them" in str(objection(llama(Noisy), PackedSequences(LENGTHS), vocab_size=101))
