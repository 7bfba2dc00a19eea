"""LoRA layers: this release leaves them to PEFT, and says so for each."""

from __future__ import annotations

from torch import nn

from foak.core.patching import NotApplicable, Rule


def match(module: nn.Module) -> str | None:
    """Keeps every LoRA layer."""
    if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
        raise NotApplicable("this release leaves LoRA layers to PEFT")
    return None


def rules() -> list[Rule]:
    """The rule behind ``fused_lora``: a record for each layer in the report."""

    def never(module: nn.Module) -> None:
        raise AssertionError("the rule's match never matches")

    return [Rule(name="fused_lora", target="forward", match=match, sample=never, build=never)]  # type: ignore[arg-type]
