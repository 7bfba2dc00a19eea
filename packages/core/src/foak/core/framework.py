"""The framework: a configuration, the plugins that it activates, and what they did to which model."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foak.core.activation import activate
from foak.core.config import Config, read_config
from foak.core.discovery import check_declarations, installed_plugins
from foak.core.guards import check_model, check_precision, check_train_args, check_trainer, is_trainer
from foak.core.patching import ModelPatcher
from foak.core.plugin import AccelerationPlugin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    from foak.core.report import PatchReport

__all__ = ["AccelerationFramework"]


@dataclass(eq=False)
class _Applied:
    """What one framework did to one model, and to the trainers around it."""

    model: PreTrainedModel
    patcher: ModelPatcher
    report: PatchReport
    trainers: list[Trainer] = field(default_factory=list)
    callbacks: list[tuple[Trainer, TrainerCallback]] = field(default_factory=list)

    def restore(self) -> None:
        for trainer, callback in reversed(self.callbacks):
            trainer.remove_callback(callback)
        self.callbacks.clear()
        self.trainers.clear()
        self.patcher.restore()


class AccelerationFramework:
    """Accelerates models as a configuration says; holds no state outside itself.

    Args:
        config: path of a YAML file, or a mapping as such a file would give (it is copied), or None for the file named
            by `$FOAK_CONFIG` (or by `$ACCELERATION_FRAMEWORK_CONFIG_FILE`). See `foak.core.config.read_config`.
        plugins: the plugin classes to choose from; those of the installed packages if None.

    Raises:
        ConfigError: the configuration cannot be read, or a key or value in it is wrong.
        UnsupportedError: what it asks for cannot work together.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        *,
        plugins: Sequence[type[AccelerationPlugin]] | None = None,
    ) -> None:
        self._config = read_config(config)
        if plugins is None:
            plugins = [installed.plugin for installed in installed_plugins()]
        for plugin in plugins:
            check_declarations(plugin)
        self._plugins = tuple(activate(self._config, plugins))
        self._applied: list[_Applied] = []

    @property
    def config(self) -> dict[str, Any]:
        """A copy of the configuration: a mapping with the key `plugins`."""
        return {"plugins": copy.deepcopy(self._config.plugins)}

    @property
    def active_plugins(self) -> tuple[AccelerationPlugin, ...]:
        """The plugins that the configuration activates, in the order in which they act."""
        return self._plugins

    def load_model(self, name_or_path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
        """Loads a causal language model, in the way of the active plugin that loads, if there is one.

        Args:
            name_or_path: folder or hub id.
            **kwargs: further arguments of `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

        Returns:
            The model. It is not accelerated yet: that is what `apply` does.
        """
        for plugin in self._plugins:
            if plugin.loads:
                return plugin.load_model(os.fspath(name_or_path), **kwargs)
        from transformers import AutoModelForCausalLM

        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(os.fspath(name_or_path), **kwargs)
        return model

    def apply(
        self,
        target: Trainer | PreTrainedModel,
        train_args: TrainingArguments | None = None,
        peft_config: Any | None = None,
        *,
        strict: bool = True,
    ) -> PatchReport:
        """Accelerates a trainer's model, or a bare model for a plain loop, in place.

        The model is never wrapped. A model that this framework has already accelerated stays as it is (a trainer
        around it is still prepared), and its report is returned again.

        Args:
            target: a `transformers.Trainer` (`SFTTrainer` too), a `PreTrainedModel` or a `PeftModel`.
            train_args: the training arguments, only checked against; the trainer's own if None.
            peft_config: the PEFT configuration, only checked against; the `PeftModel`'s own if None.
            strict: whether a kernel that the configuration asks for by name, and that nothing in the model can take,
                is an error.

        Returns:
            The report: every module that a rule looked at, patched or kept, with the reason.

        Raises:
            UnsupportedError: the model cannot be accelerated safely, or a kernel asked for by name fits nothing. After
                this and any other error the model and the trainer are as they were.
        """
        trainer = target if is_trainer(target) else None
        model = trainer.model if trainer is not None else target
        known = next((applied for applied in self._applied if applied.model is model), None)
        if known is not None and (trainer is None or any(prepared is trainer for prepared in known.trainers)):
            return known.report  # before the checks: since then the trainer may have wrapped the model, as it should
        if trainer is not None:
            check_trainer(trainer)
            train_args = train_args if train_args is not None else trainer.args
        if train_args is not None:
            check_train_args(train_args)
        if known is None:
            checked = check_model(model)
            if train_args is not None:
                check_precision(checked, train_args, trainer)
            known = self._apply_to_model(checked, train_args, _peft_config(checked, peft_config), strict)
        if trainer is not None:
            self._prepare_trainer(known, trainer)
        return known.report

    def restore(self) -> None:
        """Puts every model and trainer back as it was before `apply`, the latest first."""
        while self._applied:
            self._applied.pop().restore()

    def _apply_to_model(
        self,
        model: PreTrainedModel,
        train_args: TrainingArguments | None,
        peft_config: Any | None,
        strict: bool,
    ) -> _Applied:
        patcher = ModelPatcher()
        try:
            with _Lent(self._plugins, patcher):
                for plugin in self._plugins:
                    plugin.augment(model, train_args, peft_config)
                report = patcher.apply(model, strict=strict)
        except BaseException:
            patcher.restore()
            raise
        applied = _Applied(model, patcher, report)
        self._applied.append(applied)
        return applied

    def _prepare_trainer(self, applied: _Applied, trainer: Trainer) -> None:
        """Prepares a trainer; any error undoes everything that was done to its model and to its trainers."""
        try:
            applied.trainers.append(trainer)
            with _Lent(self._plugins, applied.patcher):
                for plugin in self._plugins:
                    plugin.prepare(trainer)
                    for callback in plugin.callbacks():
                        trainer.add_callback(callback)
                        applied.callbacks.append((trainer, callback))
        except BaseException:
            self._applied.remove(applied)
            applied.restore()
            raise


class _Lent:
    """Lends a patcher to plugins for one block; outside it a plugin has none, so that models are never mixed up."""

    def __init__(self, plugins: Sequence[AccelerationPlugin], patcher: ModelPatcher) -> None:
        self._plugins, self._patcher = plugins, patcher

    def __enter__(self) -> None:
        for plugin in self._plugins:
            plugin.patcher = self._patcher

    def __exit__(self, *_: object) -> None:
        for plugin in self._plugins:
            del plugin.patcher


def _peft_config(model: Any, given: Any | None) -> Any | None:
    """The PEFT configuration to hand to plugins: the given one, or that of the model's active adapter."""
    configs = getattr(model, "peft_config", None)
    if given is not None or not isinstance(configs, dict) or not configs:
        return given
    active = getattr(model, "active_adapter", None)
    return configs.get(active if isinstance(active, str) else None, next(iter(configs.values())))
