"""Checkpoints, precision and adapters on a 4-bit base: what users of such libraries have stumbled over."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from foak.core import AccelerationFramework
from foak.kernels.dense_weight import dense_weight_of
from foak.quantized_peft.plugin import QuantizedPeftPlugin

IDS = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))


def framework(**section: object) -> AccelerationFramework:
    tree = {"plugins": {"peft": {"quantization": {"bitsandbytes": {"quant_type": "nf4", **section}}}}}
    return AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def train(model: torch.nn.Module, steps: int = 3) -> list[float]:
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    model.train()  # without dropout the same; in evaluation bitsandbytes repacks the weights on some CPUs
    found: Tensor = model(input_ids=IDS).logits
    return found


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_in_several_files(checkpoint: Path, tmp_path: Path) -> None:
    model = framework().load_model(checkpoint)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert torch.equal(logits(framework().load_model(tmp_path)), logits(model))


def test_an_unquantized_checkpoint_in_several_files_and_an_older_one(checkpoint: Path, tmp_path: Path) -> None:
    expected = logits(framework().load_model(checkpoint))
    dense = AutoModelForCausalLM.from_pretrained(checkpoint)
    dense.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(framework().load_model(tmp_path / "sharded")), expected)
    dense.config.save_pretrained(tmp_path / "older")
    torch.save(dense.state_dict(), tmp_path / "older" / "pytorch_model.bin")
    assert torch.equal(logits(framework().load_model(tmp_path / "older")), expected)


# -- precision --------------------------------------------------------------------------------------------------------


def tied_llama(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_copy_of_norms_and_embeddings_in_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = framework().load_model(tied_llama(tmp_path), dtype=dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    adapted = get_peft_model(model, lora())
    framework().apply(adapted)
    held = {name: p.dtype for name, p in adapted.named_parameters() if "lora_" not in name}
    assert set(held.values()) == {torch.uint8, dtype}
    assert not any(p.requires_grad for name, p in adapted.named_parameters() if "lora_" not in name)
    if dtype is torch.bfloat16:
        losses = train(adapted, steps=5)
        assert losses[-1] < losses[0]
    assert held == {name: p.dtype for name, p in adapted.named_parameters() if "lora_" not in name}


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_train_alike_without_peft_s_preparation(checkpoint: Path, reentrant: bool) -> None:
    def gradients(checkpointed: bool) -> dict[str, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = get_peft_model(framework().load_model(checkpoint, dtype=torch.float32), lora())
        for name, parameter in model.named_parameters():  # B is zero at first, and so would be A's gradient
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
        framework().apply(model)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == 28
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_a_model_that_peft_has_prepared_trains_too(checkpoint: Path) -> None:
    model = framework().load_model(checkpoint, dtype=torch.bfloat16)
    prepared = get_peft_model(prepare_model_for_kbit_training(model), lora())
    framework().apply(prepared)
    losses = train(prepared, steps=5)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_weights_stored_for_fsdp_train_as_those_in_uint8(checkpoint: Path, storage: str) -> None:
    losses = []
    for dtype in ("uint8", storage):
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = get_peft_model(framework(storage_dtype=dtype).load_model(checkpoint, dtype=torch.float32), lora())
        losses.append(train(model))
    assert losses[0] == losses[1]


# -- adapters ---------------------------------------------------------------------------------------------------------


def plain_four_bit(checkpoint: Path) -> PreTrainedModel:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=quantization, dtype=torch.float32
    )
    return model


def test_adapters_go_to_plain_peft_and_back(checkpoint: Path, tmp_path: Path) -> None:
    ours = framework()
    trained = get_peft_model(ours.load_model(checkpoint, dtype=torch.float32), lora())
    ours.apply(trained)
    train(trained)
    trained.save_pretrained(tmp_path / "foak")
    loaded = PeftModel.from_pretrained(plain_four_bit(checkpoint), tmp_path / "foak")
    assert torch.equal(logits(loaded), logits(trained))

    theirs = get_peft_model(plain_four_bit(checkpoint), lora())
    train(theirs)
    theirs.save_pretrained(tmp_path / "peft")
    other = framework()
    back = PeftModel.from_pretrained(other.load_model(checkpoint, dtype=torch.float32), tmp_path / "peft")
    other.apply(back)
    assert torch.equal(logits(back), logits(theirs))


def test_evaluation_generation_and_training_again(checkpoint: Path) -> None:
    model = get_peft_model(framework().load_model(checkpoint, dtype=torch.float32), lora())
    framework().apply(model)
    before = train(model, steps=2)
    model.eval()
    out = model.generate(input_ids=IDS[:1, :4], max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 7)
    after = train(model, steps=2)
    assert after[-1] < before[0]


def test_a_copy_is_read_as_the_original(checkpoint: Path) -> None:
    model = framework().load_model(checkpoint, dtype=torch.float32)
    twin: Any = copy.deepcopy(model)
    projections = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    copies = [m for m in twin.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(projections) == len(copies) == 14
    for one, other in zip(projections, copies, strict=True):
        source = dense_weight_of(one)
        assert source is not None
        assert source.refusal(other) is None
        assert torch.equal(source.decode(one, torch.float32, None), source.decode(other, torch.float32, None))
