"""The activation budget on whole models: the same numbers as plain checkpointing, within the budget, and undone."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairs import assert_untouched, snapshot
from storages import LivingStorages
from transformers import LlamaConfig, LlamaForCausalLM

from foak.core import AccelerationFramework, ConfigError, UnsupportedError
from foak.fast_kernels.checkpointing import budget as budgets
from foak.fast_kernels.checkpointing.limit import parse_limit

LAYERS = 6
MIB = 2**20


def llama(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def framework(budget: Any) -> AccelerationFramework:
    return AccelerationFramework({"plugins": {"training": {"activation_checkpointing": {"budget": budget}}}})


def budget_of(model: Any) -> budgets.ActivationBudget:
    found = [vars(m)[budgets.ATTRIBUTE] for m in model.modules() if budgets.ATTRIBUTE in vars(m)]
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


class Run:
    """Steps of a model under a meter: losses, gradients, the peak of each step, layers kept."""

    def __init__(self, model: Any, meter: LivingStorages, accumulate: int = 1) -> None:
        self.model, self.meter, self.accumulate = model, meter, accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        self.losses: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []
        self.peaks: list[int] = []
        self.kept: list[int] = []

    def steps(self, shapes: list[tuple[int, int]]) -> Run:
        generator = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        for index, shape in enumerate(shapes):
            ids = torch.randint(0, 128, shape, generator=generator)
            self.meter.peak = self.meter.allocated  # as a user who looks at each step by itself would
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.losses.append(loss.item())
            del loss
            decision = budget_of(self.model).decision if budgets.ATTRIBUTE in vars(self.model.model) else None
            self.kept.append(decision.kept if decision else 0)
            if (index + 1) % self.accumulate == 0:
                self.optimizer.step()
                self.peaks.append(self.meter.peak)
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                self.gradients.append([g.numpy().copy() for g in grads])  # outside what the meter counts
                self.optimizer.zero_grad()
        return self


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[LivingStorages]:
    """A meter of all that is allocated from here on, which the budget reads too."""
    with LivingStorages() as found:
        monkeypatch.setattr(budgets, "meter_for", lambda device: found)
        yield found


def assert_same_run(plain: Run, fast: Run) -> None:
    assert plain.losses == fast.losses
    for expected, actual in zip(plain.gradients, fast.gradients, strict=True):
        assert len(expected) == len(actual) > 0
        assert all((a == b).all() for a, b in zip(expected, actual, strict=True))


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
    assert report.notes == [f"activation budget (1.00 GiB): each forward decides how many of {LAYERS} layers keep "
                            "their activations"]  # fmt: skip
    Run(model, meter).steps(FIXED)
    assert report.notes == [f"activation budget (1.00 GiB): {LAYERS} of {LAYERS} layers keep their activations"]


def test_where_memory_cannot_be_read_every_layer_stays_checkpointed() -> None:
    model = checkpointed(llama())
    report = framework("1 GiB").apply(model)
    with LivingStorages() as meter:
        run = Run(model, meter).steps(FIXED)
    assert run.kept == [0, 0, 0, 0]
    assert any("cannot be read on cpu" in note for note in report.notes)


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
