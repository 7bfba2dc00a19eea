"""What transformers leaves as it was initialised, or leaves out, with no more than a warning: here it is a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["loaded_with_fault"]


def loaded_with_fault(
    load: Callable[..., Any], name_or_path: Any, kwargs: Mapping[str, Any], quantized: frozenset[str] = frozenset()
) -> tuple[PreTrainedModel, str | None]:
    """Loads a model, and says what of it is not what the checkpoint holds.

    Args:
        load: `from_pretrained` of a model class.
        name_or_path: its first argument.
        kwargs: its further arguments. With `ignore_mismatched_sizes` among them, tensors of another shape are no fault.
        quantized: names of stored weights of which each must find its layer, and all else that is stored for it.

    Returns:
        The model, and the fault that names a tensor, or None.
    """
    # Allowed to transformers, which would refuse without naming any.
    arguments = {**kwargs, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = load(name_or_path, **arguments)
    fault = None
    if not kwargs.get("ignore_mismatched_sizes"):
        fault = _shape_fault(sorted({*info["mismatched_keys"], *_other_shapes(model)}))
    return model, fault or _name_fault(info, quantized)


def _other_shapes(model: PreTrainedModel) -> Iterator[tuple[str, torch.Size, torch.Size]]:
    """Parameters whose shape is not that of the configuration: beside quantized layers some releases load any shape."""
    config = copy.deepcopy(model.config)
    config.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        plain = type(model)(config)
    loaded = dict(model.named_modules())
    for where, module in plain.named_modules():
        other = loaded.get(where)
        if other is None or type(other) is not type(module):  # quantized
            continue
        for part, parameter in module.named_parameters(recurse=False):
            shape = getattr(other, part).shape
            if shape != parameter.shape:
                yield f"{where}.{part}", shape, parameter.shape


def _shape_fault(mismatched: list[Any]) -> str | None:
    if mismatched:
        name, stored, wanted = mismatched[0]
        return f"{name} is {list(stored)}, but by config.json it is {list(wanted)}{_more(mismatched)}"
    return None


def _name_fault(info: Mapping[str, Any], quantized: frozenset[str]) -> str | None:
    missing = sorted(info["missing_keys"])
    if missing:
        return f"{missing[0]} is missing{_more(missing)}"
    layers = {weight.removesuffix("weight") for weight in quantized}
    without_place = sorted(name for name in info["unexpected_keys"] if f"{name.rpartition('.')[0]}." in layers)
    if without_place:
        return f"{without_place[0]} is there, but by config.json the model has none{_more(without_place)}"
    return None


def _more(names: list[Any]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
