"""What is asked of a model's modules: which checkpoint, what runs them all, and what forbids that only some do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

_LINEAR_ATTENTION = ("sdpa", "flash", "flex", "paged", "foak")


def checkpointing_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that know checkpointing, by name: transformers' layers, and in older code the stacks around them."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "gradient_checkpointing")}


def layers_of(modules: dict[str, nn.Module]) -> list[nn.Module]:
    """Those of them that are single layers: none of the others lies below."""
    return [
        module
        for name, module in modules.items()
        if not any(other.startswith(f"{name}." if name else "") for other in modules if other != name)
    ]


def common_root(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """The smallest module with a forward of its own that contains all the named ones, and is none of its own layers."""
    paths = [name.split(".") if name else [] for name in names]
    shared = 0
    while all(len(path) > shared for path in paths) and len({path[shared] for path in paths}) == 1:
        shared += 1
    if len(paths) == 1:
        shared = max(0, shared - 1)
    for depth in range(shared, -1, -1):
        module = model.get_submodule(".".join(paths[0][:depth]))
        if type(module).forward is not nn.Module.forward:
            return module
    return model


def is_checkpointing(modules: Sequence[nn.Module]) -> bool:
    """Whether checkpointing is on in any of them."""
    return any(getattr(module, "gradient_checkpointing", False) for module in modules)


def kinds_of(layers: Sequence[nn.Module]) -> list[int]:
    """A number for each layer, the same where class and parameters' shapes are."""
    numbers: dict[object, int] = {}
    structures = (
        (type(layer), tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()))
        for layer in layers
    )
    return [numbers.setdefault(structure, len(numbers)) for structure in structures]


def sharded_by(modules: Sequence[nn.Module]) -> str | None:
    """Why recomputation may need other processes, which must then recompute the same layers; None if it does not."""
    for module in (modules[0], modules[-1]):
        if "_is_fsdp_managed_module" in vars(module) or any(c.__name__ == "FSDPModule" for c in type(module).__mro__):
            return "under FSDP all processes must recompute the same layers"
        for parameter in module.parameters():
            if hasattr(parameter, "ds_id"):
                return "under DeepSpeed ZeRO-3 all processes must recompute the same layers"
            if hasattr(parameter, "device_mesh"):
                return "its parameters are sharded (DTensor), and all processes must recompute the same layers"
            break
    return None


def holds_scores(root: nn.Module) -> bool:
    """Whether attention may hold its scores, whose number grows with the square of the length."""
    name: Any = getattr(getattr(root, "config", None), "_attn_implementation", None)
    return not (isinstance(name, str) and any(part in name for part in _LINEAR_ATTENTION))
