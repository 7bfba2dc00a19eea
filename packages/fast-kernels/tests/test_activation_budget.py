"""The activation budget on whole models: the same numbers as plain checkpointing, within the budget, and undone."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from budgeted import LAYERS, MIB, Run, assert_same_run, budget_of, checkpointed, framework, llama
from pairs import assert_untouched, snapshot
from storages import LivingStorages
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from foak.core import ConfigError, UnsupportedError
from foak.core.patching import ModelPatcher
from foak.fast_kernels.checkpointing import budget as budgets
from foak.fast_kernels.checkpointing.limit import parse_limit
from foak.fast_kernels.checkpointing.meter import meter_for

FIXED = [(4, 48)] * 4
RAGGED = [(4, 24), (4, 48), (2, 16), (3, 40), (4, 64), (1, 8), (4, 64)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shapes", [FIXED, RAGGED], ids=["fixed", "ragged"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_layers_keep_their_activations_and_nothing_else_changes(
    reentrant: bool, shapes: list[tuple[int, int]], accumulate: int, meter: LivingStorages
) -> None:
    plain = Run(checkpointed(llama(dropout=0.1), reentrant), meter, accumulate).steps(shapes)
    model = checkpointed(llama(dropout=0.1), reentrant)
    limit = meter.allocated + 11 * MIB
    framework(limit / 2**30).apply(model)
    fast = Run(model, meter, accumulate).steps(shapes)
    assert_same_run(plain, fast)
    assert fast.kept[0] == 0  # the first forward learns
    assert max(fast.kept) == LAYERS
    assert max(fast.peaks) <= limit


@pytest.mark.parametrize("more", [0.25, 0.5, 0.75])
def test_a_step_stays_within_its_budget_and_uses_it(more: float, meter: LivingStorages) -> None:
    shapes = [(8, 48)] * 5
    model = checkpointed(llama())
    plain = Run(model, meter).steps(shapes)
    everything = Run(llama(), meter).steps(shapes)
    resident = meter.allocated
    fast = checkpointed(llama())
    low, high = plain.peaks[-1], everything.peaks[-1]
    # what the two runs left behind is there in the third as well
    own = meter.allocated - resident
    limit = int(resident + own + (1 - more) * (low - own) + more * (high - own))
    framework(limit / 2**30).apply(fast)
    run = Run(fast, meter).steps(shapes)
    assert_same_run(plain, run)
    assert 0 < run.kept[-1] < LAYERS
    assert max(run.peaks) <= limit
    profile = budget_of(fast).profile
    assert profile is not None
    assert limit - run.peaks[-1] < 1.5 * profile.kept[-1]


def test_auto_never_takes_more_than_plain_checkpointing(meter: LivingStorages) -> None:
    shapes = [(1, 8)] * 4  # gradients outweigh a layer's activations
    start = meter.allocated
    plain = Run(checkpointed(llama()), meter).steps(shapes)
    left = meter.allocated - start
    fast = checkpointed(llama())
    framework("auto").apply(fast)
    run = Run(fast, meter).steps(shapes)
    assert_same_run(plain, run)
    assert run.kept[-1] > 0
    assert all(mine - left <= its for mine, its in zip(run.peaks, plain.peaks, strict=True))


def test_a_budget_below_what_checkpointing_needs_changes_nothing_and_is_said(meter: LivingStorages) -> None:
    model = checkpointed(llama())
    report = framework("1 MiB").apply(model)
    run = Run(model, meter).steps(FIXED)
    assert run.kept == [0, 0, 0, 0]
    assert sum("every layer stays checkpointed: even so a step needs" in note for note in report.notes) == 1


def test_the_report_has_one_line(meter: LivingStorages) -> None:
    model = checkpointed(llama())
    report = framework("1 GiB").apply(model)
    decides = f"on a GPU each forward decides how many of {LAYERS} layers keep their activations"
    assert report.notes == [f"activation budget (1.00 GiB): {decides}"]
    Run(model, meter).steps(FIXED)
    assert report.notes == [f"activation budget (1.00 GiB): {LAYERS} of {LAYERS} layers keep their activations"]


def test_where_memory_cannot_be_read_every_layer_stays_checkpointed() -> None:
    model = checkpointed(llama())
    report = framework("1 GiB").apply(model)
    with LivingStorages() as meter:
        run = Run(model, meter).steps(FIXED)
    assert run.kept == [0, 0, 0, 0]
    assert any("cannot be read on cpu" in note for note in report.notes)


@pytest.mark.parametrize(
    ("backend", "allocated", "counted"), [("native", 5, True), ("native", 0, False), ("cudaMallocAsync", 5, False)]
)
def test_a_cuda_allocator_that_does_not_count_is_not_believed(
    backend: str, allocated: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its cache PyTorch's allocator leaves every counter at zero."""
    counters = {"current": allocated, "peak": allocated, "allocated": allocated}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: {"allocated_bytes": {"all": counters}}
    )
    assert (meter_for(torch.device("cuda", 0)) is not None) is counted


class Scaled(nn.Module):
    """A layer that gives its checkpointing function a keyword argument of its own."""

    gradient_checkpointing = True
    _gradient_checkpointing_func: Any

    def __init__(self, **kwargs: float) -> None:
        super().__init__()
        self.linear, self.kwargs = nn.Linear(8, 8), kwargs

    def run(self, x: Tensor, scale: float = 1.0) -> Tensor:
        result: Tensor = self.linear(x) * scale
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._gradient_checkpointing_func(self.run, x, **self.kwargs)
        return result


def test_keyword_arguments_of_a_layer_are_not_dropped(meter: LivingStorages) -> None:
    model = nn.Sequential(*(Scaled(scale=3.0) for _ in range(3))).train()
    for layer in model:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    patcher = ModelPatcher()
    patcher.apply(model)
    x = torch.randn(1, 4, 8, requires_grad=True)
    expected = model(x).detach()
    budget = budgets.ActivationBudget(model, model, list(model), 2**30, patcher)
    budget.install(patcher)
    for _ in range(4):
        y = model(x)
        assert torch.equal(y, expected)
        y.sum().backward()
    assert [note for note in patcher.report.notes if "every layer stays checkpointed" in note] == [
        "activation budget (1.00 GiB): every layer stays checkpointed: its layers give keyword arguments to the "
        "checkpointing function"
    ]


def test_a_forward_that_raised_leaves_nothing(meter: LivingStorages) -> None:
    model = checkpointed(llama())
    framework("1 GiB").apply(model)
    run = Run(model, meter).steps(FIXED)
    ids = torch.ones(4, 48, dtype=torch.long)

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped here")

    handle = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="stopped here"):
        model(input_ids=ids, labels=ids)
    handle.remove()
    assert budget_of(model)._forward is None
    run.steps(FIXED)
    assert run.kept == [0, *[LAYERS] * 7]


def test_restore_leaves_no_trace(meter: LivingStorages) -> None:
    model = checkpointed(llama())
    before = snapshot(model)
    fast = framework("1 GiB")
    fast.apply(model)
    run = Run(model, meter).steps(FIXED)
    assert run.kept[-1] == LAYERS
    model.zero_grad()
    fast.restore()
    assert_untouched(model, before)


def test_restore_after_checkpointing_was_turned_on_later(meter: LivingStorages) -> None:
    """As Trainer does at the start of training."""
    model = llama()
    fast = framework("1 GiB")
    report = fast.apply(model)
    assert "until gradient_checkpointing_enable is called" in str(report)
    checkpointed(model)
    before = snapshot(model)
    run = Run(model, meter).steps(FIXED)
    assert run.kept[-1] == LAYERS
    function = model.model.layers[0].__dict__["_gradient_checkpointing_func"]
    assert isinstance(function, budgets.Segment)
    fast.restore()
    assert model.model.layers[0].__dict__["_gradient_checkpointing_func"] is function.function
    after = snapshot(model)
    assert after.keys() == before.keys()
    assert budgets.ATTRIBUTE not in vars(model.model)
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_checkpoints_every_layer_and_is_independent(how: str, meter: LivingStorages) -> None:
    model = checkpointed(llama())
    framework("1 GiB").apply(model)
    Run(model, meter).steps(FIXED)
    model.disable_input_require_grads()  # transformers' hook for it cannot be pickled
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert not any(isinstance(vars(m).get("_gradient_checkpointing_func"), budgets.Segment) for m in other.modules())
    ids = torch.ones(2, 8, dtype=torch.long)
    losses = [m(input_ids=ids, labels=ids).loss for m in (model, other)]
    assert torch.equal(*losses)
    losses[1].backward()
    assert budget_of(model).decision is not None


def test_evaluation_and_generation_are_left_alone(meter: LivingStorages) -> None:
    model = checkpointed(llama())
    framework("1 GiB").apply(model)
    run = Run(model, meter).steps(FIXED[:2])
    ids = torch.ones(2, 8, dtype=torch.long)
    decision = budget_of(model).decision
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    model.train()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    assert budget_of(model).decision is decision
    run.steps(FIXED[:1])
    assert run.kept[-1] == LAYERS


def test_two_forwards_before_one_backward(meter: LivingStorages) -> None:
    plain, fast = checkpointed(llama()), checkpointed(llama())
    framework("1 GiB").apply(fast)
    ids = torch.arange(32).view(2, 16)
    for model in (plain, fast):
        for _ in range(4):
            model.zero_grad()
            (model(input_ids=ids, labels=ids).loss + model(input_ids=ids + 1, labels=ids + 1).loss).backward()
    decision = budget_of(fast).decision
    assert decision is not None
    assert decision.kept == LAYERS
    for (name, p), q in zip(plain.named_parameters(), fast.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    ("value", "expected"),
    [(56, 56 * 2**30), (0.5, 2**29), ("56 GiB", 56 * 2**30), ("60GB", 60 * 10**9), ("12", 12 * 2**30), ("auto", None)],
)
def test_how_a_budget_is_written(value: Any, expected: int | None) -> None:
    assert parse_limit(value) == expected


@pytest.mark.parametrize("value", ["much", "-3 GiB", "5 TiB", 0, -1, float("nan"), float("inf"), "0 GiB"])
def test_a_wrong_budget_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.training\.activation_checkpointing\.budget.*allowed"):
        framework(value)


def test_true_is_no_budget() -> None:
    with pytest.raises(ConfigError, match=r"plugins\.training\.activation_checkpointing\.budget"):
        framework(True)


def test_training_arguments_without_checkpointing_are_refused() -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[])
    with pytest.raises(UnsupportedError, match=r"activation_checkpointing\.budget.*gradient_checkpointing to true"):
        framework("auto").apply(llama(), args)
