"""The loss: without the logits (``fast_loss: fused_linear``), or a fast cross entropy over real ones (``true``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from foak.core.patching import NotApplicable, Rule, Verdict, compare
from foak.core.patching.twin import trial_device
from foak.fast_kernels.loss import trl
from foak.fast_kernels.loss.causal_lm import causal_lm_loss, is_causal_lm_loss
from foak.fast_kernels.loss.head import head_forward, model_forward
from foak.kernels import cross_entropy, linear_cross_entropy

_TRIAL_SIZE = 53, 24
"""Vocabulary and hidden size of the trial: neither a power of two."""


def language_model(model: nn.Module) -> nn.Module:
    """The language model below PEFT's wrappers: the module whose forward takes labels."""
    base = getattr(model, "get_base_model", None)
    return base() if callable(base) else model


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The modules that may compute the logits: output embeddings, and their copies in PEFT's ``modules_to_save``."""
    base = language_model(model)
    get = getattr(base, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Module):
        return []
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return [head.original_module, *head.modules_to_save.values()]  # type: ignore[list-item,operator]
    return [head]


def _no_sample(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    raise AssertionError("these rules bring their own verification")


class LossWithoutLogits:
    """The rules of ``fused_linear`` for one model."""

    def __init__(self, model: nn.Module, key: str | None) -> None:
        self.key = key
        self.model_id = id(language_model(model))
        self.head_ids = {id(head) for head in output_heads(model)}

    def match_head(self, module: nn.Module) -> str | None:
        """The output head, where it is a plain linear layer."""
        if id(module) not in self.head_ids:
            return None
        if type(module).forward is not nn.Linear.forward:
            raise NotApplicable(f"the output head is a {type(module).__name__}, not a plain linear layer")
        # A parameter made of a tensor subclass is of that subclass.
        if type(module._parameters.get("weight")) is not nn.Parameter:
            raise NotApplicable("the output head's weight is not a plain parameter")
        return "the output head"

    def match_model(self, module: nn.Module) -> str | None:
        """The language model itself, where it has an output head."""
        return "the language model" if id(module) == self.model_id and self.head_ids else None

    def rules(self) -> list[Rule]:
        """Head and model."""
        return [
            Rule(
                name="linear_cross_entropy",
                target="forward",
                match=self.match_head,
                sample=_no_sample,
                build=lambda module: head_forward,
                key=self.key,
                verify=_verify_linear_cross_entropy,
            ),
            Rule(
                name="postponed_logits",
                target="forward",
                match=self.match_model,
                sample=_no_sample,
                build=lambda module: model_forward,
                kernel="linear_cross_entropy",
                wraps=True,
            ),
        ]


def _verify_linear_cross_entropy(head: nn.Module) -> Verdict:
    device = trial_device(head)
    vocab_size, hidden_size = _TRIAL_SIZE
    assert isinstance(head, nn.Linear)  # the rule has matched
    dtype = head.weight.dtype
    hidden = torch.randn(9, hidden_size, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocab_size, hidden_size, device=device).to(dtype).requires_grad_()
    arguments = [hidden, weight]
    if head.bias is not None:
        arguments.append(torch.randn(vocab_size, device=device).to(dtype).requires_grad_())
    labels = torch.randint(0, vocab_size, (9,), device=device)
    labels[2] = -100

    def original(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(h, w, b).float(), labels)

    def replacement(h: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return linear_cross_entropy(h, w, labels, b)

    return compare(original, replacement, arguments)


def _loss_function_rule(model: nn.Module, key: str | None, *, without_logits: bool) -> Rule:
    model_id = id(language_model(model))

    def match(module: nn.Module) -> str | None:
        if id(module) != model_id:
            return None
        if is_causal_lm_loss(getattr(module, "loss_function", None)):
            return "transformers' causal language model loss"
        if without_logits:  # the lazy logits serve whatever loss the model computes itself
            return None
        raise NotApplicable("it does not use transformers' causal language model loss")

    return Rule(
        name="loss_function",
        target="attribute:_loss_function",
        match=match,
        sample=_no_sample,
        build=lambda module: causal_lm_loss,
        kernel="linear_cross_entropy" if without_logits else "cross_entropy",
        key=key,
        verify=_verify_cross_entropy,
    )


def _verify_cross_entropy(model: nn.Module) -> Verdict:
    device = trial_device(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    logits = (torch.randn(9, _TRIAL_SIZE[0], device=device) * 3).to(dtype).requires_grad_()
    labels = torch.randint(0, _TRIAL_SIZE[0], (9,), device=device)
    labels[2] = -100
    return compare(
        lambda z: nn.functional.cross_entropy(z.float(), labels), lambda z: cross_entropy(z, labels), (logits,)
    )


def rules(model: nn.Module, mode: bool | str, key: str | None) -> list[Rule]:
    """The rules behind ``fast_loss``.

    Args:
        model: the model that is being accelerated.
        mode: ``True`` (real logits) or ``"fused_linear"`` (none).
        key: the configuration key, for messages.
    """
    if mode is True:
        return [_loss_function_rule(model, key, without_logits=False)]
    return [
        *LossWithoutLogits(model, key).rules(),
        _loss_function_rule(model, None, without_logits=True),
        *trl.rules(),
    ]
