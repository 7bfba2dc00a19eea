"""Hooks, autograd and gradient modes around a head whose logits are lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, Architecture
from pairs import (
    FP32_TOLERANCE,
    assert_runs_alike,
    assert_same_gradients,
    counting_computed,
    distance,
    pair,
    step,
)
from torch import nn
from torch.nn import functional as F

from foak.core import UnsupportedError

V = VOCAB_SIZE
BATCH = Architecture.batch()
LABELS = BATCH["labels"]

Run = Callable[[Any], Any]


def user_loss(output: Any) -> torch.Tensor:
    return F.cross_entropy(output.logits.view(-1, V), LABELS.view(-1))


# -- hooks on the logits ---------------------------------------------------------------------------------------------


def retain_before_the_loss(model: Any) -> Any:
    output = model(**BATCH)
    output.logits.retain_grad()
    user_loss(output).backward()
    return [output.logits.grad]


def hook_before_the_loss(model: Any) -> Any:
    seen: list[torch.Tensor] = []
    output = model(**BATCH)
    output.logits.register_hook(lambda gradient: seen.append(gradient) or gradient * 3)
    user_loss(output).backward()
    return seen


def hook_on_a_cast(model: Any) -> Any:
    output = model(**BATCH)
    logits = output.logits.double()
    logits.register_hook(lambda gradient: gradient * 3)
    loss = F.cross_entropy(logits.view(-1, V), LABELS.view(-1))
    loss.backward()
    return [loss]


def gradient_of_a_users_loss(model: Any) -> Any:
    output = model(**BATCH)
    logits = output.logits
    return torch.autograd.grad(user_loss(output), [logits])


@pytest.mark.parametrize("run", [retain_before_the_loss, hook_before_the_loss, hook_on_a_cast])
def test_a_hook_on_the_logits_sees_the_gradient_of_a_users_loss(run: Run) -> None:
    assert_runs_alike(run)


def test_the_gradient_with_respect_to_logits_is_right_or_refused() -> None:
    models = pair()
    expected = gradient_of_a_users_loss(models.plain)[0]
    try:
        actual = gradient_of_a_users_loss(models.fast)[0]
    except UnsupportedError:
        return
    assert distance(actual, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("what", ["register_hook", "retain_grad", "grad", "grad allow_unused"])
def test_the_models_own_loss_no_longer_reaches_its_logits_and_says_so(what: str) -> None:
    """That loss was taken without logits before anybody could ask for their gradient: an error, never a wrong one."""
    output = pair().fast(**BATCH)

    def ask() -> None:
        if what == "register_hook":
            output.logits.register_hook(lambda gradient: gradient * 3)
        elif what == "retain_grad":
            output.logits.retain_grad()
        else:
            torch.autograd.grad(output.loss, output.logits, allow_unused="allow" in what)
        output.loss.backward()

    with pytest.raises(UnsupportedError, match="logits"):
        ask()


# -- hooks on the head -----------------------------------------------------------------------------------------------


def with_hook(register: Callable[[nn.Module, list[Any]], Any]) -> Run:
    def run(model: Any) -> Any:
        seen: list[Any] = []
        handle = register(model.lm_head, seen)
        output = model(**BATCH)
        output.loss.backward()
        logits = output.logits.detach() + 0
        handle.remove()
        return [output.loss, logits, float(len(seen)), *seen]

    return run


HEAD_HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward, changing": lambda h, s: h.register_forward_hook(lambda m, i, o: o * 2.0),
    "forward, reading": lambda h, s: h.register_forward_hook(lambda m, i, o: s.append(o.detach().mean())),
    "forward, adding": lambda h, s: h.register_forward_hook(lambda m, i, o: o + torch.linspace(0, 1, V)),
    "forward with keywords": lambda h, s: h.register_forward_hook(
        lambda m, i, k, o: s.append(float(len(k))), with_kwargs=True
    ),
    "before, counting": lambda h, s: h.register_forward_pre_hook(lambda m, i: s.append(1.0)),
    "before, changing": lambda h, s: h.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,)),
    "backward": lambda h, s: h.register_full_backward_hook(lambda m, gi, go: s.append(go[0])),
    "before the backward": lambda h, s: h.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
    "global": lambda h, s: nn.modules.module.register_module_forward_hook(
        lambda m, i, o: s.append(o.detach().sum()) if m is h else None
    ),
}


@pytest.mark.parametrize("register", HEAD_HOOKS.values(), ids=HEAD_HOOKS)
def test_hooks_on_the_head_run_once_on_the_logits(register: Callable[[nn.Module, list[Any]], Any]) -> None:
    assert_runs_alike(with_hook(register))


def test_hooks_on_the_model_and_below_do_not_compute_logits() -> None:
    def run(model: Any) -> Any:
        seen: list[torch.Tensor] = []
        handles = [
            model.register_forward_hook(lambda m, i, o: seen.append(o.loss)),
            model.model.norm.register_forward_hook(lambda m, i, o: o * 1.5),
            model.model.layers[0].mlp.register_full_backward_hook(lambda m, gi, go: seen.append(go[0])),
        ]
        loss = step(model, BATCH)
        for handle in handles:
            handle.remove()
        return [loss, *seen]

    with counting_computed() as computed:
        assert_runs_alike(run)
    assert not computed


# -- autograd --------------------------------------------------------------------------------------------------------


def twice(model: Any) -> Any:
    loss = model(**BATCH).loss
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def of_the_logits_alone(model: Any) -> Any:
    logits = model(**BATCH).logits
    torch.autograd.backward([logits], [torch.linspace(-1, 1, logits.numel()).view(logits.shape)])
    return []


def of_loss_and_logits(model: Any) -> Any:
    output = model(**BATCH)
    (output.loss * 2 + output.logits.softmax(-1).square().sum()).backward()
    return [output.loss]


def of_two_losses(model: Any) -> Any:
    output = model(**BATCH)
    (output.loss + user_loss(output) * -0.3).backward()
    return [output.loss]


def with_respect_to_some(model: Any) -> Any:
    return torch.autograd.grad(model(**BATCH).loss, [model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight])


def accumulated(model: Any) -> Any:
    for seed in range(3):
        model(**Architecture.batch(seed=seed)).loss.backward()
    return []


def two_forwards_before_one_backward(model: Any) -> Any:
    (model(**BATCH).loss - model(**Architecture.batch(seed=1)).loss).backward()
    return []


@pytest.mark.parametrize(
    "run",
    [
        twice,
        of_the_logits_alone,
        of_loss_and_logits,
        of_two_losses,
        with_respect_to_some,
        accumulated,
        two_forwards_before_one_backward,
    ],
)
@pytest.mark.parametrize("architecture", ["Llama", "Gemma 2"])
def test_backwards(architecture: str, run: Run) -> None:
    assert_runs_alike(run, architecture)


def test_a_second_backward_through_a_freed_graph_is_refused_as_without_foak() -> None:
    for model in pair().both:
        loss = model(**BATCH).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_second_derivative_is_right_or_refused() -> None:
    models = pair()
    penalties = []
    for model in models.both:
        model.set_attn_implementation("eager")  # the CPU's fused attention has no second derivative
        gradient = torch.autograd.grad(model(**BATCH).loss, list(model.parameters()), create_graph=True)
        penalties.append(sum(g.square().sum() for g in gradient))
    penalties[0].backward()
    try:
        penalties[1].backward()
    except RuntimeError:
        return
    assert_same_gradients(*models.both)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * gradient


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, copied: bool) -> torch.Tensor:
        return z.clone() if copied else z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return -0.5 * gradient, None


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squared": Squared.apply,
    "reversed copy": lambda z: F.cross_entropy(Reversed.apply(z, True).view(-1, V), LABELS.view(-1)),
    "reversed view": lambda z: F.cross_entropy(Reversed.apply(z, False).view(-1, V), LABELS.view(-1)),
    "reversed and read": lambda z: Reversed.apply(z, True).softmax(-1).square().sum(),
    "reversed slice": lambda z: Reversed.apply(z[:, :-1].float(), True).logsumexp(-1).sum(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("beside", [True, False], ids=["beside the model's loss", "alone"])
def test_a_users_autograd_function_over_logits_is_right_or_refused(
    function: Callable[[torch.Tensor], torch.Tensor], beside: bool
) -> None:
    models = pair()

    def backward(model: Any) -> None:
        output = model(**BATCH)
        term = function(output.logits)
        (term + output.loss if beside else term).backward()

    backward(models.plain)
    try:
        backward(models.fast)
    except UnsupportedError:
        return
    assert_same_gradients(*models.both)


# -- gradient modes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    def run(model: Any) -> Any:
        with mode():
            output = model(**BATCH)
            inside = model(**BATCH).logits + 0
        assert not output.loss.requires_grad
        assert not output.logits.requires_grad
        return [output.loss, inside, output.logits + 0]

    assert_runs_alike(run)


def test_a_loss_over_logits_of_another_gradient_mode() -> None:
    for model in pair().both:
        with torch.no_grad():
            without = model(**BATCH)
        assert not user_loss(without).requires_grad
        output = model(**BATCH)
        with torch.no_grad():
            assert not user_loss(output).requires_grad
        assert user_loss(output).requires_grad
        assert not F.cross_entropy(output.logits.detach().view(-1, V), LABELS.view(-1)).requires_grad
