"""What the tests of this folder share: loading by foak, and the plain model that a quantized one stands for."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from foak.core import AccelerationFramework
from foak.quantized_peft.gptq.layer import GptqLinear

SECTION = {"kernel": "triton_v2", "from_quantized": True}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
INPUT_IDS = torch.tensor([[(7 * position + 11) % 160 for position in range(24)]])

# Seven float32 products of at most 128 terms, in another order on another machine, lead to logits of about 1: each is
# off by some sqrt(128) units of 6e-8, and magnitudes that spread over a decade make up for a factor of ten.
TOLERANCE = 2e-5


def framework() -> AccelerationFramework:
    return AccelerationFramework({"plugins": {"peft": {"quantization": {"auto_gptq": SECTION}}}})


def layers_of(model: nn.Module) -> dict[str, GptqLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, GptqLinear)}


def dequantized(model: PreTrainedModel) -> PreTrainedModel:
    """A plain model of the same class with dense weights in place of the quantized ones."""
    config = type(model.config).from_dict(
        {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    )
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in plain.state_dict()}
    state.update({f"{name}.weight": layer.dequantize(torch.float32) for name, layer in layers_of(model).items()})
    plain.load_state_dict(state)
    return plain.eval()


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(INPUT_IDS).logits
    return found
