"""Gives a model its activation budget, or says why it cannot have one."""

from __future__ import annotations

from typing import Any

from torch import nn

from foak.core import UnsupportedError
from foak.core.patching import ModelPatcher
from foak.fast_kernels.checkpointing.budget import ATTRIBUTE, ActivationBudget
from foak.fast_kernels.checkpointing.structure import (
    checkpointing_modules,
    common_root,
    is_checkpointing,
    layers_of,
)

_SWITCHES = ("gradient_checkpointing", "activation_checkpointing")  # the training argument's names, older one first


def add_budget(patcher: ModelPatcher, model: nn.Module, train_args: Any, limit: int | None, key: str) -> None:
    """Let a model's last layers keep their activations as far as memory reaches.

    Args:
        patcher: takes it off again.
        model: the model.
        train_args: the training arguments, or None in a plain loop.
        limit: the peak that a step may allocate, in bytes; None for what it needs with every layer checkpointed.
        key: the configuration key, for messages.

    Raises:
        UnsupportedError: the model cannot checkpoint, or nothing turns checkpointing on.
    """
    modules = checkpointing_modules(model)
    if not modules:
        raise UnsupportedError(
            f"{key} is set, but {type(model).__name__} has no layer that can be checkpointed; remove the key"
        )
    on = is_checkpointing(list(modules.values()))
    if train_args is not None and not on and not any(getattr(train_args, name, False) for name in _SWITCHES):
        raise UnsupportedError(
            f"{key} is set, but activation checkpointing is off, so every layer keeps its activations already; set the "
            "training argument gradient_checkpointing to true, or remove the key"
        )
    root = common_root(model, list(modules))
    budget = ActivationBudget(model, root, list(modules.values()), limit, patcher)
    if vars(root).get(ATTRIBUTE) is not None:
        budget.say("another framework has given this model one already, which stays")
        return
    budget.install(patcher)
    if on or train_args is not None:
        count = len(layers_of(modules))
        budget.say(f"on a GPU each forward decides how many of {count} layers keep their activations")
    else:
        budget.say("nothing is checkpointed, so there is nothing to do until gradient_checkpointing_enable is called")


def check_trainer(trainer: Any, key: str) -> None:
    """Refuse a trainer that splits sequences or weights over processes.

    Raises:
        UnsupportedError: recomputation then needs all processes at once, and each decides by itself.
    """
    parallelism = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    for name in ("tp", "cp", "sp"):
        if getattr(parallelism, f"{name}_enabled", False):
            raise UnsupportedError(
                f"{key} is set, but the trainer splits each batch over processes ({name}), which must then "
                "recompute the same layers; remove the key"
            )
