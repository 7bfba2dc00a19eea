"""The forward that takes the place of a PEFT LoRA layer's: base and adapter in one product, rounded once.

Adapters may be switched, merged or added while training, so what the layer is at the moment is read in every call. In
a state that the fused product does not cover the layer's own forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from foak.core.patching.binding import binding_of
from foak.fast_kernels.hooks import everyone_is_listened_to, has_hooks, is_listened_to
from foak.fast_kernels.lora.shared_input import ATTRIBUTE, SharedInput
from foak.kernels import LoraMember, PromisedLinear, lora_gated_linear, promise_lora_linears
from foak.kernels.backend import PLAIN_TYPES, in_function_transform
from foak.kernels.decode_once import ATTRIBUTE as KEEPER
from foak.kernels.decode_once import Keeper
from foak.kernels.dense_weight import DenseWeight, dense_weight_of

RULE = "fused_lora"
"""Name of the rule that binds `lora_forward`."""

_FLOAT64 = torch.float64


class Precision(NamedTuple):
    """In which dtype a layer multiplies and what it gives, for an input of one dtype in the present autocast state.

    Attributes:
        dtype: of the products.
        rounds_factors: whether autocast would cast the adapter's weights to it.
        output: the dtype that the layer gives.
    """

    dtype: torch.dtype
    rounds_factors: bool
    output: torch.dtype


def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A LoRA layer's forward; `x` is `[..., K]`. What it cannot fuse goes to the class's own forward."""
    if args or kwargs or _is_traced(x):
        return _own_forward(self, x, *args, **kwargs)
    found = member_of(self, x)
    if found is None:
        return _own_forward(self, x)
    member, precision = found
    group = self.__dict__.get(ATTRIBUTE)
    if group is not None:
        promise = group.take(self, x, _state_of(self, member, precision))
        if promise is not None:
            return _fulfil(promise, precision, group)
    layers, members = [self], [member]
    if group is not None:
        for sibling in group.others(self):
            other = member_of(sibling, x) if binding_of(sibling) is not None else None
            if other is not None and other[1] == precision:
                layers.append(sibling)
                members.append(other[0])
    promises = promise_lora_linears(x, members, dtype=precision.dtype, rounds_factors=precision.rounds_factors)
    if group is not None:
        states = [_state_of(layer, m, precision) for layer, m in zip(layers, members, strict=True)]
        group.keep(x, list(zip(layers, states, promises, strict=True))[1:])
    return _fulfil(promises[0], precision, group)


def gated_forward(layer: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor | None:
    """`layer(act(gate) * up)` where `layer` is a LoRA layer that is fused and that nobody listens to; else None.

    Args:
        layer: any module.
        gate: `[..., K]`.
        up: `[..., K]`.
        activation: ``silu``, ``gelu`` or ``gelu_tanh``.
    """
    binding = binding_of(layer)
    if binding is None or binding.rules != (RULE,) or _is_traced(gate):
        return None
    if is_listened_to(layer) or gate.dtype is not up.dtype or type(up) not in PLAIN_TYPES:
        return None
    found = member_of(layer, gate)
    if found is None:
        return None
    member, precision = found
    y = lora_gated_linear(gate, up, activation, member, dtype=precision.dtype, rounds_factors=precision.rounds_factors)
    return y if y.dtype is precision.output else y.to(precision.output)


def _is_traced(x: Tensor) -> bool:
    """Whether a compiler, a transform or forward-mode differentiation is at work, or shapes alone count."""
    return torch.compiler.is_compiling() or in_function_transform() or x.is_meta or forward_ad._current_level >= 0


def _own_forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result: Tensor = type(layer).forward(layer, x, *args, **kwargs)
    return result


def _fulfil(promise: PromisedLinear, precision: Precision, group: SharedInput | None) -> Tensor:
    try:
        y = promise.fulfil()
    except BaseException:  # out of memory, most likely: what the group holds must not outlive the failed forward
        if group is not None:
            group.clear()
        raise
    return y if y.dtype is precision.output else y.to(precision.output)


def _state_of(layer: Any, member: LoraMember, precision: Precision) -> tuple[Any, ...]:
    """What must still be so when a promise is taken: the layer's values, and how they are used."""
    a, b, weight = member.a, member.b, tensor_of(layer._modules["base_layer"], "weight")
    versions = _version_of(a), _version_of(b), _version_of(weight)
    return id(a), id(b), *versions, member.scaling, member.dropout_p, precision


def _is_any_observed(*modules: nn.Module) -> bool:
    """Whether somebody listens to one of the modules or has replaced its forward: then it must be called."""
    if everyone_is_listened_to():
        return True
    return any(has_hooks(module) or "forward" in module.__dict__ for module in modules)


def _version_of(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def member_of(layer: Any, x: Tensor) -> tuple[LoraMember, Precision] | None:
    """The layer as it is now, and its precision for an input `x`; None where its own forward must run.

    It is called for every layer of every step, so that it reads the modules' dictionaries: an attribute of a module
    takes several times as long.
    """
    name = active_adapter(layer)
    if name is None or type(x) not in PLAIN_TYPES or layer.disable_adapters or layer.merged:
        return None
    modules = layer._modules
    base = modules["base_layer"]
    a_layer, b_layer, dropout = parts = _parts_of(modules, name)
    if _is_any_observed(base, *parts) or _refusal_of(*parts) is not None:
        return None
    a, b = tensor_of(a_layer, "weight"), tensor_of(b_layer, "weight")
    how = dense_weight_of(base)
    if how is None or type(a) not in PLAIN_TYPES or type(b) not in PLAIN_TYPES:
        return None
    if how.refusal(base) is not None or x.device != a.device or x.shape[-1] != a.shape[1]:
        return None
    weight, bias = tensor_of(base, "weight"), tensor_of(base, "bias")
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return None
    precision = _precision(layer, base, weight.dtype, how, x, a.dtype, b.dtype)
    if precision is None:
        return None
    drops = dropout.p if type(dropout) is nn.Dropout and dropout.training else 0.0
    if drops and x.is_cuda and precision.dtype.itemsize > 2:
        return None  # the kernels draw masks beside 16-bit products only, and PyTorch draws them faster than their twin
    read = _reader(how, base, weight)
    return LoraMember(read, layer.out_features, a, b, layer.scaling[name], drops, bias), precision


def tensor_of(module: nn.Module, name: str) -> Any:
    """`getattr(module, name, None)` of what is a parameter as a rule; the sooner found."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name, None)


def active_adapter(layer: Any) -> str | None:
    """The one active adapter of a layer, if there is exactly one and it is a plain LoRA; else None."""
    known = layer._modules["lora_A"]._modules
    active = [name for name in layer.active_adapters if name in known]
    if len(active) != 1 or active[0] in layer.lora_variant:
        return None
    return str(active[0])


def adapter_refusal(layer: Any, name: str) -> str | None:
    """Why an adapter of a layer is no plain LoRA with plain dropout, or None."""
    return _refusal_of(*_parts_of(layer._modules, name))


def _parts_of(modules: dict[str, Any], name: str) -> tuple[Any, Any, Any]:
    """An adapter's matrices A and B and its dropout, from its layer's modules."""
    a, b, dropout = modules["lora_A"], modules["lora_B"], modules["lora_dropout"]
    return a._modules[name], b._modules[name], dropout._modules[name]


def _refusal_of(a: Any, b: Any, dropout: Any) -> str | None:
    if type(a) is not nn.Linear or type(b) is not nn.Linear:
        return "the adapter's matrices are no plain linear layers"
    if tensor_of(a, "bias") is not None or tensor_of(b, "bias") is not None:
        return "the adapter has a bias (lora_bias)"
    if type(dropout) not in (nn.Dropout, nn.Identity):
        return f"the adapter's dropout is a {type(dropout).__name__}"
    return None


def _precision(
    layer: Any, base: Any, weight_dtype: torch.dtype, how: DenseWeight, x: Tensor, a_dtype: torch.dtype,
    b_dtype: torch.dtype,
) -> Precision | None:  # fmt: skip
    device_type = x.device.type
    dense = type(base) is nn.Linear
    x_dtype = x.dtype
    if not x_dtype.is_floating_point:
        return None
    if torch.is_autocast_enabled(device_type):
        if _FLOAT64 in (x_dtype, a_dtype, b_dtype):
            return None
        dtype = torch.get_autocast_dtype(device_type)
        return Precision(dtype, True, dtype if dense else x_dtype)
    dtype = how.product_dtype(base, x)
    if dense and weight_dtype is not x_dtype:
        return None
    if a_dtype is not b_dtype or a_dtype not in (dtype, torch.float32) or not layer.cast_input_dtype_enabled:
        return None
    if a_dtype is torch.float32 and dtype is _FLOAT64:
        return None
    return Precision(dtype, False, x_dtype)


def _reader(how: DenseWeight, base: Any, weight: Tensor) -> Callable[[torch.dtype], Tensor]:
    version = _version_of(weight)
    decode = _decoder(how, base, weight, version)

    def read(dtype: torch.dtype) -> Tensor:
        if _version_of(tensor_of(base, "weight")) != version:
            raise RuntimeError(
                "the frozen weight of a LoRA layer was modified by an inplace operation between the forward and the "
                "backward, which needs the weight that the forward used"
            )
        return decode(dtype)

    return read


def _decoder(how: DenseWeight, base: Any, weight: Tensor, version: int | None) -> Callable[[torch.dtype], Tensor]:
    def decode(dtype: torch.dtype) -> Tensor:
        return how.decode(base, dtype, None)

    keeper: Keeper | None = base.__dict__.get(KEEPER)
    return decode if keeper is None else keeper.reading(decode, (weight.data_ptr(), version))
