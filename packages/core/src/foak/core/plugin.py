"""The base class of a plugin, and the part of a configuration that a plugin receives."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from foak.core.errors import ConfigError
from foak.core.keys import Key

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

    from foak.core.patching import ModelPatcher

__all__ = ["AccelerationPlugin", "Key", "Section", "require_package"]


class Section(Mapping[str, Any]):
    """What a plugin receives: the union of the configuration sections that matched its paths.

    It holds every key that the plugin declares for a matched path, with the declared default where the file says
    nothing (or null), so `section["fast_loss"]` never fails for a declared key of a matched path.

    Args:
        values: key (without dots) to value.
        paths: the dotted paths (below `plugins:`) that matched, in the order in which the plugin declares them.
        written: for each key that the file really sets, the path under which it does.
        root: what stands before a path in messages: `plugins`, or `acceleration.plugins` in a run file.
        source: the file that the values come from, for messages; None for a mapping given in Python.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        paths: Sequence[str],
        *,
        written: Mapping[str, str] | None = None,
        root: str = "plugins",
        source: str | None = None,
    ) -> None:
        self._values = dict(values)
        self.paths: tuple[str, ...] = tuple(paths)
        self.written: Mapping[str, str] = dict.fromkeys(values, self.paths[0]) if written is None else dict(written)
        self.root = root
        self.source = source

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Section({self._values!r}, paths={self.paths!r})"

    def key(self, name: str) -> str:
        """The full dotted key of `name` for messages, such as `plugins.training.fused_ops_and_kernels.fast_loss`."""
        return f"{self.root}.{self.written.get(name, self.paths[0])}.{name}"


class AccelerationPlugin:
    """Base class of a plugin, found through the entry-point group `foak.plugins`.

    A subclass sets the class attributes and overrides the methods that it needs; every method here does nothing.
    One instance belongs to one framework. During `AccelerationFramework.apply` the framework sets `patcher` to the
    patcher of the model at hand, and calls `augment`, then (after the patcher has run, and only for a trainer)
    `prepare` and `callbacks`.

    Attributes:
        name: short name, used in messages and by `foak plugins`.
        all_of: dotted paths below `plugins:`; the plugin is active when all of them are present. Empty never activates.
        any_of: dotted paths below `plugins:`; the plugin is active when any of them is present.
        requires: importable names of the packages without which the plugin cannot work at all.
        order: plugins act in ascending order, those of equal order by name. Loaders use 0 to 99, plugins that add
            rules 100 and up.
        loads: whether the plugin loads the model itself (at most one active plugin may).
        keys: every key that the plugin reads inside its sections.
        patcher: the patcher of the model that is being accelerated; set by the framework for each `apply`.
    """

    name: ClassVar[str] = ""
    all_of: ClassVar[tuple[str, ...]] = ()
    any_of: ClassVar[tuple[str, ...]] = ()
    requires: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[int] = 100
    loads: ClassVar[bool] = False
    keys: ClassVar[tuple[Key, ...]] = ()

    patcher: ModelPatcher

    def __init__(self, section: Section) -> None:
        self.section = section

    @classmethod
    def from_config(cls, section: Section) -> Self:
        """Makes the plugin from the union of its matched sections, whose keys and values are already checked.

        Args:
            section: the values, the paths that matched (`section.paths`) and the full key of a name (`section.key`).

        Raises:
            ConfigError: values that are allowed one by one contradict each other.
            UnsupportedError: what the section asks for cannot work here.
        """
        return cls(section)

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """Loads a model in the plugin's way; only called when `loads` is true.

        Args:
            name_or_path: folder or hub id, as for `AutoModelForCausalLM.from_pretrained`.
            **kwargs: the other arguments of `from_pretrained`.
        """
        raise NotImplementedError(f"The plugin {self.name!r} sets `loads` but does not define `load_model`.")

    def augment(self, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None) -> None:
        """Adds the plugin's rules with `self.patcher.add(rule)`; changes nothing of the model by itself.

        Args:
            model: the model (a `PeftModel` where PEFT has been applied).
            train_args: the training arguments, to check against; None in a plain loop that gave none.
            peft_config: the PEFT configuration, to check against; None where there is none.
        """

    def prepare(self, trainer: Trainer) -> None:
        """Changes a trainer (collator, sampler, loss) through `self.patcher.set_attribute`, which can be undone."""

    def callbacks(self) -> Sequence[TrainerCallback]:
        """Callbacks to add to the trainer; `restore()` removes them again."""
        return ()

    @classmethod
    def diagnose(cls) -> Sequence[tuple[str, str]]:
        """What the plugin has to say to `foak doctor`: rows of (what, finding). Works without a configuration."""
        return ()


def require_package(package: str, wanted_by: str, install: str | None = None) -> None:
    """Checks that a package can be imported, without importing it.

    Args:
        package: importable name, such as `bitsandbytes`.
        wanted_by: who needs it, for the message: a dotted key or `the plugin 'name'`.
        install: what stands after `pip install`; the importable name with dashes if None.

    Raises:
        ConfigError: the package is missing; the message has the `pip install` line.
    """
    if not _importable(package):
        line = install or package.replace("_", "-")
        line = f"'{line}'" if "[" in line else line
        raise ConfigError(f"{wanted_by} needs the package {package}, which is not installed: pip install {line}")


def _importable(package: str) -> bool:
    if package in sys.modules:  # also one that was put there by hand, which find_spec cannot look up
        return sys.modules[package] is not None
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False
