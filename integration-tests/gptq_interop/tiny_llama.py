"""The model that both quantizers are given, and what is written beside what they save.

Runs in the quantizers' environments, which have no foak: torch, transformers and safetensors only.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 160
INPUT_IDS = [[(7 * position + 11) % VOCABULARY for position in range(24)]]


def tiny_llama() -> LlamaForCausalLM:
    """One layer, random, in float16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                # Magnitudes that fall along the inputs, in no order: act-order has something to do.
                spread = 10 ** torch.rand(parameter.shape[1], generator=torch.Generator().manual_seed(len(name)))
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1])).mul_(spread)
            parameter.data = (
                parameter.half()
            )  # and not the buffers: the rotation's frequencies are float32 in every dtype
    return model.eval()


def calibration(count: int = 16, length: int = 48) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(3, VOCABULARY, (1, length), generator=generator),
            "attention_mask": torch.ones(1, length, dtype=torch.long),
        }
        for _ in range(count)
    ]


def write_expected(
    folder: Path, rounded: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], quantizer: str
) -> None:
    """Writes `expected.safetensors`: what the quantizer's own layers decode to, and what follows from it.

    Args:
        folder: the checkpoint's.
        rounded: the dense weights [out, in] of the quantized layers in float16, in which they are stored.
        exact: the same, decoded in float32.
        quantizer: its name and version, and those of what it ran with.

    The logits are those of the plain model, in float32, that has the exact weights in place of its own.
    """
    model = tiny_llama().float()
    for name, weight in exact.items():
        layer = model.get_submodule(name)
        assert layer.weight.shape == weight.shape, f"{name}: {layer.weight.shape}, {weight.shape}"
        assert weight.dtype is torch.float32
        assert torch.equal(weight.half(), rounded[name])
        layer.weight.data = weight
    with torch.no_grad():
        logits = model(torch.tensor(INPUT_IDS)).logits
    tensors = {f"{name}.weight": weight.contiguous() for name, weight in rounded.items()}
    save_file({**tensors, "logits": logits.contiguous()}, folder / "expected.safetensors")
    (folder / "written_by.json").write_text(json.dumps({"quantizer": quantizer}) + "\n", encoding="utf-8")
