"""What padding-free training makes of a model: how its attention is packed, or why the model is refused."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from foak.core import ModelPatcher, UnsupportedError
from foak.core.patching import Rule
from foak.core.patching.binding import original_function
from foak.core.patching.rebinding import called_global
from foak.core.patching.twin import is_tensor_parallel
from foak.padding_free import varlen
from foak.padding_free.attention import BASES, register
from foak.padding_free.forward import Settings, mixer_forward, packed_forward
from foak.padding_free.packed import PackedSequences
from foak.padding_free.trial import LENGTHS, objection

__all__ = ["add_rules", "language_model"]

_FORMS = {"varlen": "varlen_attn", "sdpa": "SDPA over buckets"}
"""What the forms of attention are called in a reason."""


def language_model(model: nn.Module) -> nn.Module:
    """The language model below PEFT's wrappers."""
    base = getattr(model, "get_base_model", None)
    found: nn.Module = base() if callable(base) else model
    return found


def add_rules(patcher: ModelPatcher, model: nn.Module, train_args: Any, key: str, backend: str) -> Settings:
    """Add the rules that make a model take packed batches, and give it a configuration of its own that says so.

    Args:
        patcher: of the model at hand; undoes all of it.
        model: the model, adapters included.
        train_args: training arguments, of which the precision counts for the trial; or None.
        key: the dotted key that asked for it, for messages.
        backend: the form of attention that is asked for.

    Returns:
        How the model is packed.

    Raises:
        UnsupportedError: the model cannot be trained packed, with the reason.
    """
    language = language_model(model)
    refuse_by_structure(model, language, key)
    base: str = vars(language)["config"]._attn_implementation or "eager"
    settings = Settings(backend, own=base in BASES)
    if settings.own:
        settings.name = register(base)
        use_own_configuration(patcher, model, settings.name)
    elif backend != "auto":
        raise UnsupportedError(
            f"{key}: attention: {backend} takes the place of the model's {base}; load the model with "
            f"attn_implementation='sdpa', or leave it to {base} with attention: auto"
        )
    settings.mixers = any(is_mixer(module) for module in model.modules())
    tried = "not tried on the meta device"
    if _has_weights(language):
        tried = _try(model, language, settings, train_args, key)
    count = sum(is_interface_attention(module) for module in model.modules())
    form = _form(settings, base, language)
    for rule in _rules(language, settings, f"{count} attention layers; {tried}", form):
        patcher.add(rule)
    return settings


def refuse_by_structure(model: nn.Module, language: nn.Module, key: str) -> None:
    """Refuse what no trial is needed for; raises `UnsupportedError`."""
    config: Any = language.config
    name = type(language).__name__

    def refuse(why: str) -> None:
        raise UnsupportedError(f"{key}: {name} cannot be trained padding-free: {why}")

    loss = LOSS_MAPPING.get(str(getattr(language, "loss_type", None)))
    if loss not in (None, ForCausalLMLoss):
        refuse(f"its loss ({language.loss_type}) is not that of the next token, which packed labels are made for")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder, whose cross attention has no packed form")
    if getattr(config, "output_attentions", False):
        refuse("output_attentions is on, and packed attention has no weights to give; set it to False")
    for adapter in (getattr(model, "peft_config", None) or {}).values():
        if getattr(adapter, "is_prompt_learning", False):
            refuse(f"{adapter.peft_type} puts virtual tokens before each row of a batch; use another PEFT method")


def use_own_configuration(patcher: ModelPatcher, model: nn.Module, name: str) -> None:
    """Give a model copies of its configurations (other models may share them) with our attention's name in them."""
    memo: dict[int, Any] = {}  # one for all copies, so that what is shared inside the model stays shared
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation_internal"):
            own = copy.deepcopy(config, memo)
            own._attn_implementation_internal = name
            patcher.set_attribute(module, "config", own)


def is_interface_attention(module: nn.Module) -> bool:
    """Whether a layer looks its attention up in transformers' registry."""
    return called_global(original_function(module), "ALL_ATTENTION_FUNCTIONS") is not None


def is_mixer(module: nn.Module) -> bool:
    """Whether a layer mixes tokens by a convolution along them, as state-space and linear-attention layers do."""
    if not any(isinstance(child, nn.Conv1d) for child in module.children()):
        return False
    parameters = list(inspect.signature(original_function(module)).parameters.values())
    takes_more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    return takes_more and len(parameters) > 1 and parameters[1].name in ("hidden_states", "x")


def _has_weights(language: nn.Module) -> bool:
    if is_tensor_parallel(language):
        return False
    return all(parameter.numel() and not parameter.is_meta for parameter in language.parameters())


def _rules(language: nn.Module, settings: Settings, reason: str, kernel: str) -> list[Rule]:
    return [
        Rule(
            name="packed_batches",
            target="forward",
            match=functools.partial(_match, language, reason),
            sample=_no_sample,
            build=functools.partial(_build, functools.partial(packed_forward, settings)),
            kernel=kernel,
            wraps=True,
        ),
        Rule(
            name="packed_mixer",
            target="forward",
            match=_match_mixer,
            sample=_no_sample,
            build=functools.partial(_build, mixer_forward),
            kernel="buckets of sequences",
            wraps=True,
        ),
    ]


def _match(language: nn.Module, reason: str, module: nn.Module) -> str | None:
    return reason if module is language else None


def _match_mixer(module: nn.Module) -> str | None:
    return "mixes tokens without attention: it takes each sequence by itself" if is_mixer(module) else None


def _build(wrapper: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return wrapper


def _no_sample(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    raise AssertionError("the model is tried as a whole")


def _try(model: nn.Module, language: nn.Module, settings: Settings, train_args: Any, key: str) -> str:
    """Try the model packed; under ``auto`` gives up the form that is wrong for it; raises `UnsupportedError`."""
    autocast = None
    if train_args is not None and (train_args.bf16 or train_args.fp16):
        autocast = torch.bfloat16 if train_args.bf16 else torch.float16
    vocab_size = getattr(language.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    if not isinstance(vocab_size, int):
        raise UnsupportedError(
            f"{key}: {type(language).__name__} cannot be trained padding-free: it has no embedding of tokens"
        )

    def attempt(form: str) -> tuple[str | None, bool]:
        settings.backend = form
        layout = PackedSequences(LENGTHS, call_cost=0.0, rows=False).to(next(language.parameters()).device)
        trial = ModelPatcher()
        for rule in _rules(language, settings, "trial", "trial"):
            trial.add(rule)
        try:
            trial.apply(model)
            return objection(language, layout, vocab_size=vocab_size, autocast=autocast), layout.has_rows
        finally:
            trial.restore()

    asked = settings.backend
    forms = ("varlen", "sdpa") if asked == "auto" and settings.own and _on_cuda(language) else (asked,)
    found = {form: attempt(form) for form in forms}
    right = [form for form in forms if found[form][0] is None]
    first = found[forms[0]][0]
    if not right:
        raise UnsupportedError(f"{key}: {type(language).__name__} cannot be trained padding-free: {first}")
    settings.backend = asked if len(right) == len(forms) else right[0]
    settings.reads_rows = found[right[0]][1]
    wrong = [f"not by {_FORMS[form]} ({found[form][0]})" for form in forms if form not in right]
    return "; ".join(["tried beside a padded batch", *wrong])


def _on_cuda(language: nn.Module) -> bool:
    return next(language.parameters()).device.type == "cuda"


def _form(settings: Settings, base: str, language: nn.Module) -> str:
    """The form of attention, for the report."""
    if not settings.own:
        return base
    if settings.backend == "sdpa" or base != "sdpa" or not _on_cuda(language) or not varlen.is_available():
        return f"{base} over buckets of sequences"
    return "varlen_attn" if settings.backend == "varlen" else "varlen_attn; long sequences of one length by sdpa"
