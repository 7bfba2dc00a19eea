"""LoRA layers as autograd and the generator see them: what is saved, what is computed again, and with which masks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foak.kernels import LoraMember, lora_gated_linear, lora_linear, promise_lora_linears
from foak.kernels.lora import dropout
from foak.kernels.lora.dropout import keep_mask
from foak.kernels.testing import assert_close_to_fp64

SEED = 0x123456789ABCDEF


def leaf(*shape: int, dtype: torch.dtype, device: torch.device, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device).requires_grad_()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_masks(use_reentrant: bool, backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])

    def run(x: Tensor) -> Tensor:
        return lora_linear(x, weight, a, b, dropout_p=0.5)

    def gradients(function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        for t in (x, a, b):
            t.grad = None
        (function(x).float() ** 2).sum().backward()
        return [t.grad for t in (x, a, b) if t.grad is not None]

    plain = gradients(run)
    again = gradients(lambda x: checkpoint(run, x, use_reentrant=use_reentrant))
    assert len(plain) == 3
    assert all(torch.equal(p, q) for p, q in zip(plain, again, strict=True))


def test_recomputation_leaves_out_the_last_product(backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    asked = []

    def read(dtype: torch.dtype) -> Tensor:
        asked.append(dtype)
        return weight

    checkpoint(lambda x: lora_linear(x, read, a, b), x, use_reentrant=False).sum().backward()
    assert len(asked) == 2  # one product in the forward, one in the backward, none in the recomputation


def test_a_second_backward_sees_the_same_tensors(backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    y = lora_linear(x, weight, a, b, dropout_p=0.1)
    first, second = (torch.autograd.grad(y, (x, a, b), torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "trains", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_frozen_operands(trains: tuple[bool, ...], backend: str, device: torch.device, poisoned: None) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0).requires_grad_(trains[0])
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    a.requires_grad_(trains[1])
    b.requires_grad_(trains[2])
    lora_linear(x, weight, a, b).sum().backward()
    assert tuple(t.grad is not None for t in (x, a, b)) == trains


def test_everything_dropped(backend: str, device: torch.device) -> None:
    """A probability of one leaves the base alone."""
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    y = lora_linear(x, weight, a, b, dropout_p=1.0)
    y.sum().backward()
    assert_close_to_fp64(y, x.double() @ weight.double().t(), reduction_length=64)
    assert a.grad is not None
    assert b.grad is not None
    assert not a.grad.any()
    assert not b.grad.any()


def test_a_promise_that_nobody_asks_for(backend: str, device: torch.device) -> None:
    """Costs nothing and gets no gradient, and the other one is right."""
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    factors = [leaf(*s, dtype=torch.float32, device=device, seed=i) for i, s in enumerate([(4, 64), (32, 4)] * 2)]
    members = [LoraMember(weight.to, 32, factors[2 * i], factors[2 * i + 1], 1.0) for i in range(2)]
    promise_lora_linears(x, members)[1].fulfil().sum().backward()
    alone = torch.autograd.grad(lora_linear(x, weight, factors[2], factors[3]).sum(), (x, *factors[2:]))
    assert factors[0].grad is None
    assert factors[1].grad is None
    for got, want in zip((x.grad, factors[2].grad, factors[3].grad), alone, strict=True):
        assert got is not None
        assert torch.equal(got, want)


def test_no_rows(backend: str, device: torch.device) -> None:
    x = torch.empty(2, 0, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2) for s in [(4, 64), (32, 4)])
    y = lora_linear(x, weight, a, b, dropout_p=0.1)
    y.sum().backward()
    assert y.shape == (2, 0, 32)
    assert a.grad is not None
    assert bool((a.grad == 0).all())


def test_only_gate_and_up_are_kept(backend: str, device: torch.device) -> None:
    gate, up = (leaf(64, 512, dtype=torch.bfloat16, device=device, seed=i) for i in (1, 2))
    weight = leaf(32, 512, dtype=torch.bfloat16, device=device, seed=3).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=4) for s in [(4, 512), (32, 4)])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        lora_gated_linear(gate, up, "silu", LoraMember(weight.to, 32, a, b, 1.0, 0.1))
    large = [t for t in saved if t.numel() >= gate.numel()]
    assert {t.data_ptr() for t in large} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_masks_keep_the_right_share(p: float, device: torch.device) -> None:
    kept = keep_mask(SEED, 1, 500, 403, p, device).double()
    # five standard deviations of the mean of as many draws
    assert abs(float(kept.mean()) - (1 - p)) <= 5 * (p * (1 - p) / kept.numel()) ** 0.5
    if 0 < p < 1:
        neighbours = (kept[:, 1:] - 1 + p) * (kept[:, :-1] - 1 + p)
        assert abs(float(neighbours.mean())) <= 5 * p * (1 - p) / neighbours.numel() ** 0.5


def test_masks_of_adapters_seeds_and_rows_differ(device: torch.device) -> None:
    first = keep_mask(SEED, 0, 64, 64, 0.5, device)
    for other in (keep_mask(SEED, 1, 64, 64, 0.5, device), keep_mask(SEED + 1, 0, 64, 64, 0.5, device)):
        assert 0.4 < float((first == other).double().mean()) < 0.6
    assert torch.equal(first[:32], keep_mask(SEED, 0, 32, 64, 0.5, device))
    assert not torch.equal(first[:32], first[32:])


def test_philox_gives_the_published_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The known answers of Philox-4x32-7 that its authors give, for counters and keys of zeros and of ones."""
    for value, words in (
        (0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (0xFFFFFFFF, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ):
        monkeypatch.setattr(dropout.torch, "zeros_like", lambda t, v=value: torch.full_like(t, v))
        counter = torch.tensor([value])
        found = dropout._philox(value << 32 | value, counter, counter, value)
        assert tuple(int(word) for word in found) == words


def test_the_generator_decides(backend: str, device: torch.device) -> None:
    x = leaf(6, 64, dtype=torch.bfloat16, device=device, seed=0).detach()
    weight = leaf(32, 64, dtype=torch.bfloat16, device=device, seed=1).detach()
    a, b = (leaf(*s, dtype=torch.float32, device=device, seed=2).detach() for s in [(4, 64), (32, 4)])

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return lora_linear(x, weight, a, b, dropout_p=0.5)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_refusals(device: torch.device) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.zeros(4, 8, device=device)
    a, b = torch.zeros(2, 8, device=device), torch.zeros(4, 2, device=device)
    with pytest.raises(ValueError, match=r"a \(2, 7\)"):
        lora_linear(x, weight, a[:, :7], b)
    with pytest.raises(ValueError, match=r"dropout_p is 1\.5"):
        lora_linear(x, weight, a, b, dropout_p=1.5)
    with pytest.raises(ValueError, match="4 members"):
        promise_lora_linears(x, [LoraMember(weight.to, 4, a, b, 1.0)] * 4)
