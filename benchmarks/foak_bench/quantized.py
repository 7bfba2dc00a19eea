"""Quantized models made on the device, equal to those that are loaded from `foak_bench.models`' checkpoints.

Writing and reading 4 GB for each row takes longer than the row's steps; what is loaded is the same either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foak_bench.models import GPTQ_BITS, GPTQ_GROUP, gptq_tensors, linears, random_model
from foak_bench.scenarios import Work

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["quantized_model"]


def quantized_model(config: PretrainedConfig, work: Work, device: torch.device) -> PreTrainedModel:
    """The random model of a work with every linear layer but the head quantized, as its loader would leave it.

    Args:
        config: of the model.
        work: whose `method` is `qlora-nf4` or `gptq`.
        device: where the model is made, and its weights are quantized.
    """
    model = random_model(config, Work(model=work.model), device)
    replace = _nf4_layer if work.method == "qlora-nf4" else _gptq_layer
    for name, linear in list(linears(model)):
        model.set_submodule(name, replace(linear))
    marked: Any = model
    if work.method == "qlora-nf4":
        _mark_4bit(marked)
    else:
        marked.quantization_method = "gptq"
    return model


def _nf4_layer(linear: nn.Linear) -> nn.Module:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = bnb.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
    )
    layer.weight = weight.to(linear.weight.device)  # where it is quantized, on a CPU too
    return layer


def _gptq_layer(linear: nn.Linear) -> nn.Module:
    from foak.quantized_peft.gptq.layer import GptqLinear

    with linear.weight.device:
        layer = GptqLinear(
            linear.in_features, linear.out_features, GPTQ_BITS, GPTQ_GROUP, dtype=linear.weight.dtype, act_order=True
        )
    for name, tensor in gptq_tensors(linear).items():
        layer.get_parameter(name).data.copy_(tensor)
    layer.groups_changed()
    return layer


def _mark_4bit(model: Any) -> None:
    """What transformers' loader leaves on a model, by which PEFT, TRL and Trainer know what it is."""
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model.hf_quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    model.config.quantization_config = settings
    model.quantization_method = settings.quant_method
    model.is_loaded_in_4bit = model.is_quantized = True
