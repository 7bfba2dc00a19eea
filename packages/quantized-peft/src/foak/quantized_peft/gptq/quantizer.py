"""How transformers' own loader is told to put GPTQ layers into a model: a quantizer, registered by a name of ours.

The loader does the rest as for any model: one file or many, devices, dtypes, tied weights, renamed tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

from foak.core.errors import UnsupportedError
from foak.quantized_peft.gptq.checkpoint import Checkpoint, StoredLayer
from foak.quantized_peft.gptq.errors import CheckpointError
from foak.quantized_peft.gptq.layer import GptqLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["METHOD"]

METHOD = "foak_gptq"
"""`quant_method` of the configuration that the loader is given."""


@register_quantization_config(METHOD)
class GptqConfig(QuantizationConfigMixin):
    """What the loader is given: a checkpoint that has been looked at. Written out, it is what the checkpoint says."""

    def __init__(self, checkpoint: Checkpoint, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]
        self.checkpoint = checkpoint

    def to_dict(self) -> dict[str, Any]:
        """`quantization_config` as it stands in the checkpoint."""
        return {**self.checkpoint.settings.written, "quant_method": QuantizationMethod.GPTQ.value}


@register_quantizer(METHOD)
class GptqQuantizer(HfQuantizer):
    """Puts `GptqLinear` in place of the layers that the checkpoint has quantized, and checks what was loaded."""

    quantization_config: GptqConfig

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        checkpoint = self.quantization_config.checkpoint
        for stored_name, stored in checkpoint.layers.items():
            name = _name_in(model, stored_name)
            if name is None:
                raise CheckpointError(
                    f"{checkpoint.folder / checkpoint.weights}: {stored_name} is quantized, but {type(model).__name__} "
                    "has no linear layer of that name"
                )
            plain = model.get_submodule(name)
            if type(plain) is not nn.Linear:
                raise UnsupportedError(
                    f"{checkpoint.folder}: {name} is quantized and a {type(plain).__name__} in "
                    f"{type(model).__name__}; only torch.nn.Linear is served"
                )
            _check_sizes(checkpoint, name, plain, stored)
            head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            if plain is head and model.config.get_text_config().tie_word_embeddings:
                raise UnsupportedError(
                    f"{checkpoint.folder}: {name} is quantized, and the model ties it to its embeddings: it cannot be "
                    "both; quantize without lm_head, or set tie_word_embeddings to false"
                )
            model.set_submodule(name, _replacement(plain, stored, checkpoint.settings.zero_offset))
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        settings = self.quantization_config.checkpoint.settings
        self._changed = False
        for name, layer in model.named_modules():
            if not isinstance(layer, GptqLinear):
                continue
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
            if layer.qweight.is_meta:  # loaded for its shapes, or kept on disk by accelerate
                continue
            if settings.by_gptqmodel and settings.zero_offset == 1 and layer.bits != 3:
                self._changed |= _return_what_was_borrowed(layer)
            _check_values(name, layer)
            if layer.bias_was_added and not layer.bias.any():
                layer.register_parameter("bias", None)
            layer.groups_changed()
        # By this name PEFT knows that nothing can be merged into the weights, and transformers that no cast is meant
        # for them.
        model.quantization_method = QuantizationMethod.GPTQ  # type: ignore[assignment]
        return model

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on it."""
        return True

    def is_serializable(self) -> bool:
        """Whether the model can be saved as the checkpoint that it came from."""
        return not self._changed


def _name_in(model: PreTrainedModel, stored: str) -> str | None:
    """The model's name for a layer of the file, which may have been saved with or without the prefix of the head's."""
    prefix = f"{model.base_model_prefix}."
    names = (stored, prefix + stored, stored.removeprefix(prefix))
    modules = dict(model.named_modules())
    return next((name for name in names if name in modules), None)


def _check_sizes(checkpoint: Checkpoint, name: str, plain: nn.Linear, stored: StoredLayer) -> None:
    if (plain.in_features, plain.out_features) != (stored.in_features, stored.out_features):
        raise CheckpointError(
            f"{checkpoint.folder / checkpoint.weights}: {name} has {stored.in_features} inputs and "
            f"{stored.out_features} outputs at {stored.settings.bits} bits; config.json makes it {plain.in_features} "
            f"and {plain.out_features}"
        )


def _replacement(plain: nn.Linear, stored: StoredLayer, zero_offset: int) -> GptqLinear:
    has_bias = plain.bias is not None
    layer = GptqLinear(
        stored.in_features,
        stored.out_features,
        stored.settings.bits,
        stored.settings.group_size,
        bias=has_bias or stored.has_bias,
        zero_offset=zero_offset,
        act_order=stored.has_g_idx,
        scale_dtype=stored.scale_dtype,
        dtype=plain.weight.dtype,
        device="meta",
    )
    # AutoGPTQ writes a bias of zeros for each layer that has none.
    layer.bias_was_added = stored.has_bias and not has_bias
    return layer


def _check_values(name: str, layer: GptqLinear) -> None:
    groups = layer.scales.shape[0]
    if layer.g_idx is not None and layer.g_idx.numel():
        low, high = (int(value) for value in torch.aminmax(layer.g_idx))
        if low < 0 or high >= groups:
            wrong = low if low < 0 else high
            raise CheckpointError(f"{name}.g_idx names group {wrong}; there are {groups}, from 0 on")
    if not bool(torch.isfinite(layer.scales).all()):
        raise CheckpointError(f"{name}.scales has values that are infinite or not numbers")


def _return_what_was_borrowed(layer: GptqLinear) -> bool:
    """Adds to the zeros the ones that GPTQModel took off whole words; true where that is more than one for each.

    A zero of 0 is stored as the largest value, for which it borrowed from the zero above it in the same word.
    """
    ones = sum(1 << shift for shift in range(0, 32, layer.bits))
    words = (layer.qzeros.long() + ones) & 0xFFFFFFFF
    fields = (words.unsqueeze(-1) >> torch.arange(0, 32, layer.bits, device=words.device)) & ((1 << layer.bits) - 1)
    if bool((fields != 0).all()):
        return False
    layer.qzeros.data = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    layer.zero_offset = 0
    return True
