"""The framework: what `apply` does in which order, that it is idempotent, and that any error leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from foak.core import AccelerationFramework, AccelerationPlugin, ConfigError, Key, Rule, UnsupportedError

MakeModel = Callable[[], LlamaForCausalLM]

NORM = {"plugins": {"training": {"norm": {"fast": True}}}}


def plain_norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm by hand: x * rsqrt(mean(x^2) + eps) * weight, in float32 inside."""
    x = hidden_states.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    return module.weight * x.to(hidden_states.dtype)


def norm_rule(key: str | None = None, name: str = "norm", kind: str = "LlamaRMSNorm") -> Rule:
    return Rule(
        name=name,
        target="forward",
        match=lambda module: "an RMSNorm" if type(module).__name__ == kind else None,
        sample=lambda module: ((torch.randn(3, 16, dtype=module.weight.dtype, requires_grad=True),), {}),
        build=lambda module: plain_norm,
        key=key,
    )


class Callback(TrainerCallback):
    pass


class NormPlugin(AccelerationPlugin):
    name = "norm"
    any_of = ("training.norm",)
    keys = (
        Key("fast", (True, False, "auto")),
        Key("kind", (str,), default="LlamaRMSNorm"),
        Key("fail_in", ("augment", "prepare", "callbacks")),
    )

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.calls: list[Any] = []

    def augment(self, model: Any, train_args: Any, peft_config: Any) -> None:
        self.calls.append(("augment", model, train_args, peft_config))
        if self.section["fast"]:
            key = self.section.key("fast") if self.section["fast"] is True else None
            self.patcher.add(norm_rule(key, kind=self.section["kind"]))
        self.patcher.set_attribute(model, "mark", 1)
        self._maybe_fail("augment")

    def prepare(self, trainer: Any) -> None:
        self.calls.append(("prepare", trainer))
        self.patcher.set_attribute(trainer, "data_collator", list)
        self._maybe_fail("prepare")

    def callbacks(self) -> Sequence[TrainerCallback]:
        self._maybe_fail("callbacks")
        return (Callback(),)

    def _maybe_fail(self, where: str) -> None:
        if self.section["fail_in"] == where:
            raise RuntimeError(f"failed in {where}")


class LatePlugin(AccelerationPlugin):
    name = "late"
    any_of = ("training.late",)
    order = 900
    keys = (Key("fail_in", ("prepare",)),)

    def prepare(self, trainer: Any) -> None:
        if self.section["fail_in"]:
            raise RuntimeError("failed late")


class Loader(AccelerationPlugin):
    name = "loader"
    any_of = ("training.loader",)
    loads = True

    def load_model(self, name_or_path: str, **kwargs: Any) -> Any:
        return name_or_path, kwargs


def make(**section: Any) -> AccelerationFramework:
    tree = {"plugins": {"training": {"norm": {"fast": True, **section}}}}
    return AccelerationFramework(tree, plugins=[NormPlugin, LatePlugin, Loader])


def make_trainer(model: nn.Module, folder: Path) -> Trainer:
    return Trainer(model=model, args=TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[]))


def snapshot(*objects: Any) -> list[dict[str, Any]]:
    """The attributes of objects and of all modules in them, but for the contents of nested containers."""
    found: list[dict[str, Any]] = []
    for thing in objects:
        for owner in thing.modules() if isinstance(thing, nn.Module) else [thing]:
            found.append(dict(owner.__dict__))
    return found


def same(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> bool:
    return len(first) == len(second) and all(
        a.keys() == b.keys() and all(a[key] is b[key] or a[key] == b[key] for key in a if not key.startswith("_"))
        for a, b in zip(first, second, strict=True)
    )


# -- applying ---------------------------------------------------------------------------------------------------------


def test_apply_patches_a_bare_model_and_reports_it(tiny_llama: MakeModel) -> None:
    model, plain = tiny_llama(), tiny_llama()
    report = make().apply(model)
    assert [record.outcome for record in report.records] == ["patched"] * 5
    ids = torch.arange(12).reshape(2, 6)
    assert model.model.norm.forward.__func__ is not type(model.model.norm).forward
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_apply_twice_returns_the_same_report_and_changes_nothing(tiny_llama: MakeModel) -> None:
    framework, model = make(), tiny_llama()
    report = framework.apply(model)
    before = snapshot(model)
    assert framework.apply(model) is report
    assert same(before, snapshot(model))
    (plugin,) = framework.active_plugins
    assert isinstance(plugin, NormPlugin)
    assert len(plugin.calls) == 1


def test_apply_on_a_trainer_prepares_it_once(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = make_trainer(model, tmp_path)
    framework = make()
    report = framework.apply(trainer)
    assert framework.apply(trainer) is report
    assert framework.apply(model) is report
    (plugin,) = framework.active_plugins
    assert isinstance(plugin, NormPlugin)
    assert [call[0] for call in plugin.calls] == ["augment", "prepare"]
    assert plugin.calls[0][1:] == (model, trainer.args, None)
    assert trainer.data_collator is list
    assert sum(isinstance(callback, Callback) for callback in trainer.callback_handler.callbacks) == 1


def test_apply_again_after_the_trainer_has_wrapped_the_model(tiny_llama: MakeModel, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_llama(), tmp_path)
    framework = make()
    report = framework.apply(trainer)
    trainer.model_wrapped = nn.DataParallel(trainer.model)  # as DDP does while it trains
    assert framework.apply(trainer) is report


def test_a_trainer_around_an_accelerated_model_is_prepared(tiny_llama: MakeModel, tmp_path: Path) -> None:
    framework, model = make(), tiny_llama()
    report = framework.apply(model)
    trainer = make_trainer(model, tmp_path)
    assert framework.apply(trainer) is report
    assert trainer.data_collator is list


def test_the_adapters_configuration_reaches_the_plugins(tiny_llama: MakeModel) -> None:
    from peft import LoraConfig, get_peft_model

    first, second = LoraConfig(target_modules=["q_proj"]), LoraConfig(target_modules=["v_proj"])
    model = get_peft_model(tiny_llama(), first)
    model.add_adapter("other", second)
    model.set_adapter("other")
    framework = make()
    framework.apply(model)
    (plugin,) = framework.active_plugins
    assert isinstance(plugin, NormPlugin)
    assert plugin.calls[0][3] is model.peft_config["other"]
    given = make()
    given.apply(tiny_llama(), peft_config=first)
    assert given.active_plugins[0].calls[0][3] is first  # type: ignore[attr-defined]


def test_given_arguments_are_checked_and_not_changed(tiny_llama: MakeModel, tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    before = dict(arguments.__dict__)
    make().apply(tiny_llama(), arguments)
    assert dict(arguments.__dict__) == before
    arguments.use_liger_kernel = True
    with pytest.raises(UnsupportedError, match="use_liger_kernel"):
        make().apply(tiny_llama(), arguments)


def test_nothing_active_patches_nothing(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    before = snapshot(model)
    framework = AccelerationFramework({"plugins": {}}, plugins=[NormPlugin])
    assert framework.active_plugins == ()
    assert framework.apply(model).records == []
    assert same(before, snapshot(model))


# -- restoring --------------------------------------------------------------------------------------------------------


def test_restore_leaves_no_trace(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = make_trainer(model, tmp_path)
    before, callbacks = snapshot(model, trainer), list(trainer.callback_handler.callbacks)
    framework = make()
    framework.apply(trainer)
    assert not same(before, snapshot(model, trainer))
    framework.restore()
    assert same(before, snapshot(model, trainer))
    assert trainer.callback_handler.callbacks == callbacks
    framework.restore()  # nothing left to do
    assert len(framework.apply(model).patched) == 5


@pytest.mark.parametrize("where", ["augment", "prepare", "callbacks", "late"])
def test_an_error_on_the_way_restores_everything(tiny_llama: MakeModel, tmp_path: Path, where: str) -> None:
    model = tiny_llama()
    trainer = make_trainer(model, tmp_path)
    before, callbacks = snapshot(model, trainer), list(trainer.callback_handler.callbacks)
    tree: dict[str, Any] = {"norm": {"fast": True, "fail_in": where}}
    if where == "late":
        tree = {"norm": {"fast": True}, "late": {"fail_in": "prepare"}}
    framework = AccelerationFramework({"plugins": {"training": tree}}, plugins=[NormPlugin, LatePlugin])
    for _ in range(2):  # the second time meets the same state as the first
        with pytest.raises(RuntimeError, match="failed"):
            framework.apply(trainer)
        assert same(before, snapshot(model, trainer))
        assert trainer.callback_handler.callbacks == callbacks
        assert not hasattr(framework.active_plugins[0], "patcher")


def test_a_kernel_asked_for_by_name_that_fits_nothing_is_an_error(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    before = snapshot(model)
    framework = make(kind="NoSuchNorm")
    with pytest.raises(UnsupportedError, match=r"plugins\.training\.norm\.fast"):
        framework.apply(model)
    assert same(before, snapshot(model))
    assert framework.apply(model, strict=False).records == []
    assert make(kind="NoSuchNorm", fast="auto").apply(tiny_llama()).records == []


def test_a_refused_model_is_left_alone(tiny_llama: MakeModel) -> None:
    compiled = tiny_llama()
    compiled.compile()
    before = snapshot(compiled)
    with pytest.raises(UnsupportedError, match="compiled"):
        make().apply(compiled)
    assert same(before, snapshot(compiled))


# -- independence -----------------------------------------------------------------------------------------------------


def test_two_models_of_one_class_are_independent(tiny_llama: MakeModel) -> None:
    framework, first, second = make(), tiny_llama(), tiny_llama()
    untouched = snapshot(second)
    framework.apply(first)
    assert same(untouched, snapshot(second))
    report = framework.apply(second)
    assert len(report.patched) == 5
    framework.restore()
    assert same(untouched, snapshot(second))


def test_two_frameworks_that_share_a_mapping_are_independent(tiny_llama: MakeModel) -> None:
    shared: dict[str, Any] = {"plugins": {"training": {"norm": {"fast": True}}}}
    one = AccelerationFramework(shared, plugins=[NormPlugin])
    shared["plugins"]["training"]["norm"]["fast"] = False
    other = AccelerationFramework(shared, plugins=[NormPlugin])
    first, second = tiny_llama(), tiny_llama()
    assert len(one.apply(first).patched) == 5
    assert len(other.apply(second).patched) == 0
    one.config["plugins"]["training"].clear()
    assert one.config == NORM
    other.restore()
    assert first.model.norm.forward.__func__ is not type(first.model.norm).forward


def test_a_second_framework_does_not_undo_the_first(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    before = snapshot(model)
    first, second = make(), make()
    first.apply(model)
    report = second.apply(model)
    assert [record.outcome for record in report.records] == ["kept"] * 5
    second.restore()
    assert model.model.norm.forward.__func__ is not type(model.model.norm).forward
    first.restore()
    assert same(before, snapshot(model))


# -- loading ----------------------------------------------------------------------------------------------------------


def test_load_model_is_that_of_the_plugin_that_loads() -> None:
    framework = AccelerationFramework({"plugins": {"training": {"loader": {}}}}, plugins=[Loader, NormPlugin])
    assert framework.load_model(Path("folder"), dtype=torch.bfloat16) == ("folder", {"dtype": torch.bfloat16})


def test_load_model_is_that_of_transformers_otherwise(tiny_llama: MakeModel, tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    model = make().load_model(tmp_path, dtype=torch.bfloat16)
    assert type(model) is LlamaForCausalLM
    assert model.dtype == torch.bfloat16


def test_wrong_plugin_classes_are_refused() -> None:
    class Nameless(AccelerationPlugin):
        any_of = ("a.b",)

    with pytest.raises(ConfigError, match="has no name"):
        AccelerationFramework({"plugins": {}}, plugins=[Nameless])
