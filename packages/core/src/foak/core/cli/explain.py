"""`foak explain`: what would be patched in a model, and why not, on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from foak.core.activation import everything_auto
from foak.core.cli.output import print_json, print_line, print_table
from foak.core.discovery import installed_plugins
from foak.core.errors import UnsupportedError
from foak.core.framework import AccelerationFramework

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["build_on_meta", "explain_command", "find_model_config"]

ALLOWED = (
    "a model folder with a config.json, a config.json, a .gguf file, a hub id that is in the local cache, or a model "
    "type of transformers such as llama"
)


def explain_command(model: str, config_file: Path | None, as_json: bool) -> None:
    """Builds the model without weights, applies the plugins, and prints the report.

    Args:
        model: see `find_model_config`.
        config_file: the configuration; None for every switch of every installed plugin set to `auto`.
        as_json: print the report's `to_dict()` with the model's class instead of a table.

    Raises:
        ConfigError: the configuration is wrong.
        UnsupportedError: the model is unknown or cannot be built.
    """
    if config_file is None:
        plugins = [installed.plugin for installed in installed_plugins()]
        tree = everything_auto(plugins)
        if not tree:
            raise UnsupportedError(
                "No plugin with kernels is installed, so nothing would be patched: pip install foak-fast-kernels"
            )
        framework = AccelerationFramework({"plugins": tree}, plugins=plugins)
    else:
        framework = AccelerationFramework(config_file)
    built = build_on_meta(find_model_config(model))
    report = framework.apply(built, strict=False)
    name = type(built).__name__
    if as_json:
        print_json({"model": model, "model_class": name, "config": framework.config, **report.to_dict()})
        return
    title = f"{model} ({name}): {len(report.patched)} patched, {len(report.kept)} kept"
    if not report.records:
        print_line(f"{title}: no rule is switched on, or none found a module of its kind")
        return
    print_table(title, ("rule", "module", "class", "n", "outcome", "reason"), report.rows())
    for note in report.notes:
        print_line(note)


def find_model_config(model: str) -> PreTrainedConfig:
    """The transformers configuration of a model; nothing is fetched from the network and no remote code runs.

    Args:
        model: a folder with a `config.json` (or with one `.gguf` file), such a file itself, a hub id in the local
            cache, or a model type of transformers, which gives the type's default configuration.

    Raises:
        UnsupportedError: none of these, or transformers cannot read it.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    path = Path(model).expanduser()
    source, extra = _locate(path) if path.exists() else ("", {})
    try:
        if source:
            local: PreTrainedConfig = AutoConfig.from_pretrained(source, local_files_only=True, **extra)
            return local
        if model in CONFIG_MAPPING:
            default: PreTrainedConfig = AutoConfig.for_model(model)
            return default
    except _bad_config_failures() as error:
        raise UnsupportedError(
            f"{model}: transformers cannot read this model's configuration: {_line(error)}"
        ) from error
    if model.count("/") != 1 or model.startswith(("/", ".", "~")) or model.endswith("/"):
        raise UnsupportedError(f"{model}: there is no such file, folder or model type; MODEL is {ALLOWED}")
    try:
        cached: PreTrainedConfig = AutoConfig.from_pretrained(model, local_files_only=True)
        return cached
    except _bad_config_failures() as error:
        raise UnsupportedError(
            f"{model}: neither a local path nor a hub id in the local cache, and explain does not use the network; "
            f"fetch it with `hf download {model} config.json`"
        ) from error


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Builds the causal language model of a configuration on the meta device: shapes without memory.

    Raises:
        UnsupportedError: transformers has no causal language model for it, or cannot build it without data.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"transformers has no causal language model for the model type {config.model_type}")
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except _bad_config_failures() as error:
        raise UnsupportedError(
            f"transformers cannot build a causal language model from this configuration of type {config.model_type} "
            f"({type(error).__name__}: {_line(error)}); a model type alone gives its default configuration, which may "
            "be incomplete: give a folder or a config.json"
        ) from error
    return model


def _locate(path: Path) -> tuple[str, dict[str, Any]]:
    """Where `AutoConfig` finds a local model: the path to give it, and further arguments."""
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path), {}
        gguf = sorted(path.glob("*.gguf"))
        if len(gguf) != 1:
            found = f"{len(gguf)} .gguf files" if gguf else "no .gguf file"
            raise UnsupportedError(f"{path}: the folder has no config.json and {found}; MODEL is {ALLOWED}")
        path = gguf[0]
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.suffix == ".json":
        return str(path), {}
    raise UnsupportedError(f"{path}: this file is neither a config.json nor a .gguf file; MODEL is {ALLOWED}")


def _bad_config_failures() -> tuple[type[Exception], ...]:
    """What a configuration that is wrong raises while transformers reads it or builds its model.

    transformers computes with the values before it has checked them, so this is whatever that computation raises.
    """
    from huggingface_hub.errors import StrictDataclassError

    faults = (AttributeError, LookupError, TypeError, AssertionError, ArithmeticError)
    return (OSError, ValueError, RuntimeError, ImportError, StrictDataclassError, *faults)


def _line(error: BaseException) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
