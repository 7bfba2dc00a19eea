"""LoRA layers of PEFT on a frozen linear layer, dense or quantized: base and adapter in one product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from foak.core.patching import NotApplicable, Rule
from foak.core.patching.binding import own_forward
from foak.core.patching.rule import Case
from foak.core.patching.twin import compute_dtype, trial_device
from foak.core.patching.verify import Verdict, compare
from foak.fast_kernels.lora.forward import RULE, active_adapter, adapter_refusal, lora_forward
from foak.fast_kernels.lora.shared_input import ATTRIBUTE, SharedInput, groups_of
from foak.kernels.dense_weight import dense_weight_of

_LARGEST_TRIAL = 64
"""A trial layer's largest size; a size that is no multiple of a tile shows more than a large one."""


def is_lora(module: nn.Module) -> bool:
    """Whether a module is an adapted layer of PEFT."""
    return hasattr(module, "lora_A") and hasattr(module, "lora_B") and hasattr(module, "base_layer")


def match(module: Any) -> str | None:
    """Why a LoRA layer can be fused; raises `NotApplicable` with the reason where it is one that cannot."""
    if not is_lora(module):
        return None
    base: Any = module.base_layer
    how = dense_weight_of(base)
    if len(module.lora_A) == 0:
        raise NotApplicable(f"an adapter of another kind than LoRA's two matrices, on a {type(base).__name__}")
    if how is None:
        raise NotApplicable(f"the base is a {type(base).__name__}, whose weight is not known to be a matrix")
    refusal = how.refusal(base)
    if refusal is not None:
        raise NotApplicable(refusal)
    if own_forward(module) is None:
        raise NotApplicable("somebody else has replaced this instance's forward")
    names = [name for name in module.active_adapters if name in module.lora_A]
    variants = sorted({type(v).__name__.removesuffix("LinearVariant") for v in module.lora_variant.values()})
    if variants:
        raise NotApplicable(f"a variant of LoRA ({', '.join(variants)}), which computes more than two products")
    if len(names) != 1:
        raise NotApplicable(f"{len(names)} adapters are active; one can be fused")
    name = names[0]
    refusal = adapter_refusal(module, name)
    if refusal is not None:
        raise NotApplicable(refusal)
    trained = [n for n in ("weight", "bias") if getattr(getattr(base, n, None), "requires_grad", False)]
    if trained:
        raise NotApplicable(f"the base's {' and '.join(trained)} is trained too")
    return f"LoRA of rank {module.lora_A[name].out_features} on a {type(base).__name__}"


def variant(module: Any) -> Hashable:
    """What tells two LoRA layers of equal sizes apart: the adapter's rank and dtype, the base's type."""
    name = active_adapter(module)
    if name is None:
        return None
    a = module.lora_A[name].weight
    return type(module).__name__, type(module.base_layer).__name__, a.shape[0], str(a.dtype), str(a.device.type)


def verify(module: Any) -> Verdict:
    """Tries the fused product beside PEFT's forward on a small copy of the layer, without dropout."""
    device = trial_device(module)
    dtype = compute_dtype(module)
    twin = _twin(module, device, dtype)
    wide = _twin(module, device, dtype).double()
    for target, source in zip(wide.parameters(), twin.parameters(), strict=True):
        target.data.copy_(source.data)
    x = torch.randn(3, 5, twin.in_features, device=device).to(dtype).requires_grad_()
    return compare(
        functools.partial(type(module).forward, twin),
        functools.partial(lora_forward, twin),
        (x,),
        parameters=[p for p in twin.parameters() if p.requires_grad],
        wide=functools.partial(type(module).forward, wide),
        wide_parameters=[p for p in wide.parameters() if p.requires_grad],
    )


def _twin(module: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A small LoRA layer of the module's class, on a dense base, with random matrices."""
    name = active_adapter(module)
    assert name is not None  # `match` has looked
    a, b = module.lora_A[name].weight, module.lora_B[name].weight
    k, o, rank = (min(size, _LARGEST_TRIAL) for size in (a.shape[1], b.shape[0], a.shape[0]))
    twin: Any = object.__new__(type(module))
    attributes = dict(module.__dict__)
    attributes.pop("forward", None)
    attributes.pop(ATTRIBUTE, None)
    empty: Any = nn.Module().__dict__
    for key in empty:
        if key.endswith(("hooks", "hooks_with_kwargs", "hooks_always_called")):
            attributes[key] = empty[key].copy()
    has_bias = isinstance(getattr(module.base_layer, "bias", None), Tensor)
    base = nn.Linear(k, o, bias=has_bias, device=device).to(dtype).requires_grad_(False)
    factors = [nn.Linear(k, rank, bias=False, device=device), nn.Linear(rank, o, bias=False, device=device)]
    # the module's own lists and state are left alone, and the trial is of a layer at work
    attributes.update(in_features=k, out_features=o, training=True)
    attributes.update(merged_adapters=[], _disable_adapters=False, _active_adapter=[name])
    attributes["_parameters"], attributes["_buffers"] = {}, {}
    attributes["_modules"] = {
        **module._modules,
        "base_layer": base,
        "lora_A": nn.ModuleDict({name: factors[0].to(a.dtype)}),
        "lora_B": nn.ModuleDict({name: factors[1].to(b.dtype)}),
        "lora_dropout": nn.ModuleDict({name: nn.Identity()}),
    }
    twin.__dict__.update(attributes)
    return twin


def shared_inputs(model: nn.Module) -> list[tuple[nn.Module, SharedInput]]:
    """Each LoRA layer that shares its input with others, and its group."""
    found: list[tuple[nn.Module, SharedInput]] = []
    for parent in model.modules():
        layers = {name: child for name, child in parent._modules.items() if child is not None and is_lora(child)}
        if len(layers) > 1:
            for group in groups_of(parent, layers):
                shared = SharedInput(group)
                found += [(layer, shared) for layer in group]
    return found


def rules(key: str | None) -> list[Rule]:
    """The rule behind ``fused_lora``."""

    def unused(module: nn.Module) -> Case:
        raise AssertionError("the rule has its own verification")

    def build(module: nn.Module) -> Callable[..., Tensor]:
        return lora_forward

    return [
        Rule(
            name=RULE,
            target="forward",
            match=match,
            sample=unused,
            build=build,
            kernel="lora_linear",
            key=key,
            verify=verify,
            variant=variant,
        )
    ]
