"""The architectures that the tests and the support table cover, each as a tiny configuration with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 101

_DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 4.0,
}


@dataclass(frozen=True)
class Architecture:
    """One row of the matrix.

    Attributes:
        name: what people call it.
        model: prefix of the classes in transformers: ``LlamaConfig``, ``LlamaForCausalLM``.
        config: fields of the tiny configuration.
    """

    name: str
    model: str
    config: dict[str, Any] = field(default_factory=dict)

    def tiny_config(self) -> Any:
        """The tiny configuration."""
        prefix = {"Gemma3": "Gemma3Text"}.get(self.model, self.model)
        return getattr(transformers, f"{prefix}Config")(**self.config)

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
        """A model with random weights, those of the norms included (a weight of ones hides mistakes)."""
        torch.manual_seed(seed)
        model = getattr(transformers, f"{self.model}ForCausalLM")._from_config(self.tiny_config())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model.to(dtype).train()

    @staticmethod
    def batch(size: int = 2, length: int = 17, seed: int = 0) -> dict[str, torch.Tensor]:
        """Random token ids ``[B, S]``, right-padded, with the padding and a prompt ignored in the labels."""
        generator = torch.Generator().manual_seed(seed)
        input_ids = torch.randint(3, VOCAB_SIZE, (size, length), generator=generator)
        attention_mask = torch.ones_like(input_ids)
        attention_mask[-1, -4:] = 0
        input_ids[-1, -4:] = 0
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        labels[:, :3] = -100
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("Llama", "Llama", _DECODER),
    Architecture("Mistral", "Mistral", {**_DECODER, "sliding_window": 8}),
    Architecture("Mixtral", "Mixtral", {**_DECODER, **_EXPERTS}),
    Architecture("Granite", "Granite", {**_DECODER, **_GRANITE}),
    Architecture("GraniteMoe", "GraniteMoe", {**_DECODER, **_GRANITE, **_EXPERTS}),
    Architecture(
        "GraniteMoeShared", "GraniteMoeShared", {**_DECODER, **_GRANITE, **_EXPERTS, "shared_intermediate_size": 48}
    ),
    Architecture(
        "GraniteMoeHybrid",
        "GraniteMoeHybrid",
        {
            **_DECODER,
            **_GRANITE,
            **_EXPERTS,
            "shared_intermediate_size": 48,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_d_head": 32,
            "mamba_chunk_size": 8,
        },
    ),
    Architecture(
        "GPTBigCode",
        "GPTBigCode",
        dict(
            vocab_size=VOCAB_SIZE,
            n_embd=64,
            n_inner=96,
            n_layer=2,
            n_head=4,
            n_positions=64,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        ),
    ),
    Architecture("Qwen2", "Qwen2", _DECODER),
    Architecture("Qwen3", "Qwen3", {**_DECODER, "head_dim": 24}),
    Architecture("Gemma 2", "Gemma2", {**_DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    Architecture("Gemma 3", "Gemma3", {**_DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    Architecture("Phi-3", "Phi3", {**_DECODER, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0}),
    Architecture("OLMo 2", "Olmo2", _DECODER),
    Architecture("SmolLM3", "SmolLM3", {**_DECODER, "no_rope_layers": [1, 0]}),
)
"""The families that foak names; every other architecture is served by the same rules."""
