"""The section `peft.quantization.auto_gptq`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foak.core.errors import ConfigError, UnsupportedError
from foak.core.plugin import Key, Section, require_package
from foak.quantized_peft.completeness import loaded_with_fault
from foak.quantized_peft.gptq.errors import CheckpointError
from foak.quantized_peft.keepers import decode_once_key

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

    from foak.quantized_peft.gptq.checkpoint import Checkpoint

__all__ = ["KEYS", "PATH", "augment", "check", "diagnose", "load_model"]

PATH = "peft.quantization.auto_gptq"

KEYS = (
    Key("kernel", ("triton_v2",), "the decoder", default="triton_v2", under=(PATH,)),
    Key("from_quantized", (True, False), "loads a GPTQ checkpoint; false is refused", default=True, under=(PATH,)),
    Key(
        "use_external_lib",
        (True, False),
        "GPTQModel's layers (pip install gptqmodel optimum) in place of foak's",
        default=False,
        under=(PATH,),
    ),
    decode_once_key(PATH),
)

_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_OTHER_WEIGHTS = ("gguf_file", "quantization_config", "load_in_4bit", "load_in_8bit", "state_dict")


def check(section: Section) -> None:
    """Checks the section before anything is loaded.

    Raises:
        ConfigError: quantizing is asked for, or a package that `use_external_lib` needs is not installed.
    """
    if not section["from_quantized"]:
        raise ConfigError(
            f"{section.key('from_quantized')} is false, but nothing is quantized here: quantize the model with "
            "GPTQModel, name the result in model.name_or_path, and set the key to true"
        )
    if section["use_external_lib"]:
        for package in ("gptqmodel", "optimum"):
            require_package(package, section.key("use_external_lib"), "gptqmodel optimum")


def load_model(section: Section, name_or_path: str, **kwargs: Any) -> PreTrainedModel:
    """Loads a GPTQ checkpoint, as AutoGPTQ and GPTQModel write it, as a causal language model.

    Args:
        section: the plugin's.
        name_or_path: folder or hub id.
        **kwargs: further arguments of `from_pretrained`. `dtype` is that of all that is not quantized, and of the
            activations; the checkpoint's own if none is given. Scales keep the dtype that they are stored in.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit its own settings or the model.
        UnsupportedError: it is stored in a way that is not served, or a second quantization is asked for.
    """
    from transformers import AutoConfig

    for name in _OTHER_WEIGHTS:
        if kwargs.get(name):
            raise UnsupportedError(
                f"{section.root}.{PATH} cannot be combined with the argument {name} of load_model; remove one"
            )
    folder = _folder(name_or_path, {name: kwargs.pop(name) for name in _HUB if name in kwargs})
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: there is no config.json")
    given: PreTrainedConfig | None = kwargs.pop("config", None)
    code = {name: kwargs[name] for name in ("trust_remote_code", "code_revision") if name in kwargs}
    config = AutoConfig.from_pretrained(folder, **code) if given is None else copy.deepcopy(given)
    from foak.quantized_peft.gptq.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder, _stored_settings(config))
    if not checkpoint.pickled:
        config.transformers_weights = checkpoint.weights
    if section["use_external_lib"]:
        model = _load_external(section, checkpoint, config, kwargs)
    else:
        model = _load_own(checkpoint, config, kwargs)
    model.config.__dict__.pop("transformers_weights", None)
    # An adapter that is saved names the model that it belongs to.
    model.config._name_or_path = model.name_or_path = name_or_path
    return model


def augment(
    section: Section, model: PreTrainedModel, train_args: TrainingArguments | None, peft_config: Any | None
) -> None:
    """Refuses a GPTQ model that has no adapter.

    Raises:
        UnsupportedError: nothing in the model could be trained.
    """
    if peft_config is None and getattr(model, "quantization_method", None) == "gptq":
        raise UnsupportedError(
            "The model's weights are in GPTQ's format and it has no adapter, so nothing could train: add a LoRA with "
            "PEFT before apply, or give its peft_config"
        )


def diagnose() -> Sequence[tuple[str, str]]:
    """What `foak doctor` shows."""
    own = "2, 3, 4 and 8 bits, act-order, both versions of the format"
    try:
        return (("GPTQ base", f"{own}; gptqmodel {metadata.version('gptqmodel')} for use_external_lib"),)
    except metadata.PackageNotFoundError:
        return (("GPTQ base", f"{own}; gptqmodel is not installed (use_external_lib): pip install gptqmodel optimum"),)


def _folder(name_or_path: str, hub: Mapping[str, Any]) -> Path:
    """The folder itself, or the hub's files of that name in the cache, downloaded where they are not."""
    folder = Path(name_or_path)
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    found = Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.py", "*.safetensors"], **hub))
    if any(found.glob("*.safetensors")):
        return found
    return Path(snapshot_download(name_or_path, allow_patterns=["*.json", "*.py", "*.bin", "*.pt"], **hub))


def _stored_settings(config: PreTrainedConfig) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else found.to_dict()


def _load_own(checkpoint: Checkpoint, config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedModel:
    from foak.quantized_peft.gptq.quantizer import METHOD

    config.quantization_config = {"quant_method": METHOD, "checkpoint": checkpoint}
    return _from_pretrained(checkpoint, config, kwargs)


def _load_external(
    section: Section, checkpoint: Checkpoint, config: PreTrainedConfig, kwargs: dict[str, Any]
) -> PreTrainedModel:
    """Loads through transformers' own GPTQ support, which makes GPTQModel's layers by way of optimum."""
    if checkpoint.settings.overrides:
        raise UnsupportedError(
            f"{checkpoint.settings.origin} has settings for single layers (dynamic), which transformers cannot give to "
            f"GPTQModel; set {section.key('use_external_lib')} to false"
        )
    config.quantization_config = {
        **checkpoint.settings.written,
        "quant_method": "gptq",
        # GPTQModel's choice among the kernels that a gradient goes through.
        "backend": "auto_trainable",
    }
    return _from_pretrained(checkpoint, config, kwargs)


def _from_pretrained(checkpoint: Checkpoint, config: PreTrainedConfig, kwargs: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if checkpoint.pickled:
        kwargs["use_safetensors"] = False
    model, fault = loaded_with_fault(
        AutoModelForCausalLM.from_pretrained, checkpoint.folder, {**kwargs, "config": config}
    )
    if fault is not None:
        raise CheckpointError(f"{checkpoint.folder / checkpoint.weights}: {fault}")
    return model
