"""Stand-ins: small independent copies of a module on which a replacement is tried.

A stand-in shares no parameter, buffer, gradient or hook with the module that it stands for, so a trial changes nothing
of the model. Linear children, of whatever kind (dense, quantized, adapted), become small dense layers whose sizes keep
the proportions of the originals; modules on the meta device get random values on the CPU.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_REDUCED_UNIT = 8
_LARGE_BYTES = 2**20
"""Linear layers of more than this are reduced: a trial at full size shows nothing more, and takes seconds."""
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_linear_like(module: nn.Module) -> bool:
    """Whether a module maps ``in_features`` to ``out_features``: dense, quantized or adapted linear layers."""
    return isinstance(getattr(module, "in_features", None), int) and isinstance(
        getattr(module, "out_features", None), int
    )


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """``(in_features, out_features)`` of a linear-like module."""
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]


def is_tensor_parallel(module: nn.Module) -> bool:
    """Whether a parameter below the module is a DTensor: sharded, so no stand-in can speak for it."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def trial_device(module: nn.Module) -> torch.device:
    """Where a module's stand-in lives: on the module's device, on the CPU for the meta device."""
    tensor = next(_tensors(module), None)
    return torch.device("cpu") if tensor is None or tensor.device.type == "meta" else tensor.device


def compute_dtype(module: nn.Module) -> torch.dtype:
    """The dtype in which a linear-like module takes its input: its weight's, or 16 bits on a quantized base."""
    base = getattr(module, "base_layer", module)
    weight = getattr(base, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return weight.dtype
    dtype = getattr(base, "compute_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def stand_in(module: nn.Module) -> nn.Module:
    """A small independent copy of a module, without hooks and without anything bound to the instance.

    Buffers are copied, and so are parameters, with a little noise that tells apart what equal or zero weights would not
    (on the meta device both are random); linear-like descendants become dense layers, reduced
    where all of them together pass 1 MiB or where one of them is quantized.
    """
    device = trial_device(module)
    return _copy(module, device, _reduction(module))


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """The floating parameters of a stand-in, each once, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.is_floating_point()]


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _reduction(module: nn.Module) -> dict[int, int]:
    """Size of a linear layer to its reduced size; empty where nothing needs reducing."""
    linears = [child for child in module.modules() if child is not module and is_linear_like(child)]
    sizes = {size for child in linears for size in linear_sizes(child)}
    if not sizes:
        return {}
    unit = math.gcd(*sizes)
    if unit <= _REDUCED_UNIT:
        return {}
    numel = sum(math.prod(linear_sizes(child)) for child in linears)
    quantized = any(not p.is_floating_point() for p in module.parameters())
    if numel * 4 <= _LARGE_BYTES and not quantized:
        return {}
    return {size: size // unit * _REDUCED_UNIT for size in sizes}


def _copy(module: nn.Module, device: torch.device, sizes: dict[int, int]) -> nn.Module:
    if is_linear_like(module):
        return _dense(module, device, sizes)
    twin: nn.Module = object.__new__(type(module))
    attributes: dict[str, Any] = dict(module.__dict__)
    for name in ("forward", "_old_forward", "_hf_hook"):
        attributes.pop(name, None)
    for name in _HOOKS:
        if name in attributes:
            attributes[name] = OrderedDict()
    for name, value in attributes.items():
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
            attributes[name] = sizes[value]  # such as `intermediate_size`, by which a forward splits
    attributes["_parameters"] = {
        name: None if p is None else nn.Parameter(_perturbed(p, device), requires_grad=p.is_floating_point())
        for name, p in module._parameters.items()
    }
    attributes["_buffers"] = {
        name: None if b is None else _copy_tensor(b, device) for name, b in module._buffers.items()
    }
    attributes["_modules"] = {
        name: None if child is None else _copy(child, device, sizes) for name, child in module._modules.items()
    }
    twin.__dict__.update(attributes)
    return twin


def _copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor.detach().clone()
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return (torch.randn(tensor.shape, device=device) * 0.5 + 1.0).to(tensor.dtype)


def _perturbed(parameter: nn.Parameter, device: torch.device) -> torch.Tensor:
    copy = _copy_tensor(parameter, device)
    if not copy.is_floating_point() or copy.dim() > 1:
        return copy
    return (copy.float() + 0.25 * torch.randn(copy.shape, device=device)).to(copy.dtype)


def _dense(module: nn.Module, device: torch.device, sizes: dict[int, int]) -> nn.Linear:
    in_features, out_features = (sizes.get(size, size) for size in linear_sizes(module))
    base = getattr(module, "base_layer", module)
    has_bias = isinstance(getattr(base, "bias", None), torch.Tensor)
    dense = nn.Linear(in_features, out_features, bias=has_bias, device=device, dtype=torch.float32)
    return dense.to(compute_dtype(module))
