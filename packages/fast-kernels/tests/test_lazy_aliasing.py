"""In-place changes: what shares memory with real logits must share it with lazy ones, and nothing else may."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from architectures import VOCAB_SIZE, Architecture
from pairs import FP32_TOLERANCE, Pair, distance, pair
from torch.nn import functional as F

V = VOCAB_SIZE
BATCH = Architecture.batch()
TARGETS = BATCH["labels"][:, 1:].reshape(-1)

DERIVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # of the same memory
    "itself": lambda z: z,
    "float": lambda z: z.float(),
    "detach": lambda z: z.detach(),
    "to": lambda z: z.to(torch.float32),
    "slice": lambda z: z[:, :-1],
    "row": lambda z: z[1],
    "view": lambda z: z.view(-1, V),
    "reshape": lambda z: z.reshape(-1, V),
    "contiguous": lambda z: z.contiguous(),
    "slice of a view": lambda z: z.view(-1, V)[3:9],
    # copies
    "clone": lambda z: z.clone(),
    "double": lambda z: z.double(),
    "bfloat16": lambda z: z.bfloat16(),
    "to copy": lambda z: z.to(torch.float32, copy=True),
    "contiguous slice": lambda z: z[:, :-1].contiguous(),
    "reshaped slice": lambda z: z[:, :-1].reshape(-1, V),
    "scaled": lambda z: z * 2,
    "divided": lambda z: z / 2,
    "tanh": lambda z: z.tanh(),
    "slice of a clone": lambda z: z.clone()[0],
    "clone of a slice": lambda z: z[0].clone(),
    "scaled cast": lambda z: z.double() * 2,
    # of no use to a recorder
    "transpose": lambda z: z.transpose(1, 2),
    "one column": lambda z: z[..., 3],
}


def _set_item(z: torch.Tensor) -> None:
    z[..., 3] = -5.0


def _set_rows(z: torch.Tensor) -> None:
    z[z > 0.1] = 0.0


def _augmented(z: torch.Tensor) -> None:
    z *= -3


def _data(z: torch.Tensor) -> None:
    z.data.add_(1)


def _through_numpy(z: torch.Tensor) -> None:
    z.numpy()[...] = 2.0


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "setitem": _set_item,
    "setitem by mask": _set_rows,
    "augmented": _augmented,
    "add_": lambda z: z.add_(1),
    "zero_": lambda z: z.zero_(),
    "copy_": lambda z: z.copy_(torch.ones(())),
    "masked_fill_": lambda z: z.masked_fill_(z > 0, -1.0),
    "fill_ of a column": lambda z: z[..., 3].fill_(7),
    "zero_ of an unbound row": lambda z: z.unbind(0)[0].zero_(),
    "add_ to the transposed": lambda z: z.mT.add_(1),
    "inplace=True": lambda z: F.relu(z, inplace=True),
    "out=": lambda z: torch.zeros(z.shape, out=z),
    "foreach": lambda z: torch._foreach_mul_([z], 0.0),
    "aten": lambda z: torch.ops.aten.mul_.Tensor(z, torch.tensor(0.0)),
    "nn.init": lambda z: torch.nn.init.constant_(z, 3.0),
    "data": _data,
    "numpy": _through_numpy,
    "a view first": lambda z: z.view(-1, V).mul_(-1),
    "a slice first": lambda z: z[:, 2:].add_(4),
    "a lazy copy first": lambda z: z.clone().add_(4),
    "a contiguous slice first": lambda z: z[:, :-1].contiguous().zero_(),
    "a cast first": lambda z: z.double().zero_(),
}


def both_logits(models: Pair) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(**BATCH).logits for model in models.both]


@pytest.fixture(scope="module")
def models() -> Pair:
    return pair()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_shows_in_what_shares_memory_and_nowhere_else(
    models: Pair, change: Callable[[torch.Tensor], object]
) -> None:
    results = []
    for logits in both_logits(models):
        derived = [derive(logits) for derive in DERIVED.values()]
        change(logits)
        results.append([value + 0 for value in [*derived, *(derive(logits) for derive in DERIVED.values())]])
    for name, expected, actual in zip([*DERIVED, *DERIVED], *results, strict=True):
        coarse = torch.finfo(expected.dtype).eps
        assert distance(actual, expected) <= max(FP32_TOLERANCE, coarse), name


@pytest.mark.parametrize("derive", DERIVED.values(), ids=DERIVED)
def test_a_change_of_what_was_derived(models: Pair, derive: Callable[[torch.Tensor], torch.Tensor]) -> None:
    results = []
    for logits in both_logits(models):
        other = logits.clone()
        derive(logits).add_(3)
        results.append([logits + 0, other + 0])
    for expected, actual in zip(*results, strict=True):
        assert distance(actual, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_loss_over_what_was_derived_before_a_change(models: Pair, change: Callable[[torch.Tensor], object]) -> None:
    results = []
    for logits in both_logits(models):
        shifted, copied = logits[:, :-1], logits.clone()[:, :-1]
        change(logits)
        results.append([F.cross_entropy(value.reshape(-1, V), TARGETS) for value in (shifted, copied, logits[:, :-1])])
    for expected, actual in zip(*results, strict=True):
        assert distance(actual, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.requires_grad_(),
        lambda z: z.unsqueeze_(0),
        lambda z: z.squeeze_(0),
        lambda z: z.transpose_(0, 1),
        lambda z: z.resize_(3, V),
        lambda z: setattr(z, "data", torch.zeros(3, 5)),
        lambda z: setattr(z, "requires_grad", True),
    ],
    ids=["requires_grad_", "unsqueeze_", "squeeze_", "transpose_", "resize_", "data", "requires_grad"],
)
def test_changes_of_metadata_show(models: Pair, change: Callable[[torch.Tensor], object]) -> None:
    seen = []
    for logits in both_logits(models):
        change(logits)
        seen.append((tuple(logits.shape), logits.dim(), len(logits), logits.numel(), logits.requires_grad))
    assert seen[1] == seen[0]
