"""What transformers leaves as it was initialised, or leaves out, with no more than a warning: here it is a fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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
    arguments = {"ignore_mismatched_sizes": True, **kwargs}
    model, info = load(name_or_path, output_loading_info=True, **arguments)
    return model, _fault(info, quantized, "ignore_mismatched_sizes" not in kwargs)


def _fault(info: Mapping[str, Any], quantized: frozenset[str], sizes_count: bool) -> str | None:
    mismatched = sorted(info["mismatched_keys"]) if sizes_count else []
    if mismatched:
        name, stored, wanted = mismatched[0]
        return f"{name} is {list(stored)}, but by config.json it is {list(wanted)}{_more(mismatched)}"
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
