"""Which reads of a quantized weight a keeper spares, and when what it keeps is freed."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foak.kernels.decode_once import Keeper

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Stored:
    """A weight that counts how often it is decoded, and knows which decodings are alive."""

    def __init__(self, keeper: Keeper | None) -> None:
        self.keeper = keeper
        self.version = 0
        self.weight = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        self.decoded: list[weakref.ref[Tensor]] = []

    def decode(self, dtype: torch.dtype) -> Tensor:
        dense = self.weight.to(dtype, copy=True)
        self.decoded.append(weakref.ref(dense))
        return dense

    def alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.decoded)

    def __call__(self, x: Tensor) -> Tensor:
        read = self.decode if self.keeper is None else self.keeper.reading(self.decode, self.version)
        product: Tensor = _Product.apply(x, read)  # type: ignore[no-untyped-call]
        return product.sin()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, read: Any) -> Tensor:
        ctx.read = read
        ctx.save_for_backward(x)
        return x @ read(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        assert len(ctx.saved_tensors) == 1  # which is what starts a recomputation
        return dy @ ctx.read(dy.dtype), None


def applied(layer: Stored, x: Tensor, reentrant: bool | None) -> Tensor:
    """The layer, checkpointed in one of the two ways or not at all (None)."""
    found: Tensor = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
    return found


@pytest.mark.parametrize(
    ("of_forwards", "reentrant", "decodings"),
    [
        (None, None, 2),  # without a keeper: forward, recomputation, backward
        (None, False, 3),
        (None, True, 3),
        (False, None, 2),
        (False, False, 2),
        (False, True, 2),
        (True, None, 1),
        (True, False, 1),
        (True, True, 2),  # a reentrant checkpoint's forward records no graph that could own anything
    ],
)
def test_decodings_of_a_step(of_forwards: bool | None, reentrant: bool | None, decodings: int) -> None:
    layer = Stored(None if of_forwards is None else Keeper(of_forwards))
    x = X.clone().requires_grad_()
    for step in range(1, 3):
        x.grad = None
        y = applied(layer, x, reentrant)
        assert layer.alive() == (1 if of_forwards and reentrant is not True else 0)
        y.sum().backward()
        assert len(layer.decoded) == decodings * step
        assert layer.alive() == 0
    assert x.grad is not None
    plain = X.clone().requires_grad_()
    Stored(None)(plain).sum().backward()
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("of_forwards", [False, True])
def test_two_applications_in_one_graph_are_right_and_leave_nothing(of_forwards: bool, reentrant: bool) -> None:
    layer, plain = Stored(Keeper(of_forwards)), Stored(None)
    found = []
    for one in (layer, plain):
        xs = [X.clone().requires_grad_(), (2 * X).requires_grad_()]
        sum(applied(one, x, reentrant).sum() for x in xs).backward()  # type: ignore[union-attr]
        found.append([x.grad for x in xs])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
    assert len(layer.decoded) < len(plain.decoded)
    assert layer.alive() == 0


def test_a_second_backward_decodes_again() -> None:
    layer = Stored(Keeper(of_forwards=True))
    x = X.clone().requires_grad_()
    loss = layer(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert layer.alive() == 0
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    assert len(layer.decoded) == 2


def test_a_graph_that_is_dropped_takes_its_weight_along() -> None:
    layer = Stored(Keeper(of_forwards=True))
    y = layer(X.clone().requires_grad_())
    assert layer.alive() == 1
    del y
    assert layer.alive() == 0


def test_nothing_is_kept_without_gradients() -> None:
    layer = Stored(Keeper(of_forwards=True))
    with torch.no_grad():
        layer(X)
    assert layer.alive() == 0


def test_what_no_backward_takes_is_freed_when_the_pass_ends() -> None:
    layer = Stored(Keeper(of_forwards=False))

    class Recomputes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            with torch.enable_grad():
                layer(X.clone().requires_grad_())
            assert layer.alive() == 1
            return dy

    x = X.clone().requires_grad_()
    Recomputes.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.alive() == 0


def test_a_pass_that_fails_leaves_at_most_one_weight_until_the_next() -> None:
    layer = Stored(Keeper(of_forwards=False))

    def region(x: Tensor) -> Tensor:
        first = layer(x)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("stopped here")
        return first.exp()  # saves a tensor, without which the recomputation would end before it fails

    x = X.clone().requires_grad_()
    y: Any = checkpoint(region, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="stopped here"):
        y.sum().backward()
    del y
    assert layer.alive() <= 1
    applied(layer, x, False).sum().backward()
    assert layer.alive() == 0


def test_a_weight_of_another_version_is_not_given() -> None:
    layer = Stored(Keeper(of_forwards=True))
    x = X.clone().requires_grad_()
    y = applied(layer, x, False)
    layer.weight = layer.weight + 1  # what a new version is for
    layer.version += 1
    again = applied(layer, x.detach().requires_grad_(), False)
    with torch.no_grad():
        assert torch.equal(again, (X @ layer.weight.t()).sin())
    del y


def test_a_weight_in_another_dtype_is_not_given() -> None:
    keeper, decoded = Keeper(of_forwards=True), []

    def decode(dtype: torch.dtype) -> Tensor:
        decoded.append(dtype)
        return torch.zeros(1, dtype=dtype)

    read = keeper.reading(decode, 0)
    assert read(torch.float32).dtype is torch.float32
    assert read(torch.bfloat16).dtype is torch.bfloat16
    assert decoded == [torch.float32, torch.bfloat16]


def test_a_copy_keeps_nothing() -> None:
    layer = Stored(Keeper(of_forwards=True))
    y = layer(X.clone().requires_grad_())
    assert layer.keeper is not None
    for copied in (copy.deepcopy(layer.keeper), pickle.loads(pickle.dumps(layer.keeper))):
        assert copied.of_forwards
        assert copied.find(torch.float32, 0, take=False) is None
    assert layer.keeper.find(torch.float32, 0, take=False) is not None
    del y
