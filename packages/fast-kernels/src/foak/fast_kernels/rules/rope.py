"""Rotary position embedding: attentions whose forward calls ``apply_rotary_pos_emb``.

Only the function is replaced, in a copy of that instance's forward, so the attention around it stays what it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from foak.core.patching import NotApplicable, Rule
from foak.core.patching.binding import original_function
from foak.core.patching.rebinding import called_global, global_names, inner_functions
from foak.core.patching.rule import Case
from foak.core.patching.twin import compute_dtype, is_linear_like, trial_device
from foak.kernels import rope

_NAME = "apply_rotary_pos_emb"


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`foak.kernels.rope` under the signature of most of transformers' ``apply_rotary_pos_emb``."""
    return rope(q, k, cos, sin, unsqueeze_dim)


def rotary_with_positions(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: Any = None,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same under the older signature, whose ``position_ids`` have no effect."""
    return rope(q, k, cos, sin, unsqueeze_dim)


def rotary_keeping_dtype(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where the results have the dtypes of ``q`` and ``k``, whatever that of the angles."""
    rotated_q, rotated_k = rope(q, k, cos, sin, unsqueeze_dim)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


def rotary_half_table(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for angles that are given once for both halves of a head: ``cos``, ``sin`` ``[B, S, D / 2]``."""
    return rope(q, k, torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1), unsqueeze_dim)


def rotary_one(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
    """The same for queries or keys alone."""
    nobody = x.narrow(2 if unsqueeze_dim == 2 else 1, 0, 0)
    return rope(x, nobody, cos, sin, unsqueeze_dim)[0]


_EMPTY = inspect.Parameter.empty
_SIGNATURES: dict[tuple[tuple[str, Any], ...], Callable[..., Any]] = {
    (("q", _EMPTY), ("k", _EMPTY), ("cos", _EMPTY), ("sin", _EMPTY), ("unsqueeze_dim", 1)): rotary,
    (
        ("q", _EMPTY),
        ("k", _EMPTY),
        ("cos", _EMPTY),
        ("sin", _EMPTY),
        ("position_ids", None),
        ("unsqueeze_dim", 1),
    ): rotary_with_positions,
    (("x", _EMPTY), ("cos", _EMPTY), ("sin", _EMPTY), ("unsqueeze_dim", 1)): rotary_one,
}
"""Parameters with their defaults, and the function that has the same: every call of the one is one of the other."""


def match(module: nn.Module) -> str | None:
    """Why a module is a rotary attention, or None."""
    forward = original_function(module)
    if called_global(forward, _NAME) is not None:
        return f"its forward calls {_NAME}"
    if not inspect.isfunction(forward) or not any(is_linear_like(child) for child in module.children()):
        return None
    others = sorted(
        name
        for function in inner_functions(forward)
        for name in global_names(function.__code__)
        if name.startswith(("apply_rotary", "apply_multimodal_rotary", "apply_interleaved_rotary"))
    )
    if others:
        raise NotApplicable(f"its forward rotates by {others[0]}, which is not the rotate-half form of {_NAME}")
    return None


def build(module: nn.Module) -> Callable[..., Any]:
    """The kernel under the signature of the function that this attention calls."""
    function = _function_of(module)
    signature = inspect.signature(function)
    parameters = tuple((name, parameter.default) for name, parameter in signature.parameters.items())
    if parameters not in _SIGNATURES:
        bare = signature.replace(
            parameters=[p.replace(annotation=_EMPTY) for p in signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        raise NotApplicable(f"its {_NAME} has another signature: {bare}")
    return _variant(function, _SIGNATURES[parameters], head_size(module))


@functools.cache
def _variant(function: Callable[..., Any], chosen: Callable[..., Any], size: int) -> Callable[..., Any]:
    """The form of the kernel that does what a function does, found by calling it; raises `NotApplicable`."""

    def call(candidate: Callable[..., Any], table_size: int, dtype: torch.dtype) -> list[torch.Tensor] | None:
        generator = torch.Generator("cpu").manual_seed(0)
        x = torch.randn(1, 1, 3, size, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
        table = torch.randn(2, 1, 3, table_size, generator=generator, dtype=torch.float64, device="cpu").float()
        cos, sin = table if dtype == torch.bfloat16 else table.double()
        heads = (x,) if chosen is rotary_one else (x, x)
        try:
            with torch.no_grad():
                result = candidate(*heads, cos, sin)
        except RuntimeError:  # tables of this size do not fit
            return None
        return [result] if isinstance(result, torch.Tensor) else list(result)

    exact, narrow = torch.float64, torch.bfloat16
    variants = [(chosen, size)]
    if chosen is rotary:
        variants = [(rotary, size), (rotary_keeping_dtype, size), (rotary_half_table, size // 2)]
    for candidate, table_size in variants:
        expected, rotated = call(function, table_size, exact), call(candidate, table_size, exact)
        if expected is None or rotated is None:
            continue
        if any((a - b).norm() > 1e-9 * a.norm() for a, b in zip(expected, rotated, strict=True)):
            continue
        dtypes = [[t.dtype for t in call(f, table_size, narrow) or ()] for f in (function, candidate)]
        if dtypes[0] == dtypes[1]:
            return candidate
    raise NotApplicable(f"its {_NAME} does not rotate halves of a head against each other; its layout is another")


def head_size(module: nn.Module) -> int:
    """Size of an attention head, from the module or its configuration."""
    for owner in (module, getattr(module, "config", None)):
        for name in ("head_dim", "qk_rope_head_dim", "head_size", "rotary_ndims"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    config = getattr(module, "config", None)
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 64


def _case(
    module: nn.Module,
    *,
    rotary_size: int,
    batch: int = 2,
    transposed: bool = False,
    wide_tables: bool = False,
    **kwargs: Any,
) -> Case:
    device = trial_device(module)
    linear = next((child for child in module.children() if is_linear_like(child)), None)
    dtype = compute_dtype(linear) if linear is not None else torch.float32
    if wide_tables and dtype == torch.float32:
        dtype = torch.bfloat16  # what autocast gives to the attention of a float32 model
    heads_last = kwargs.get("unsqueeze_dim") == 2
    size, length = head_size(module), 5

    def states(heads: int) -> torch.Tensor:
        x = torch.randn(2, length, heads, size, device=device).to(dtype)
        if heads_last:
            return x.requires_grad_()
        x = x.transpose(1, 2)
        return (x if transposed else x.contiguous()).requires_grad_()

    function = _function_of(module)
    # cos and sin that are not symmetric in their halves and differ per row: nothing may be taken for granted
    angles = torch.randn(batch, length, rotary_size, device=device) * 3
    heads = (states(4),) if "x" in inspect.signature(function).parameters else (states(4), states(1))
    table_dtype = torch.float32 if wide_tables else dtype
    return (*heads, angles.cos().to(table_dtype), angles.sin().to(table_dtype)), kwargs


def _function_of(module: nn.Module) -> Callable[..., Any]:
    function = called_global(original_function(module), _NAME)
    assert function is not None  # the rule has matched
    return function  # type: ignore[no-any-return]


def _table_size(module: nn.Module) -> int:
    return head_size(module) // 2 if build(module) is rotary_half_table else head_size(module)


def sample(module: nn.Module) -> Case:
    """Four query heads and one key head, rotated in full."""
    return _case(module, rotary_size=_table_size(module), transposed=True)


def more_samples(module: nn.Module) -> Iterable[Case]:
    """One row of angles for all sequences, heads behind positions, float32 angles, a partial rotation if taken."""
    size = _table_size(module)
    yield _case(module, rotary_size=size, batch=1)
    yield _case(module, rotary_size=size, unsqueeze_dim=2)
    yield _case(module, rotary_size=size, wide_tables=True)
    if size % 4 == 0:
        args, kwargs = _case(module, rotary_size=size // 2)
        try:
            with torch.no_grad():
                _function_of(module)(*args, **kwargs)
        except RuntimeError:
            return
        yield args, kwargs


def rules(key: str | None) -> list[Rule]:
    """The rule behind ``fast_rope_embeddings``."""
    return [
        Rule(
            name="rope",
            target=f"forward:{_NAME}",
            match=match,
            sample=sample,
            build=build,
            kernel="rope",
            key=key,
            more_samples=more_samples,
        )
    ]
