"""Refuses models that cannot be accelerated safely: already prepared, or in the hands of another patcher."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import nn

from foak.core.errors import UnsupportedError
from foak.core.precision import find_misfit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments

__all__ = ["check_model", "check_precision", "check_train_args", "check_trainer", "is_trainer"]

_APPLY_FIRST = "call apply on the plain model before it is wrapped"

# (package of the class, name of the class) to (what it is, what to change). Looked up along the classes of every
# module, by name, so that none of these has to be imported to be recognised.
_WRAPPERS = {
    ("torch.nn.parallel", "DistributedDataParallel"): ("wrapped in DistributedDataParallel", _APPLY_FIRST),
    ("torch.nn.parallel", "DataParallel"): (
        "wrapped in DataParallel",
        "run one process for each GPU, and " + _APPLY_FIRST,
    ),
    ("torch.distributed", "FullyShardedDataParallel"): ("sharded by FSDP", _APPLY_FIRST),
    ("torch.distributed", "FSDPModule"): ("sharded by FSDP2 (fully_shard)", "call apply before fully_shard"),
    ("torch._dynamo", "OptimizedModule"): ("compiled by torch.compile", "call apply before torch.compile"),
    ("deepspeed", "DeepSpeedEngine"): ("held by a DeepSpeed engine", "call apply before deepspeed.initialize"),
}

# Top-level package of a class or function to the patcher's name and what to change.
_PATCHERS = {
    "liger_kernel": ("Liger-Kernel", "start a process in which Liger's apply functions are not called"),
    "unsloth": ("Unsloth", "load the model with transformers, in a process that does not import unsloth"),
}


def is_trainer(target: object) -> TypeGuard[Trainer]:
    """Whether `target` is a `transformers.Trainer` (a subclass such as TRL's `SFTTrainer` too).

    An instance can only exist once its module is loaded, so the (slow) module is never imported for the question.
    """
    module = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(target, module.Trainer)


def check_trainer(trainer: Trainer) -> None:
    """Refuses a trainer whose model is missing or already prepared, or whose arguments cannot work.

    Raises:
        UnsupportedError: names what was found and what to change.
    """
    model = getattr(trainer, "model", None)
    if model is None:
        raise UnsupportedError("The trainer has no model yet; give it a model, and call apply before trainer.train()")
    wrapped = getattr(trainer, "model_wrapped", None)
    if isinstance(wrapped, nn.Module) and wrapped is not model:
        _check_prepared(wrapped)
    check_train_args(trainer.args)


def check_train_args(train_args: TrainingArguments) -> None:
    """Refuses training arguments that replicate the model in threads or let another library patch it.

    Raises:
        UnsupportedError: names the argument and what to change.
    """
    # Before the count of GPUs, which may start CUDA.
    for name in ("use_liger_kernel", "use_kernels"):
        if getattr(train_args, name, False):
            raise UnsupportedError(
                f"The training argument {name} is on, which lets another library patch the same model; set it to "
                "False, or do without foak"
            )
    if getattr(train_args, "n_gpu", 1) > 1:
        raise UnsupportedError(
            f"The trainer would replicate the model over {train_args.n_gpu} GPUs with DataParallel, which copies it in "
            "every step; start one process for each GPU with `accelerate launch`, or make one visible with "
            "CUDA_VISIBLE_DEVICES=0"
        )


def check_precision(model: nn.Module, train_args: TrainingArguments, trainer: Trainer | None = None) -> None:
    """Refuses training arguments that cannot work with the dtypes of what the model trains.

    Raises:
        UnsupportedError: names the argument, the parameter and what to change.
    """
    misfit = find_misfit(model, train_args, None if trainer is None else trainer.optimizer)
    if misfit is not None:
        raise UnsupportedError(f"The training argument {misfit.argument} {misfit.problem}")


def check_model(model: object) -> PreTrainedModel:
    """Refuses what is not a plain transformers (or PEFT) model.

    Models with some or all parameters on the meta device are fine.

    Returns:
        The model itself.

    Raises:
        UnsupportedError: names what was found and what to change.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"apply takes a transformers.Trainer, a PreTrainedModel or a PeftModel, but not {type(model).__name__}"
        )
    _check_prepared(model)
    if getattr(model, "config", None) is None:
        raise UnsupportedError(
            f"The model {type(model).__name__} has no `config`; apply takes a PreTrainedModel or a PeftModel"
        )
    _check_patchers(model)
    return cast("PreTrainedModel", model)


def _check_prepared(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"The module {name} is" if name else "The model is"
        for cls in type(module).__mro__:
            for (package, class_name), (what, change) in _WRAPPERS.items():
                if cls.__name__ == class_name and _is_from(cls.__module__, package):
                    raise UnsupportedError(f"{where} already {what}; {change}")
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(f"{where} already compiled in place (module.compile()); call apply before it")


def _check_patchers(model: nn.Module) -> None:
    classes: set[type] = set()
    for name, module in model.named_modules():
        if getattr(module, "_use_kernels", False) is True:
            raise UnsupportedError(
                "The model was loaded with use_kernels=True, so kernels from the hub already patch it; load it without"
            )
        found = _patcher_of(vars(module).get("forward"))
        if found is None and type(module) not in classes:
            classes.add(type(module))
            found = _patcher_of_class(type(module))
        if found is not None:
            patcher, change = found
            raise UnsupportedError(
                f"{patcher} has already patched this model ({name or 'the model'}: {type(module).__name__}); {change}, "
                "or do without foak"
            )


def _patcher_of_class(cls: type) -> tuple[str, str] | None:
    """Looks at the class, its forward, and the rotary function that the class's own module calls by name."""
    rotary = getattr(sys.modules.get(cls.__module__), "apply_rotary_pos_emb", None)
    for candidate in (cls, getattr(cls, "forward", None), rotary):
        found = _patcher_of(candidate)
        if found is not None:
            return found
    return None


def _patcher_of(value: Any) -> tuple[str, str] | None:
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        return None
    # Unsloth also writes modules of its own at run time, named unsloth_compiled_module_...
    top = module.partition(".")[0]
    return next(
        (found for package, found in _PATCHERS.items() if top == package or top.startswith(f"{package}_")), None
    )


def _is_from(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
