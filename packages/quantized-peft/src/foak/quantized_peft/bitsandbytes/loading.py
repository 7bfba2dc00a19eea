"""The section `peft.quantization.bitsandbytes`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foak.core.errors import UnsupportedError
from foak.core.plugin import Key, Section, require_package
from foak.quantized_peft.bitsandbytes.checkpoint import Names, check_stored
from foak.quantized_peft.bitsandbytes.layers import LINEAR_4BIT, quant_state_of
from foak.quantized_peft.completeness import loaded_with_fault
from foak.quantized_peft.keepers import decode_once_key

if TYPE_CHECKING:
    from torch import nn
    from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, TrainingArguments

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
    decode_once_key(PATH),
)


def check(section: Section) -> None:
    """Checks what can be checked before a model is loaded.

    Raises:
        ConfigError: bitsandbytes is not installed.
    """
    require_package("bitsandbytes", f"{section.root}.{PATH}", "foak-quantized-peft[bitsandbytes]")


def load_model(section: Section, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
    """Loads a causal language model with its linear layers in 4 bits.

    The head, the embeddings and the norms stay in the dtype that they are loaded with: there is no copy of them in
    fp32, which none of the precision modes needs. (PEFT's `prepare_model_for_kbit_training` makes one. Nothing else in
    it is needed either: PEFT freezes the base, and transformers and TRL make the inputs of checkpointed layers require
    a gradient where the kind of checkpointing wants it.)

    Args:
        section: the keys of the section.
        name_or_path: folder or hub id of an unquantized model, or of one that bitsandbytes has already quantized
            in the same way.
        **kwargs: further arguments of `from_pretrained`. `dtype` is that of the weights that stay, and of the
            products where `compute_dtype` is auto (the checkpoint's own if no `dtype` is given). A `gguf_file` is
            dequantized to `dtype` (float32 if none is given) and then quantized.

    Raises:
        UnsupportedError: the checkpoint is quantized in another way, is incomplete, or a second quantization is asked
            for.
    """
    import torch
    from transformers import AutoConfig

    path = f"{section.root}.{PATH}"
    gguf_file = kwargs.get("gguf_file")
    for name in ("quantization_config", "load_in_4bit", "load_in_8bit"):
        if kwargs.get(name) and not (gguf_file and name == "quantization_config"):
            raise UnsupportedError(f"{path} cannot be combined with the argument {name} of load_model; remove one")
    if gguf_file:
        return _load_gguf(section, name_or_path, kwargs)
    source = {name: kwargs[name] for name in ("revision", "token", "cache_dir", "local_files_only") if name in kwargs}
    config = AutoConfig.from_pretrained(name_or_path, **source)
    compute = section["compute_dtype"]
    if compute == "auto":
        compute = kwargs.get("dtype", "auto")
    if compute == "auto":
        compute = config.dtype or torch.bfloat16
    stored = getattr(config, "quantization_config", None)
    names = check_stored(Path(name_or_path))
    if stored is None:
        if names.weights:
            raise UnsupportedError(
                f"{name_or_path} cannot be loaded: {min(names.weights)} is stored in 4 bits, but config.json has no "
                "quantization_config"
            )
        kwargs["quantization_config"] = _quantization(section, compute)
    else:
        # transformers prefers the checkpoint's own settings to given ones, so all of them must agree, but for the
        # compute dtype, which is no property of the stored weights.
        stored = dict(stored) if isinstance(stored, dict) else stored.to_dict()
        _check_settings(section, name_or_path, stored)
        stored["bnb_4bit_compute_dtype"] = str(compute).removeprefix("torch.")
        config.quantization_config = stored
        kwargs["config"] = config
    model = _from_pretrained(name_or_path, config, names, kwargs)
    _check_loaded(section, name_or_path, model)
    return model


def augment(
    section: Section, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None
) -> None:
    """Refuses a 4-bit or 8-bit model that has no adapter, unless `no_peft_model` says that this is meant.

    Raises:
        UnsupportedError: nothing in the model could be trained.
    """
    bits = 4 if getattr(model, "is_loaded_in_4bit", False) else 8 if getattr(model, "is_loaded_in_8bit", False) else 0
    if section["no_peft_model"] or peft_config is not None or not bits:
        return
    raise UnsupportedError(
        f"The model's weights are in {bits} bits and it has no adapter, so nothing could train: add a LoRA with PEFT "
        f"before apply, give its peft_config, or set {section.key('no_peft_model')} to true"
    )


def diagnose() -> Sequence[tuple[str, str]]:
    """Whether 4-bit bases can be loaded here."""
    try:
        found = f"bitsandbytes {metadata.version('bitsandbytes')}: nf4 and fp4 can be loaded"
    except metadata.PackageNotFoundError:
        found = "bitsandbytes is not installed: pip install 'foak-quantized-peft[bitsandbytes]'"
    return (("4-bit base", found),)


def _quantization(section: Section, compute: Any) -> BitsAndBytesConfig:
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=section["quant_type"],
        bnb_4bit_use_double_quant=section["double_quant"],
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_quant_storage=getattr(torch, section["storage_dtype"]),
    )


def _from_pretrained(
    name_or_path: str, config: PreTrainedConfig, names: Names, kwargs: dict[str, Any]
) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        model, fault = loaded_with_fault(AutoModelForCausalLM.from_pretrained, name_or_path, kwargs, names.weights)
    except NotImplementedError as error:
        # transformers draws random values for what is missing, and there are none for packed bytes.
        missing = _missing_weight(config, names)
        if missing is None:
            raise
        raise UnsupportedError(f"{name_or_path} cannot be loaded: {missing} is missing") from error
    if fault is not None:
        raise UnsupportedError(f"{name_or_path} cannot be loaded: {fault}")
    return model


def _missing_weight(config: PreTrainedConfig, names: Names) -> str | None:
    """The first weight of a linear layer that the checkpoint has under no name; None if there is no such."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    plain.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(plain)  # type: ignore[no-untyped-call]
    prefix = f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, nn.Linear) and not names.tensors.intersection((weight, weight.removeprefix(prefix))):
            return weight
    return None


def _load_gguf(section: Section, name_or_path: str, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Loads dense weights from a GGUF file, and quantizes them as if they came from a checkpoint."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    dtype = kwargs.get("dtype", "auto")
    dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    dense = {**kwargs, "dtype": dtype, "device_map": "cpu"}
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_config is not None:  # releases that have it may otherwise keep the weights packed
        dense["quantization_config"] = gguf_config(dequantize=True)
    source: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name_or_path, **dense)
    config = copy.deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    compute = dtype if section["compute_dtype"] == "auto" else section["compute_dtype"]
    rest = {name: value for name, value in kwargs.items() if name not in ("gguf_file", "quantization_config")}
    model: PreTrainedModel = type(source).from_pretrained(
        None,
        config=config,
        state_dict=source.state_dict(),
        **{**rest, "dtype": dtype, "quantization_config": _quantization(section, compute)},
    )
    model.name_or_path = name_or_path
    model.generation_config = source.generation_config
    _check_loaded(section, name_or_path, model)
    return model


def _check_settings(section: Section, name: str, stored: dict[str, Any]) -> None:
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


def _check_loaded(section: Section, name: str, model: PreTrainedModel) -> None:
    """Refuses a model in which a weight is not what its configuration says, or in which nothing is in 4 bits."""
    layers = [(where, layer) for where, layer in model.named_modules() if _is_4bit(layer)]
    if not layers:
        raise UnsupportedError(
            f"{name}: bitsandbytes found no linear layer to quantize, so {section.root}.{PATH} fits not"
        )
    for where, layer in layers:
        reason = LINEAR_4BIT.refusal(layer)
        state = quant_state_of(layer)
        if reason is None and state is not None and state.quant_type != section["quant_type"]:
            reason = f"its weight is stored in {state.quant_type}, not in {section['quant_type']}"
        if reason is None and state is not None:
            reason = _wrong_values(state)
        if reason is not None:
            raise UnsupportedError(f"{name} cannot be used: {where}: {reason}")


def _wrong_values(state: Any) -> str | None:
    """Why the values that a weight is decoded with cannot be right; None if they can. The host waits for the device."""
    from bitsandbytes.functional import get_4bit_type

    if state.absmax.is_meta:
        return None
    code = get_4bit_type(state.quant_type, device=state.code.device)
    # bitsandbytes' own decoders know the code by its name, whatever values lie beside the weight.
    if not bool((code == state.code).all()):
        return f"its quant_map is not the code {state.quant_type}"
    scales = (state.state2.absmax, state.state2.code) if state.nested else (state.absmax,)
    if not all(bool(values.isfinite().all()) for values in scales):
        return "its scales have values that are infinite or not numbers"
    return None


def _is_4bit(layer: nn.Module) -> bool:
    return any(kind.__name__ == "Linear4bit" for kind in type(layer).__mro__)
