"""The same step with bfloat16 weights, or with float32 weights under autocast (as in ``Trainer(bf16=True)``).

Rounding is coarse here and moves the choices of routers and indexers, so what is compared is dtypes, which gradients
exist, and the distance of all gradients together to the plain float32 step; the kernels' own tests measure the rest.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from tiny_batches import batch_for
from tiny_configs import tiny_type
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from walk import Step, build, new_framework, quiet, step_of

Mode = Literal["weights", "autocast"]

SLACK = 3.0
"""A step may be this much further from float32 than the plain one, as for a single kernel (see the patcher)."""
FLOOR = 8 * torch.finfo(torch.bfloat16).eps
"""Relative distance that is always allowed: one router's choice that falls the other way."""

NOT_IN_PLAIN: frozenset[tuple[str, Mode]] = frozenset(
    {
        ("dbrx", "autocast"),
        ("inkling2_loop_text", "weights"),
        ("inkling2_text", "weights"),
        ("xmod", "autocast"),
    }
)
"""Where plain transformers raises, because the architecture mixes dtypes: there is nothing to compare with."""


def walk_in_bf16(model_type: str, mode: Mode) -> list[str] | None:
    """What differs between the accelerated and the plain step; None where plain transformers itself raises."""
    tiny = tiny_type(model_type)
    with quiet():
        exact_model = build(tiny)
        batch = batch_for(tiny, exact_model.config)
        plain_model = copy.deepcopy(exact_model)
        if mode == "weights":
            plain_model = plain_model.bfloat16()
        model = copy.deepcopy(plain_model)
        try:
            plain = _step(plain_model, batch, mode)
        except RuntimeError:  # dtypes that this architecture mixes
            return None
        exact = step_of(exact_model, batch)
        new_framework().apply(model, strict=False)
        return _differences(exact, plain, _step(model, batch, mode))


def _step(model: PreTrainedModel, batch: dict[str, Any], mode: Mode) -> Step:
    def cast(value: Any) -> Any:
        return value.to(model.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
        return step_of(model, tree_map(cast, batch))


def _differences(exact: Step, plain: Step, accelerated: Step) -> list[str]:
    found = []
    for what, old, new in (
        ("loss", plain.loss, accelerated.loss),
        ("logits", plain.logits, accelerated.logits),
        *((name, gradient, accelerated.gradients[name]) for name, gradient in plain.gradients.items()),
    ):
        if (old is None) != (new is None):
            found.append(f"{what}: exists in one of the two only")
        elif old is not None and new is not None and old.dtype != new.dtype:
            found.append(f"{what}: {new.dtype} for {old.dtype}")
    old_distance, new_distance = _distance(plain, exact), _distance(accelerated, exact)
    if not new_distance <= SLACK * old_distance + FLOOR:
        found.append(f"gradients: {new_distance:.1e} from float32, the plain ones {old_distance:.1e}")
    return found


def _distance(step: Step, exact: Step) -> float:
    """Distance of all gradients together, relative to their length."""
    squared, length = 0.0, 0.0
    for name, gradient in exact.gradients.items():
        found = step.gradients[name]
        if gradient is not None and found is not None:
            squared += float((found.float() - gradient).norm() ** 2)
            length += float(gradient.norm() ** 2)
    return (squared / length) ** 0.5
