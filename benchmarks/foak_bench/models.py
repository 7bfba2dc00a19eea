"""Models of a real geometry with random weights, and quantized checkpoints of them."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from foak_bench.data import make_tokenizer
from foak_bench.scenarios import Work

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "GPTQ_BITS",
    "GPTQ_GROUP",
    "checkpoint_folder",
    "decoded_model",
    "gptq_tensors",
    "linears",
    "make_config",
    "random_model",
]

_SEED = 0
GPTQ_BITS, GPTQ_GROUP = 4, 128


def make_config(geometry: Mapping[str, Any], work: Work) -> PretrainedConfig:
    """The transformers configuration of a geometry, with the work's own number of layers."""
    fields = {key: value for key, value in geometry.items() if key != "type"}
    if work.layers is not None:
        fields["num_hidden_layers"] = work.layers
    config = transformers.AutoConfig.for_model(geometry["type"], **fields)
    config.use_cache = False
    return config


def random_model(config: PretrainedConfig, work: Work, device: torch.device) -> PreTrainedModel:
    """A model made on the device, the same whenever it is made there.

    float32 weights hold the values of the bf16 ones, so that a run in float32 starts where the others do.
    """
    torch.manual_seed(_SEED)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.float() if work.precision in ("fp32", "mixed") else model


def checkpoint_folder(geometry: Mapping[str, Any], work: Work, scratch: Path, device: torch.device) -> Path:
    """The folder with the checkpoint that the work loads, written if it is not there yet.

    What is quantized, and what unsloth trains, must be loaded; everything else is made on the device (`random_model`).
    """
    config = make_config(geometry, work)
    kind = work.method if work.method in ("qlora-nf4", "gptq") else "bf16"
    same = hashlib.sha256(config.to_json_string().encode()).hexdigest()[:12]
    folder = scratch / f"{work.model}-{kind}-{same}"
    if (folder / "config.json").is_file():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model = random_model(config, Work(model=work.model), device)
    make_tokenizer(config.vocab_size).save_pretrained(partial)
    if kind == "bf16":
        model.save_pretrained(partial)
    else:
        tensors, settings = (_nf4 if kind == "qlora-nf4" else _gptq)(model)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        content = {
            **config.to_dict(),
            "architectures": [type(model).__name__],
            "dtype": "bfloat16",
            "quantization_config": settings,
        }
        (partial / "config.json").write_text(json.dumps(content, default=str), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def decoded_model(folder: Path, config: PretrainedConfig, work: Work, device: torch.device) -> PreTrainedModel:
    """The model that a quantized checkpoint stands for, every weight decoded to a plain float32 one."""
    model = random_model(config, work, device)
    decode = _decode_nf4 if work.method == "qlora-nf4" else _decode_gptq
    with safe_open(folder / "model.safetensors", framework="pt", device=str(device)) as stored, torch.no_grad():
        keys = list(stored.keys())
        for name, linear in linears(model):
            own = [key for key in keys if key.startswith(f"{name}.")]
            linear.weight.copy_(decode({key: stored.get_tensor(key) for key in own}, name))
    return model


def _decode_nf4(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    import bitsandbytes as bnb

    prefix = f"{name}.weight."
    packed = tensors[f"{name}.weight"]
    parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    state = bnb.functional.QuantState.from_dict(parts, device=packed.device)
    weight: torch.Tensor = bnb.functional.dequantize_4bit(packed, state)
    return weight


def _decode_gptq(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    words, scales = tensors[f"{name}.qweight"], tensors[f"{name}.scales"]
    shifts = torch.arange(0, 32, GPTQ_BITS, device=words.device)
    codes = (words.unsqueeze(1) >> shifts.view(1, -1, 1)) & (2**GPTQ_BITS - 1)
    steps = codes.reshape(-1, words.shape[1]) - 2 ** (GPTQ_BITS - 1)
    return (steps * scales.float()[tensors[f"{name}.g_idx"].long()]).t()


def linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that a quantization takes: all but the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _rest(model: PreTrainedModel, taken: set[str]) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: tensor.cpu().contiguous() for name, tensor in state.items() if name not in taken}


def _nf4(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and settings of a checkpoint that bitsandbytes quantized to NF4 with double quantization."""
    import bitsandbytes as bnb

    tensors: dict[str, torch.Tensor] = {}
    taken = set()
    for name, linear in list(linears(model)):
        packed, state = bnb.functional.quantize_4bit(linear.weight.data, quant_type="nf4", compress_statistics=True)
        tensors[f"{name}.weight"] = packed.cpu()
        for key, value in state.as_dict(packed=True).items():
            tensors[f"{name}.weight.{key}"] = value.cpu().contiguous()
        taken.add(f"{name}.weight")
    settings = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
    }
    return {**tensors, **_rest(model, taken)}, settings


def gptq_tensors(linear: nn.Linear) -> dict[str, torch.Tensor]:
    """What a symmetric 4-bit GPTQ checkpoint stores of a layer, on its device: its weights, each rounded to a step.

    A step is three eighths of the layer's standard deviation, so that the codes 0 … 15 reach three of them.
    """
    out_features, in_features = linear.weight.shape
    device = linear.weight.device
    groups = math.ceil(in_features / GPTQ_GROUP)
    per_word = 32 // GPTQ_BITS
    scale = float(linear.weight.detach().float().std()) * 3 / 2 ** (GPTQ_BITS - 1)
    scales = torch.full((groups, out_features), scale, dtype=torch.float16, device=device)
    steps = torch.round(linear.weight.detach().t().float() / scales[0].float()).to(torch.int32)
    codes = (steps + 2 ** (GPTQ_BITS - 1)).clamp_(0, 2**GPTQ_BITS - 1).view(-1, per_word, out_features)
    words = torch.zeros((in_features // per_word, out_features), dtype=torch.int32, device=device)
    for place in range(per_word):
        words |= codes[:, place] << (place * GPTQ_BITS)
    return {
        "qweight": words,
        "scales": scales,
        # The first format stores a zero point minus one, eight of them in a word.
        "qzeros": torch.full((groups, out_features // per_word), 0x77777777, dtype=torch.int32, device=device),
        "g_idx": torch.arange(in_features, dtype=torch.int32, device=device) // GPTQ_GROUP,
    }


def _gptq(model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and settings of a symmetric 4-bit GPTQ checkpoint whose weights are spread as the model's are."""
    tensors: dict[str, torch.Tensor] = {}
    taken = set()
    for name, linear in list(linears(model)):
        tensors |= {f"{name}.{key}": tensor.cpu() for key, tensor in gptq_tensors(linear).items()}
        taken.add(f"{name}.weight")
    settings = {
        "quant_method": "gptq",
        "bits": GPTQ_BITS,
        "group_size": GPTQ_GROUP,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    }
    return {**tensors, **_rest(model, taken)}, settings
