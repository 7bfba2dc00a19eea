"""Recomputation, autocast, function transforms and heads of other kinds around logits that are lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import VOCAB_SIZE, Architecture
from pairs import (
    FP32_TOLERANCE,
    Pair,
    accelerate,
    assert_runs_alike,
    assert_same_gradients,
    counting_computed,
    distance,
    pair,
    step,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foak.core import UnsupportedError

V = VOCAB_SIZE
BATCH = Architecture.batch()
LABELS = BATCH["labels"]

Run = Callable[[Any], Any]


def user_loss(output: Any) -> torch.Tensor:
    return F.cross_entropy(output.logits.view(-1, V), LABELS.view(-1))


# -- recomputation ---------------------------------------------------------------------------------------------------


def checkpointed_loss(model: Any, reentrant: bool) -> Any:
    output = model(**BATCH)
    loss = checkpoint(
        lambda z, t: F.cross_entropy(z.view(-1, V), t.view(-1)), output.logits, LABELS, use_reentrant=reentrant
    )
    loss.backward()
    return [loss]


def checkpointed_model(model: Any, reentrant: bool) -> Any:
    embedded = model.get_input_embeddings()(BATCH["input_ids"])
    mask = BATCH["attention_mask"]
    loss = checkpoint(
        lambda x: model(inputs_embeds=x, attention_mask=mask, labels=LABELS).loss, embedded, use_reentrant=reentrant
    )
    loss.backward()
    return [loss]


def checkpointed_layers(model: Any, reentrant: bool) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return [step(model, BATCH)]


def checkpointed_head(model: Any, reentrant: bool) -> Any:
    forward = model.lm_head.forward

    def recomputed(hidden: torch.Tensor, **request: Any) -> torch.Tensor:
        if request:
            return forward(hidden, **request)
        return checkpoint(forward, hidden, use_reentrant=reentrant)

    model.lm_head.forward = recomputed
    return [step(model, BATCH)]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("run", [checkpointed_loss, checkpointed_model, checkpointed_layers, checkpointed_head])
def test_checkpointing(run: Callable[[Any, bool], Any], reentrant: bool) -> None:
    if run is checkpointed_loss and reentrant:
        # an autograd function over the logits, like any other; the error names what to do
        with pytest.raises(UnsupportedError):
            checkpointed_loss(pair().fast, True)
        return
    assert_runs_alike(lambda model: run(model, reentrant))


def test_a_checkpoint_wrapper_around_the_head() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def run(model: Any) -> Any:
        model.lm_head = checkpoint_wrapper(model.lm_head)
        loss = step(model, BATCH)
        model.lm_head = model.lm_head._checkpoint_wrapped_module
        return [loss]

    assert_runs_alike(run)


# -- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["Llama", "GPTBigCode", "OLMo 2", "Gemma 2", "Phi-3"])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_autocast_is_as_near_to_fp32_as_the_plain_model(architecture: str, backward_inside: bool) -> None:
    exact, models = pair(architecture).plain, pair(architecture)
    step(exact, BATCH)
    errors = []
    with counting_computed() as computed:
        for model in models.both:
            with torch.autocast("cpu", torch.bfloat16):
                output = model(**BATCH)
                if backward_inside:
                    output.loss.backward()
            if not backward_inside:
                output.loss.backward()
            assert output.logits.dtype == torch.bfloat16
            assert output.loss.dtype == torch.float32
            pairs = zip(model.parameters(), exact.parameters(), strict=True)
            squares = [distance(p.grad, reference.grad) ** 2 for p, reference in pairs]
            errors.append((sum(squares) / len(squares)) ** 0.5)
    assert not computed
    assert errors[1] <= 1.5 * errors[0]


def test_logits_read_outside_of_autocast_are_those_of_inside() -> None:
    models = pair()
    read = []
    for model in models.both:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**BATCH)
        read.append((output.logits + 0).detach())
    assert read[1].dtype == read[0].dtype == torch.bfloat16
    assert distance(read[1], read[0]) <= 4 * torch.finfo(torch.bfloat16).eps


def test_a_users_cross_entropy_under_autocast_has_the_plain_dtype() -> None:
    dtypes = []
    for model in pair().both:
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(user_loss(model(**BATCH)).dtype)
    assert dtypes[1] == dtypes[0]


# -- function transforms ---------------------------------------------------------------------------------------------


def test_functional_call() -> None:
    def run(model: Any) -> Any:
        scaled = {name: parameter * 1.01 for name, parameter in model.named_parameters()}
        loss = torch.func.functional_call(model, scaled, (), BATCH).loss
        loss.backward()
        return [loss]

    assert_runs_alike(run)


def test_func_grad() -> None:
    def run(model: Any) -> Any:
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        call = lambda v: torch.func.functional_call(model, v, (), BATCH).loss
        return list(torch.func.grad(call)(values).values())

    assert_runs_alike(run)


def test_saved_tensor_hooks() -> None:
    def run(model: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return [step(model, BATCH)]

    assert_runs_alike(run)


# -- heads of another kind -------------------------------------------------------------------------------------------


def parametrized(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.lm_head)


def weight_norm(model: Any) -> None:
    nn.utils.weight_norm(model.lm_head)


def wider(model: Any) -> None:
    model.lm_head.double()
    model.lm_head.register_forward_pre_hook(lambda m, i: (i[0].double(),))


def biased(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, V))


def frozen(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def all_frozen_but_the_head(model: Any) -> None:
    model.model.requires_grad_(False)


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def sequence(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head, nn.Tanh())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change", [parametrized, weight_norm, wider, biased, frozen, all_frozen_but_the_head, tied, sequence]
)
def test_heads(change: Callable[[Any], None]) -> None:
    models: list[Any] = []
    for fast in (False, True):
        model = pair().plain
        change(model)
        if fast:
            accelerate(model)
        models.append(model)
    losses = [step(model, BATCH) for model in models]
    assert losses[0].dtype == losses[1].dtype
    assert distance(losses[1], losses[0]) <= FP32_TOLERANCE
    assert_same_gradients(*models)


def test_an_offloaded_head() -> None:
    import accelerate as hf_accelerate

    models = Pair(*(pair().plain for _ in range(2)), None, None)  # type: ignore[arg-type]
    for model in models.both:
        hf_accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    accelerate(models.fast)
    with torch.no_grad():
        expected, actual = (model(**BATCH) for model in models.both)
    assert distance(actual.loss, expected.loss) <= FP32_TOLERANCE
    assert distance(actual.logits + 0, expected.logits) <= FP32_TOLERANCE
