"""TRL's own fused head, computed by foak's kernel.

TRL's trainers call ``model(..., fused_lm_head=True)`` on a forward that they bind to the model; it runs the backbone
and scores the labelled positions with ``_ChunkedLogProbFunction``, which recomputes the head's product in the backward
and so runs three products for a frozen head. The rules here give that one instance's forward another function under
this name; what TRL does around it (masks, fields of its output, auxiliary losses) stays TRL's.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from foak.core.patching import NotApplicable, Rule, Verdict, compare
from foak.core.patching.binding import original_function
from foak.core.patching.rebinding import called_global, inner_functions
from foak.core.patching.twin import trial_device
from foak.kernels import linear_cross_entropy

_FUNCTION = "_ChunkedLogProbFunction"
_DEVICE_TEST = "_use_triton"
_PARAMETERS = [
    "ctx",
    "hidden",
    "weight",
    "bias",
    "targets",
    "temperature",
    "chunk_size",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
]
_FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class FusedLogProbs:
    """Has the interface of TRL's ``ChunkedLogProbFunction``: a class whose ``apply`` scores tokens."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _FIELDS,
    ) -> tuple[torch.Tensor | None, ...]:
        """Score tokens.

        Args:
            hidden: ``[N, H]``.
            weight: ``[V, H]``.
            bias: ``[V]`` or None.
            targets: ``[N]``, all inside the vocabulary.
            temperature: the logits are divided by it; 1 where there is a soft cap.
            chunk_size: TRL's tile of the vocabulary; the kernel chooses its own.
            final_logit_softcapping: soft cap, after the scale, or None.
            logit_scale: factor on the logits.
            outputs: which fields are wanted; the others are None.

        Returns:
            ``(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1)``, each ``[N]`` or None.
        """
        wanted = tuple(name for name in _FIELDS if name == "log_probs" or name in outputs)
        _, stats = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias,
            reduction="none",
            logit_scale=logit_scale / temperature,
            softcap=final_logit_softcapping,
            return_stats=wanted,
        )
        return tuple(getattr(stats, name) if name in wanted else None for name in _FIELDS)


def _on_every_device(device: torch.device) -> bool:
    """Takes the place of TRL's test for Triton: foak drops ignored labels on every device."""
    return True


def _fused_forward(module: nn.Module) -> Any | None:
    forward = original_function(module)
    function = called_global(forward, _FUNCTION)
    if function is None or called_global(forward, _DEVICE_TEST) is None:
        return None
    return function


def _closure(module: nn.Module, name: str) -> Any:
    forward = original_function(module)
    for function in inner_functions(forward):  # type: ignore[arg-type]
        if name in function.__code__.co_freevars:
            cells = function.__closure__ or ()
            return cells[function.__code__.co_freevars.index(name)].cell_contents
    return None


def _match(module: nn.Module) -> str | None:
    function = _fused_forward(module)
    if function is None:
        forward = original_function(module)
        if str(getattr(forward, "__globals__", {}).get("__name__", "")).startswith("trl."):
            raise NotApplicable("this version of TRL scores tokens by functions of other names; its own stay")
        return None
    parameters = list(inspect.signature(function.forward).parameters)
    if parameters != _PARAMETERS:
        raise NotApplicable(f"this version of TRL scores tokens by another interface: {', '.join(parameters)}")
    temperature, softcap = _closure(module, "temperature"), _closure(module, "final_logit_softcapping")
    if softcap is not None and temperature != 1.0:
        raise NotApplicable(f"TRL divides soft-capped logits by a temperature ({temperature}); its own function stays")
    return "TRL's fused head"


def _verify(module: nn.Module) -> Verdict:
    function = _fused_forward(module)
    assert function is not None  # the rule has matched
    softcap, scale = _closure(module, "final_logit_softcapping"), _closure(module, "logit_scale")
    device = trial_device(module)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    hidden = torch.randn(7, 24, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(53, 24, device=device) * 0.3).to(dtype).requires_grad_()
    targets = torch.randint(0, 53, (7,), device=device)

    def run(implementation: Any) -> Any:
        def call(h: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            out = implementation.apply(h, w, None, targets, 1.0, 32, softcap, scale or 1.0, ("log_probs", "entropy"))
            return [out[0], out[1]]

        return call

    return compare(run(function), run(FusedLogProbs), (hidden, weight))


def rules() -> list[Rule]:
    """The rules that serve TRL's trainers; no key requires them, since plain trainers have no fused head."""
    return [
        Rule(
            name="trl_fused_head",
            target=f"forward:{_FUNCTION}",
            match=_match,
            sample=lambda module: ((), {}),
            build=lambda module: FusedLogProbs,
            kernel="linear_cross_entropy",
            verify=_verify,
        ),
        Rule(
            name="trl_labelled_tokens",
            target=f"forward:{_DEVICE_TEST}",
            match=_match,
            sample=lambda module: ((), {}),
            build=lambda module: _on_every_device,
            kernel="linear_cross_entropy",
            verify=lambda module: Verdict(True, "only labelled tokens are scored, on every device"),
        ),
    ]
