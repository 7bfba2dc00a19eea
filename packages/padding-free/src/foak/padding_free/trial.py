"""Is a model right on packed sequences? Decided by packing a few into the model itself, beside the same ones padded.

What a model does with positions, and whether each of its layers keeps sequences apart, cannot be read off its modules.
So a few short random sequences go through it: padded, as it is used without packing; packed; and packed once more with
two of them changed, which must leave the others' logits alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from foak.core import UnsupportedError
from foak.core.patching.verify import isolated
from foak.padding_free.packed import PACKED, PackedSequences

__all__ = ["LENGTHS", "objection"]

LENGTHS = (5, 1, 19, 3, 11)
"""Of the trial's sequences: three buckets, the longest in the middle, one of a single token."""
_CHANGED = (0, 2)
_SLACK = 4.0
"""Allowed distance of packed from padded logits, in distances of padded logits from those of each sequence alone."""
_NOISE = 4.0
"""That distance itself at most, in units of the floor: beyond it the padded batch is no measure."""
_FLOOR = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative distance of packed from padded logits that is rounding whatever the model; `_HALF_FLOOR` for 16 bits. A
neighbour's token, or a position that does not restart, moves logits by a good part of their size."""
_HALF_FLOOR = 0.05
_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    AssertionError,
)


def objection(
    model: nn.Module, layout: PackedSequences, *, vocab_size: int, autocast: torch.dtype | None = None
) -> str | None:
    """Why a model must not be trained packed, or None where it may.

    Args:
        model: the language model, with its weights, made to take packed batches; its mode, gradients and the random
            generators are left as they are.
        layout: of `LENGTHS`, on the model's device.
        vocab_size: tokens are drawn below it.
        autocast: the dtype of the autocast under which it will train, or None.
    """
    device = next(model.parameters()).device
    with isolated(device), torch.no_grad(), _silent(model), torch.device(device):
        context = torch.autocast(device.type, autocast) if autocast is not None else contextlib.nullcontext()
        with context:
            return _objection(model.forward, layout, vocab_size)


def _objection(forward: Callable[..., Any], layout: PackedSequences, vocab_size: int) -> str | None:
    sequences = [torch.randint(min(3, vocab_size - 1), vocab_size, (length,)) for length in LENGTHS]

    def packed_logits(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        batch = {"input_ids": torch.cat(parts)[None], "position_ids": layout.position_ids(), PACKED: layout}
        return list(forward(**batch).logits[0].float().split(LENGTHS))

    try:
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(part) for part in sequences], batch_first=True)
        logits = forward(input_ids=padded, attention_mask=mask).logits.float()
        expected = [row[:length] for row, length in zip(logits, LENGTHS, strict=True)]
        alone = [forward(input_ids=part[None], attention_mask=torch.ones_like(part)[None]).logits for part in sequences]
        dtype = alone[0].dtype
    except _ERRORS as error:
        return f"a padded batch of {len(LENGTHS)} short sequences could not be tried: {_first_line(error)}"
    try:
        actual = packed_logits(sequences)
        changed = [(part + 1) % vocab_size if i in _CHANGED else part for i, part in enumerate(sequences)]
        after = packed_logits(changed)
    except (*_ERRORS, UnsupportedError) as error:
        return _first_line(error)
    noise = max(_distance(own[0].float(), row) for own, row in zip(alone, expected, strict=True))
    floor = _FLOOR.get(dtype, _HALF_FLOOR)
    if not noise <= _NOISE * floor:
        return f"padding alone moves its logits by {noise:.1e}, so nothing can be held against them"
    allowed = max(_SLACK * noise, floor)
    for index, (row, exact) in enumerate(zip(actual, expected, strict=True)):
        if index not in _CHANGED and _distance(after[index], row) > allowed:
            return "a layer mixes tokens across sequences: changing one changes the logits of another"
        distance = _distance(row, exact)
        if not distance <= allowed:
            return f"the logits of packed sequences differ from those of padded ones by {distance:.1e}"
    return None


def _distance(value: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance of a token's logits, relative to their size over all tokens; NaN where either is."""
    size = exact.norm() / exact.shape[0] ** 0.5
    return float((value - exact).norm(dim=-1).max() / size.clamp(min=torch.finfo(torch.float32).tiny))


@contextlib.contextmanager
def _silent(model: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) for the extent of a block, set past the modules' own `train`."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    if "PackedMask" in text:
        text = f"it reads attention masks outside of transformers' attention interface ({text})"
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:200]
