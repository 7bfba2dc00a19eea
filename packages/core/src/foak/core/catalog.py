"""Which package provides which configuration key: a table that is used in messages only.

Plugins are found through their entry points and declare their keys themselves. This table only lets a message name
the package for a key whose plugin is not installed. A test compares it with what every installed plugin declares.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["FOREIGN", "SECTIONS", "Provided", "foreign_section", "nearest", "provider_of"]


@dataclass(frozen=True)
class Provided:
    """A section of the configuration: the distribution that provides it and the keys inside it."""

    dist: str
    keys: tuple[str, ...]


_KERNELS = ("fast_loss", "fast_rms_layernorm", "fast_rope_embeddings", "fast_activation", "fused_lora")

SECTIONS: Mapping[str, Provided] = {
    "training.fused_ops_and_kernels": Provided("foak-fast-kernels", _KERNELS),
    "training.activation_checkpointing": Provided("foak-fast-kernels", ("budget",)),
    "training.attention.padding_free": Provided("foak-padding-free", ("method", "attention")),
    "training.dataloader.multipack": Provided("foak-padding-free", ("num_processes", "max_tokens")),
    "peft.quantization.auto_gptq": Provided(
        "foak-quantized-peft", ("kernel", "from_quantized", "use_external_lib", "decode_once")
    ),
    "peft.quantization.bitsandbytes": Provided(
        "foak-quantized-peft",
        ("quant_type", "no_peft_model", "double_quant", "compute_dtype", "storage_dtype", "decode_once"),
    ),
    "peft.quantization.fused_ops_and_kernels": Provided("foak-fast-kernels", ("base_layer", *_KERNELS)),
}
"""Dotted path below `plugins:` to what provides it."""

FOREIGN: Mapping[str, str] = {
    "training.moe.scattermoe": "mixture-of-experts",
    "training.moe.megablocks": "mixture-of-experts",
    "training.odm.odm": "online data mixing",
    "training.mamba.cp": "mamba context parallel",
    "peft.quantization.unsloth": "unsloth",
}
"""Sections of fms-acceleration for which foak has no plugin, to the name of the plugin there."""


def foreign_section(path: str) -> str | None:
    """The name of fms-acceleration's plugin if `path` leads to, or into, one of its sections that foak lacks."""
    for known, name in FOREIGN.items():
        if known == path or known.startswith(f"{path}.") or path.startswith(f"{known}."):
            return name
    return None


def provider_of(path: str) -> str | None:
    """The distribution that provides a section or a key inside one; None if the table does not know it."""
    if path in SECTIONS:
        return SECTIONS[path].dist
    section, _, key = path.rpartition(".")
    provided = SECTIONS.get(section)
    return provided.dist if provided and key in provided.keys else None


def nearest(path: str, known: Iterable[str]) -> str | None:
    """The known dotted path that is most like `path`, by the whole of it and by its last part; None if none is near.

    Both count because people misspell a key and also write a right key in the wrong place.
    """
    best, best_score = None, 0.6
    for candidate in known:
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        last = difflib.SequenceMatcher(None, path.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        score = (whole + last) / 2
        if score > best_score:
            best, best_score = candidate, score
    return best
