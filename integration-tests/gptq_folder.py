"""A GPTQ checkpoint of a model, its weights rounded to nearest: for tests, which quantize in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foak.kernels.gptq.packing import round_to_nearest

__all__ = ["write_gptq"]


def write_gptq(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, bits: int = 4, group_size: int = 32
) -> None:
    """Writes the model with every linear layer but the head quantized, and the rest in its own dtype."""
    tokenizer.save_pretrained(folder)
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    }
    head = model.get_output_embeddings()
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            packed = round_to_nearest(layer.weight.detach().float(), bits, group_size, zero_offset=1)
            del tensors[f"{name}.weight"]
            tensors.update(packed.named(name))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    dtype = str(model.dtype).removeprefix("torch.")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": dtype}
    content = {**config, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(content, default=str), encoding="utf-8")
