"""The plugin for `peft.quantization.bitsandbytes` and `peft.quantization.auto_gptq`.

Each section is the work of one sub-package: its `loading` module has the path and keys (`PATH`, `KEYS`), the check
before anything is loaded (`check`), the loader (`load_model`), what `apply` looks at (`augment`) and what `foak doctor`
shows (`diagnose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from foak.core.errors import ConfigError
from foak.core.plugin import AccelerationPlugin, Section
from foak.kernels.decode_once import ATTRIBUTE
from foak.quantized_peft.bitsandbytes import loading as bitsandbytes
from foak.quantized_peft.gptq import loading as gptq
from foak.quantized_peft.keepers import keepers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

__all__ = ["QuantizedPeftPlugin"]

_SECTIONS: dict[str, ModuleType] = {bitsandbytes.PATH: bitsandbytes, gptq.PATH: gptq}


class QuantizedPeftPlugin(AccelerationPlugin):
    """Loads a model with quantized weights, as the frozen base of a LoRA."""

    name = "quantized-peft"
    any_of = tuple(_SECTIONS)
    requires = ("peft",)
    order = 10
    loads = True
    keys = (*bitsandbytes.KEYS, *gptq.KEYS)

    @classmethod
    def from_config(cls, section: Section) -> Self:
        """Checks what can be checked before a model is loaded.

        Raises:
            ConfigError: both sections are present, or a package that the section needs is not installed.
            UnsupportedError: the section asks for what cannot work here.
        """
        if len(section.paths) > 1:
            both = " and ".join(f"{section.root}.{path}" for path in section.paths)
            raise ConfigError(
                f"{section.source or 'configuration'}: {both} exclude each other, because a model is quantized in one "
                "way: keep one of them"
            )
        _kind(section).check(section)
        return cls(section)

    def load_model(self, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
        """Loads a causal language model in the way of the section; see `load_model` of its `loading` module."""
        model: PreTrainedModel = _kind(self.section).load_model(self.section, name_or_path, **kwargs)
        return model

    def augment(self, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None) -> None:
        """Checks the model against the section; see `augment` of its `loading` module."""
        _kind(self.section).augment(self.section, model, train_args, peft_config)
        for layer, keeper in keepers(model, self.section["decode_once"]):
            self.patcher.set_attribute(layer, ATTRIBUTE, keeper)

    @classmethod
    def diagnose(cls) -> Sequence[tuple[str, str]]:
        """Which quantized bases can be loaded here."""
        return tuple(row for kind in _SECTIONS.values() for row in kind.diagnose())


def _kind(section: Section) -> ModuleType:
    return _SECTIONS[section.paths[0]]
