"""What a model of each kind takes for one training step: small, padded, with ignored labels."""

from __future__ import annotations

from typing import Any

import torch
from tiny_configs import VOCAB_SIZE, TinyType

_LENGTH = 11


def batch_for(tiny: TinyType, config: Any) -> dict[str, Any]:
    """Arguments of a forward that gives a loss (logits only, for the assistants that have none of their own).

    Args:
        tiny: the type.
        config: its configuration.

    Returns:
        ``input_ids [2, 11]``, of which the second row is right-padded by three, ``attention_mask`` and ``labels`` in
        which padding and a prompt of two are -100; or what else the type's forward takes.
    """
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(5, VOCAB_SIZE, (2, _LENGTH), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -3:] = 0
    input_ids[1, -3:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, :2] = -100
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if tiny.batch == "image":
        size = config.vision_config.image_size
        batch["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    elif tiny.batch == "codebooks":
        codes = torch.randint(5, VOCAB_SIZE, (2, config.num_codebooks, _LENGTH), generator=generator)
        batch["input_ids"] = codes.reshape(2 * config.num_codebooks, _LENGTH)
        batch["labels"] = codes.transpose(1, 2).masked_fill((labels == -100)[..., None], -100)
    elif tiny.batch == "assistant":
        return _assistant_batch(config, generator)
    return batch


def _assistant_batch(config: Any, generator: torch.Generator) -> dict[str, Any]:
    """An assistant reads its target's last hidden states and its key-value states, and has no loss."""
    text = config.text_config
    heads, size = text.num_key_value_heads, text.per_layer_config[0].head_dim

    def states() -> torch.Tensor:
        return torch.randn(2, heads, _LENGTH, size, generator=generator)

    return {
        "inputs_embeds": torch.randn(2, 1, 2 * config.backbone_hidden_size, generator=generator),
        "position_ids": torch.full((2, 1), _LENGTH - 1),
        "attention_mask": torch.ones(2, _LENGTH, dtype=torch.long),
        "shared_kv_states": {kind: (states(), states()) for kind in ("full_attention", "sliding_attention")},
    }
