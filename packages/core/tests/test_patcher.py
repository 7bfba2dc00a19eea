"""The patcher: per instance, composing or refusing by name, reversible without a trace."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from foak.core import UnsupportedError
from foak.core.patching import ModelPatcher, NotApplicable, Rule, Verdict


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Layer(nn.Module):
    """Calls a global function from behind two decorators, as transformers' attentions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    @decorate
    @decorate
    def forward(self, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
        return scale(x) * self.weight + bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


CALLS: list[str] = []


def fast_scale(x: torch.Tensor) -> torch.Tensor:
    CALLS.append("fast_scale")
    return x + x


def wrong_scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2.001


def fast_forward(self: Layer, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
    CALLS.append("fast_forward")
    return 2 * (x * self.weight) + bias


def no_weight_gradient(self: Layer, x: torch.Tensor, bias: float = 0.0) -> torch.Tensor:
    return 2 * (x * self.weight.detach()) + bias


def counting(inner: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    CALLS.append("counting")
    return inner(module, *args, **kwargs)


def is_layer(module: nn.Module) -> str | None:
    return "a layer" if isinstance(module, Layer) else None


def rows(module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(3, 4, requires_grad=True),), {}


def forward_rule(name: str = "fast", build: Callable[..., Any] = fast_forward, **kwargs: Any) -> Rule:
    return Rule(name, "forward", is_layer, rows, lambda module: build, **kwargs)


def function_rule(name: str = "fast_scale", build: Callable[..., Any] = fast_scale, **kwargs: Any) -> Rule:
    return Rule(name, "forward:scale", is_layer, rows, lambda module: build, **kwargs)


def wrapper_rule(name: str = "counting") -> Rule:
    return Rule(name, "forward", is_layer, rows, lambda module: counting, wraps=True)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def patched(model: nn.Module, *rules: Rule, **kwargs: Any) -> tuple[ModelPatcher, Any]:
    patcher = ModelPatcher()
    for rule in rules:
        patcher.add(rule)
    return patcher, patcher.apply(model, **kwargs)


def snapshot(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def same(before: dict[str, dict[str, Any]], model: nn.Module) -> bool:
    after = snapshot(model)
    return all(
        before[name].keys() == after[name].keys() and all(before[name][key] is after[name][key] for key in before[name])
        for name in before
    )


@pytest.mark.parametrize("rule", [forward_rule(), function_rule(), wrapper_rule()], ids=lambda rule: rule.name)
def test_a_rule_takes_effect_and_restore_leaves_no_trace(rule: Rule) -> None:
    model = Model()
    x = torch.randn(2, 4)
    expected, before, globals_before = model(x), snapshot(model), scale
    patcher, report = patched(model, rule)
    CALLS.clear()
    torch.testing.assert_close(model(x), expected)
    assert [record.outcome for record in report] == ["patched"] * 3
    assert len(CALLS) == 3
    patcher.restore()
    CALLS.clear()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert not CALLS
    assert same(before, model)
    assert scale is globals_before


def test_what_is_bound_keeps_the_signature_and_reaches_its_module_through_self() -> None:
    model = Model()
    patched(model, forward_rule(), wrapper_rule())
    bound = model.layers[1].forward
    assert isinstance(bound, types.MethodType)
    assert bound.__self__ is model.layers[1]
    assert inspect.signature(bound) == inspect.signature(Layer().forward)
    assert "<locals>" not in bound.__func__.__qualname__


def test_class_and_other_instances_are_untouched() -> None:
    model, other = Model(), Model()
    class_forward = Layer.forward
    patched(model, forward_rule(), wrapper_rule())
    CALLS.clear()
    other(torch.randn(2, 4))
    assert not CALLS
    assert Layer.forward is class_forward


def test_rules_on_different_targets_of_one_module_compose() -> None:
    model = Model()
    x = torch.randn(2, 4)
    expected = model(x)
    _, report = patched(model, function_rule(), wrapper_rule(), wrapper_rule("counting too"))
    CALLS.clear()
    torch.testing.assert_close(model(x), expected)
    assert CALLS == ["counting", "counting", "fast_scale"] * 3
    assert {record.outcome for record in report} == {"patched"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (forward_rule("one"), forward_rule("two")),
        (function_rule("one"), function_rule("two")),
        (forward_rule("one"), function_rule("two")),
        (function_rule("one"), forward_rule("two")),
    ],
)
def test_two_rules_for_the_same_thing_are_refused_with_both_names(first: Rule, second: Rule) -> None:
    model = Model()
    _, report = patched(model, first, second)
    kept = report.kept
    assert [record.rule for record in report.patched] == ["one"] * 3
    assert [record.rule for record in kept] == ["two"] * 3
    assert all("one" in record.reason and "two" in record.reason for record in kept)


def test_a_second_patcher_does_not_undo_the_first() -> None:
    model = Model()
    first, _ = patched(model, forward_rule("one"))
    second, report = patched(model, forward_rule("two"), wrapper_rule())
    assert all("one" in record.reason for record in report.kept)
    CALLS.clear()
    model(torch.randn(2, 4))
    assert CALLS == ["counting", "fast_forward"] * 3
    del first, second


@pytest.mark.parametrize("order", ["first then second", "second then first"])
def test_two_patchers_restore_in_either_order_without_a_trace(order: str) -> None:
    model = Model()
    before = snapshot(model)
    first, _ = patched(model, forward_rule("one"))
    second, _ = patched(model, wrapper_rule())
    CALLS.clear()
    if order == "first then second":
        first.restore()
        model(torch.randn(2, 4))
        assert CALLS == ["counting"] * 3
        second.restore()
    else:
        second.restore()
        model(torch.randn(2, 4))
        assert CALLS == ["fast_forward"] * 3
        first.restore()
    assert same(before, model)


def test_somebodys_wrapper_stays_and_ours_passes_through() -> None:
    model = Model()
    x = torch.randn(2, 4)
    expected = model(x)
    patcher, _ = patched(model, function_rule(), wrapper_rule())
    layer = model.layers[0]
    ours = layer.forward.__func__

    @functools.wraps(ours)
    def theirs(self: Layer, *args: Any, **kwargs: Any) -> Any:
        CALLS.append("theirs")
        return ours(self, *args, **kwargs)

    layer.forward = types.MethodType(theirs, layer)
    patcher.restore()
    CALLS.clear()
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    assert CALLS == ["theirs"]
    assert layer.__dict__["forward"].__func__ is theirs
    assert "forward" not in model.layers[1].__dict__


def test_patch_restore_patch() -> None:
    model = Model()
    patcher, _ = patched(model, forward_rule())
    patcher.restore()
    _, report = patched(model, forward_rule())
    assert len(report.patched) == 3


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (function_rule(build=wrong_scale), "output differs"),
        (forward_rule(build=no_weight_gradient), "gradient"),
        (forward_rule(build=lambda self, x, bias=0.0: (x * 2 * self.weight).half()), "float16"),
        (forward_rule(build=lambda self, x, bias=0.0: (x * 2 * self.weight)[:1]), r"\(1, 4\)"),
        (forward_rule(build=lambda self, x, bias=0.0: x.no_such_attribute), "AttributeError"),
        (forward_rule(build=lambda self, x, bias=0.0: x * 2 * self.weight * float("nan")), "differs"),
    ],
)
def test_a_wrong_replacement_is_kept_out_and_the_report_says_why(rule: Rule, what: str) -> None:
    model = Model()
    before = snapshot(model)
    _, report = patched(model, rule)
    assert not report.patched
    assert len(report.kept) == 3
    assert all(re.search(what, record.reason) for record in report.kept)
    assert same(before, model)


def test_verification_disturbs_nothing() -> None:
    model = Model()
    model.register_buffer("counter", torch.zeros(1))
    fired: list[str] = []
    model.layers[0].register_forward_hook(lambda *args: fired.append("hook"))
    model.layers[0].weight.grad = torch.ones(4)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    patched(model, forward_rule(), function_rule("other"))
    assert torch.equal(torch.get_rng_state(), state)
    assert not fired
    assert torch.equal(model.layers[0].weight.grad, torch.ones(4))
    assert model.layers[1].weight.grad is None
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_one_structure_is_verified_once() -> None:
    seen: list[nn.Module] = []

    def sample(module: nn.Module) -> Any:
        seen.append(module)
        return rows(module)

    patched(Model(), Rule("fast", "forward", is_layer, sample, lambda module: fast_forward))
    assert len({id(module) for module in seen}) == 1  # one stand-in, tried in training and in evaluation


def test_frozen_and_meta_modules_are_verified_on_stand_ins() -> None:
    with torch.device("meta"):
        model = Model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    _, report = patched(model, forward_rule())
    assert len(report.patched) == 3
    assert all(parameter.is_meta for parameter in model.parameters())
    _, report = patched(Model().to("meta"), forward_rule(build=no_weight_gradient))
    assert len(report.kept) == 3


def test_copies_and_pickles() -> None:
    model = Model()
    x = torch.randn(2, 4)
    patched(model, function_rule(), wrapper_rule())
    twin = copy.deepcopy(model)
    assert all(layer.forward.__self__ is layer for layer in twin.layers)
    CALLS.clear()
    torch.testing.assert_close(twin(x), model(x))
    assert CALLS.count("fast_scale") == 6
    with torch.no_grad():
        twin.layers[0].weight.zero_()
    assert twin(x).abs().sum() == 0
    assert model(x).abs().sum() > 0
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(x), model(x))
    assert model.state_dict().keys() == Model().state_dict().keys()


def test_a_deep_copy_survives_the_restore_of_its_original() -> None:
    model = Model()
    patcher, _ = patched(model, forward_rule())
    twin = copy.deepcopy(model)
    patcher.restore()
    CALLS.clear()
    twin(torch.randn(2, 4))
    assert CALLS == ["fast_forward"] * 3


def test_not_applicable_is_a_reason_in_the_report() -> None:
    def refuse(module: nn.Module) -> Any:
        raise NotApplicable("it is Tuesday")

    model = Model()
    _, report = patched(model, Rule("tuesday", "forward", is_layer, rows, refuse))
    assert {record.reason for record in report} == {"it is Tuesday"}
    assert {record.outcome for record in report} == {"kept"}


def test_strict_names_the_key_that_nothing_serves_and_patches_nothing() -> None:
    model = Model()
    before = snapshot(model)
    nowhere = Rule("other", "forward", lambda module: None, rows, lambda module: fast_forward, key="a.b.other")
    with pytest.raises(UnsupportedError, match=r"Model .*a\.b\.other"):
        patched(model, forward_rule(key="a.b.fast"), nowhere)
    assert same(before, model)
    _, report = patched(model, forward_rule(key="a.b.fast"), nowhere, strict=False)
    assert len(report.patched) == 3


def test_instance_forwards_of_others_are_left_alone() -> None:
    model = Model()
    layer = model.layers[0]
    layer.forward = types.MethodType(lambda self, x: x, layer)
    _, report = patched(model, forward_rule())
    assert [record.outcome for record in report] == ["kept", "patched", "patched"]
    assert "somebody else" in report.kept[0].reason


def test_attributes_are_set_and_put_back() -> None:
    model = Model()
    model.__dict__["there"] = 1
    before = snapshot(model)
    patcher = ModelPatcher()
    patcher.set_attribute(model, "there", 2)
    patcher.set_attribute(model, "new", 3)
    patcher.set_attribute(model, "new", 4)
    assert (model.there, model.new) == (2, 4)
    patcher.restore()
    assert same(before, model)


def test_a_rule_on_an_attribute() -> None:
    model = Model()
    before = snapshot(model)
    rule = Rule(
        "attribute",
        "attribute:chosen",
        lambda module: "the model" if isinstance(module, Model) else None,
        rows,
        lambda module: fast_scale,
        verify=lambda module: Verdict(True, "tried"),
    )
    patcher, report = patched(model, rule)
    assert model.chosen is fast_scale
    assert [record.module for record in report] == [""]
    patcher.restore()
    assert same(before, model)


@pytest.mark.parametrize("target", ["backward", "forward:", "forward:not a name", "attribute", "attribute:", ""])
def test_a_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="target"):
        Rule("bad", target, is_layer, rows, lambda module: fast_forward)


def test_rules_have_unique_names() -> None:
    patcher = ModelPatcher()
    patcher.add(forward_rule())
    with pytest.raises(ValueError, match="fast"):
        patcher.add(forward_rule())


def pure_scale(x: torch.Tensor) -> torch.Tensor:
    return x + x


@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_models_run_the_replacement_without_a_graph_break(wrapped: bool) -> None:
    model = Model()
    rules = [
        function_rule(build=pure_scale),
        *([Rule("thin", "forward", is_layer, rows, thin, wraps=True)] if wrapped else []),
    ]
    _, report = patched(model, *rules)
    assert len(report.kept) == 0
    x = torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def thin(module: nn.Module) -> Callable[..., Any]:
    return _thin


def _thin(inner: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    return inner(module, *args, **kwargs)


def test_partitioned_parameters_are_left_alone() -> None:
    model = Model()
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    _, report = patched(model, forward_rule())
    assert not report.patched
    assert all("partitioned" in record.reason for record in report.kept)
