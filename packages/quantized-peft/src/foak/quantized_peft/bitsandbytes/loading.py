"""The section `peft.quantization.bitsandbytes`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from foak.core.errors import UnsupportedError
from foak.core.plugin import Key, Section, require_package

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

__all__ = ["KEYS", "PATH", "augment", "check", "diagnose", "load_model"]

PATH = "peft.quantization.bitsandbytes"

_DTYPES = ("float32", "bfloat16", "float16")

KEYS = (
    Key("quant_type", ("nf4", "fp4"), "the 4-bit code", default="nf4", under=(PATH,)),
    Key(
        "no_peft_model",
        (True, False),
        "false: apply refuses a 4-bit model without an adapter; true: it takes one",
        default=False,
        under=(PATH,),
    ),
    Key("double_quant", (True, False), "quantize the scales as well", default=True, under=(PATH,)),
    Key(
        "compute_dtype",
        ("auto", *_DTYPES),
        "dtype that products run in; auto: the dtype the model is loaded with",
        default="auto",
        under=(PATH,),
    ),
    Key(
        "storage_dtype",
        ("uint8", *_DTYPES),
        "dtype that the packed weights are stored as; FSDP needs that of the other weights",
        default="uint8",
        under=(PATH,),
    ),
)


def check(section: Section) -> None:
    """Checks what can be checked before a model is loaded.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    require_package("bitsandbytes", f"{section.root}.{PATH}", "foak-quantized-peft[bitsandbytes]")


def load_model(section: Section, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
    """Loads a causal language model with its linear layers in 4 bits (the head and embeddings stay as they are).

    Args:
        section: the keys of the section.
        name_or_path: folder or hub id of an unquantized model, or of one that bitsandbytes has already quantized
            in the same way.
        **kwargs: further arguments of `from_pretrained`. `dtype` is that of the weights that stay, and of the
            products where `compute_dtype` is auto (the checkpoint's own if no `dtype` is given).

    Raises:
        UnsupportedError: the checkpoint is quantized in another way, or a second quantization is asked for.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    path = f"{section.root}.{PATH}"
    for name in ("gguf_file", "quantization_config", "load_in_4bit", "load_in_8bit"):
        if kwargs.get(name):
            raise UnsupportedError(f"{path} cannot be combined with the argument {name} of load_model; remove one")
    source = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in kwargs}
    config = AutoConfig.from_pretrained(name_or_path, **source)
    compute = section["compute_dtype"]
    if compute == "auto":
        compute = kwargs.get("dtype", "auto")
    if compute == "auto":
        compute = config.dtype or torch.bfloat16
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        kwargs["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type=section["quant_type"],
            bnb_4bit_use_double_quant=section["double_quant"],
            bnb_4bit_compute_dtype=compute,
            bnb_4bit_quant_storage=getattr(torch, section["storage_dtype"]),
        )
    else:
        # transformers prefers the checkpoint's own settings to given ones, so all of them must agree, but for the
        # compute dtype, which is no property of the stored weights.
        stored = dict(stored) if isinstance(stored, dict) else stored.to_dict()
        _check_checkpoint(section, name_or_path, stored)
        stored["bnb_4bit_compute_dtype"] = str(compute).removeprefix("torch.")
        config.quantization_config = stored
        kwargs["config"] = config
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
    return model


def augment(
    section: Section, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None
) -> None:
    """Refuses a 4-bit model that has no adapter, unless `no_peft_model` says that this is meant.

    Raises:
        UnsupportedError: nothing in the model could be trained.
    """
    if section["no_peft_model"] or peft_config is not None or not getattr(model, "is_loaded_in_4bit", False):
        return
    raise UnsupportedError(
        f"The model's weights are in 4 bits and it has no adapter, so nothing could train: add a LoRA with PEFT "
        f"before apply, give its peft_config, or set {section.key('no_peft_model')} to true"
    )


def diagnose() -> Sequence[tuple[str, str]]:
    """Whether 4-bit bases can be loaded here."""
    try:
        found = f"bitsandbytes {metadata.version('bitsandbytes')}: nf4 and fp4 can be loaded"
    except metadata.PackageNotFoundError:
        found = "bitsandbytes is not installed: pip install 'foak-quantized-peft[bitsandbytes]'"
    return (("4-bit base", found),)


def _check_checkpoint(section: Section, name: str, stored: dict[str, Any]) -> None:
    """Refuses a checkpoint whose own quantization is not the one asked for."""
    if stored.get("quant_method") != "bitsandbytes" or not stored.get("load_in_4bit"):
        kind = "8-bit bitsandbytes" if stored.get("load_in_8bit") else stored.get("quant_method")
        raise UnsupportedError(
            f"{name} is already quantized ({kind}), and {section.root}.{PATH} takes an unquantized "
            "model or one in 4-bit bitsandbytes"
        )
    for key, field in (
        ("quant_type", "bnb_4bit_quant_type"),
        ("double_quant", "bnb_4bit_use_double_quant"),
        ("storage_dtype", "bnb_4bit_quant_storage"),
    ):
        if stored.get(field) != section[key]:
            raise UnsupportedError(
                f"{name} is stored with {key} {stored.get(field)}, but {section.key(key)} is "
                f"{section[key]}; set the key to the checkpoint's value"
            )
