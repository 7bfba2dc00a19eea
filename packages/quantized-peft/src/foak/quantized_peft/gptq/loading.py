"""The section `peft.quantization.auto_gptq`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from foak.core.errors import UnsupportedError
from foak.core.plugin import Key, Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

__all__ = ["KEYS", "PATH", "augment", "check", "diagnose", "load_model"]

PATH = "peft.quantization.auto_gptq"

KEYS = (
    Key("kernel", (str,), "not in this release", under=(PATH,)),
    Key("from_quantized", (True, False), "not in this release", under=(PATH,)),
    Key("use_external_lib", (True, False), "not in this release", under=(PATH,)),
)


def check(section: Section) -> None:
    """Refuses the section.

    Raises:
        UnsupportedError: always.
    """
    where = f"{section.source or 'configuration'}: {section.root}"
    raise UnsupportedError(
        f"{where}.{PATH} cannot be served: foak-quantized-peft 0.1 loads bitsandbytes weights only; use "
        f"{section.root}.peft.quantization.bitsandbytes with the unquantized model"
    )


def load_model(section: Section, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
    """Never reached: `check` refuses the section."""
    raise NotImplementedError


def augment(
    section: Section, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None
) -> None:
    """Never reached: `check` refuses the section."""


def diagnose() -> Sequence[tuple[str, str]]:
    """What `foak doctor` shows."""
    return (("GPTQ base", "not in this release"),)
