"""Which weights train under which mixed precision: the table, and the check of a model before it trains.

The table is what `foak doctor` prints and the README shows; each of its rows is a test that trains, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import TrainingArguments

__all__ = ["COMBINATIONS", "HEADER", "METHODS", "Combination", "Misfit", "find_misfit", "rows"]

Method = Literal["full", "lora", "quantized_lora"]

METHODS: dict[Method, str] = {"full": "full FT", "lora": "LoRA", "quantized_lora": "LoRA on a quantized base"}
"""The methods in the order of the table's columns, as they are written there."""

HEADER = ("weights", "mixed precision", *METHODS.values())

UNSCALED = "gradients of fp16 weights cannot be unscaled"
UNDERFLOW = "AdamW's state underflows in float16 and the weights become NaN (SGD works)"


@dataclass(frozen=True)
class Combination:
    """One cell of the table.

    Attributes:
        weights: dtype of the model's weights; with a quantized base, of those that are not quantized.
        mixed_precision: `none`, or the training argument that is true: `bf16` or `fp16`. `fp16` needs a GPU.
        method: what trains. Adapters are in float32, as PEFT makes them; TRL turns a quantized base's to bfloat16.
        refusal: why it cannot work; None where it works.
    """

    weights: Literal["float32", "bfloat16", "float16"]
    mixed_precision: Literal["none", "bf16", "fp16"]
    method: Method
    refusal: str | None = None

    @property
    def outcome(self) -> str:
        """The cell's text."""
        return "works" if self.refusal is None else f"refused: {self.refusal}"


def _table() -> Iterator[Combination]:
    for method in METHODS:
        trains_weights = method == "full"
        yield Combination("float16", "none", method, UNDERFLOW if trains_weights else None)
        yield Combination("float16", "fp16", method, UNSCALED if trains_weights else None)
        yield Combination("bfloat16", "none", method)
        yield Combination("bfloat16", "bf16", method)
        yield Combination("float32", "none", method)
        yield Combination("float32", "bf16", method)
        yield Combination("float32", "fp16", method)


COMBINATIONS: tuple[Combination, ...] = tuple(_table())


def rows() -> list[tuple[str, ...]]:
    """The table as text, without its header: weights, mixed precision, and a cell for each of `METHODS`."""
    cells = {(cell.weights, cell.mixed_precision, cell.method): cell.outcome for cell in COMBINATIONS}
    pairs = dict.fromkeys((cell.weights, cell.mixed_precision) for cell in COMBINATIONS)
    return [(weights, mixed, *(cells[weights, mixed, method] for method in METHODS)) for weights, mixed in pairs]


@dataclass(frozen=True)
class Misfit:
    """A training argument that cannot work with a model.

    Attributes:
        argument: its name.
        problem: what it is, why that cannot work, and what to change; reads on from the argument's name.
    """

    argument: str
    problem: str


def find_misfit(model: nn.Module, train_args: TrainingArguments, optimizer: Any | None = None) -> Misfit | None:
    """What in the training arguments cannot work with the dtypes of a model's trained parameters.

    Args:
        model: the model, adapters included.
        train_args: the training arguments.
        optimizer: an optimizer that replaces the one that `train_args.optim` names.

    Returns:
        The first misfit; None where the table says that it works.
    """
    half = next(
        (name for name, parameter in model.named_parameters() if parameter.requires_grad and _is_half(parameter)), None
    )
    if half is not None and train_args.fp16:
        return Misfit(
            "fp16",
            f"is true, but the parameter {half} is trained in float16, and {UNSCALED}: load the model in float32 or "
            "bfloat16, or train adapters that are in float32",
        )
    optim = str(getattr(train_args.optim, "value", train_args.optim))
    if half is not None and optimizer is None and optim in _STATE_IN_THE_WEIGHTS_DTYPE:
        return Misfit(
            "optim",
            f"is {optim}, but the parameter {half} is trained in float16: {UNDERFLOW}; load the model in float32 or "
            "bfloat16, or train adapters that are in float32",
        )
    if train_args.fp16 and train_args.device.type == "cpu":
        return Misfit("fp16", "is true, but on a CPU accelerate trains without it and does not say so: set it to false")
    return None


_STATE_IN_THE_WEIGHTS_DTYPE = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused")


def _is_half(parameter: nn.Parameter) -> bool:
    return parameter.dtype is torch.float16
