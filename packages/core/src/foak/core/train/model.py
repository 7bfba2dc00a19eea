"""The model of a run and its tokenizer.

`model.name_or_path` is a hub id, a folder, or `package:NAME` (the folder of an installed Python package, which is
found without being imported). A folder with a GGUF file gives model, tokenizer and chat template from that file.
"""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foak.core.train.runfile import RunFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from foak.core import AccelerationFramework

__all__ = ["LoadedModel", "load_model", "locate"]

_PACKAGE = "package:"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class LoadedModel:
    """A model and its tokenizer, before any adapter or acceleration."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(run: RunFile, framework: AccelerationFramework | None = None) -> LoadedModel:
    """Loads what the section `model` names; for a folder or a package the network is not touched.

    Args:
        run: the run file.
        framework: loads the model (a plugin's loader, if one is active); None loads it with transformers.

    Raises:
        ConfigError: there is no such model, it cannot be read, or its weights are pickled and `model.pickled_weights`
            does not allow that.
    """
    import torch
    import transformers
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    location, gguf_file = locate(run)
    section = run.model
    common = {"revision": section.revision, "trust_remote_code": section.trust_remote_code, "gguf_file": gguf_file}
    common = {key: value for key, value in common.items() if value}
    arguments: dict[str, Any] = {**common, "dtype": _dtype(section.dtype, gguf_file)}
    gguf_config = getattr(transformers, "GgufConfig", None)
    if gguf_file is not None and gguf_config is not None:
        # Releases that have it may otherwise keep the weights packed, which cannot be trained.
        arguments["quantization_config"] = gguf_config(dequantize=True)
    if section.attn_implementation is not None:
        arguments["attn_implementation"] = section.attn_implementation
    if gguf_file is None and not section.pickled_weights:
        _refuse_pickled(run, Path(location))
        arguments["use_safetensors"] = True
    load = AutoModelForCausalLM.from_pretrained if framework is None else framework.load_model
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **common)
        model = load(location, **arguments)
    # A weight file that is cut off or holds other shapes raises what its reader raises: torch's pickle reader has four.
    except (
        *(OSError, ValueError, ImportError),
        *(SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError),
    ) as error:
        if type(error).__module__.startswith("foak.") or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, (EOFError, pickle.UnpicklingError)):
            # torch's own text advises to load it in a way that runs code from the file.
            reason = ["a weight file is cut off, or is not one of torch's"]
        raise run.origin.error(
            "model.name_or_path", f"is {section.name_or_path!r}, which cannot be loaded: {reason[0]}"
        ) from error
    if gguf_file is not None and not _loaded_by_plugin(framework):
        _forget_gguf(model)
    return LoadedModel(model, tokenizer)


def _refuse_pickled(run: RunFile, folder: Path) -> None:
    """Refuses a folder whose weights are in pickle files only; what a hub id leads to is refused when it is read."""
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickled = [name for name in files if name.endswith((*_PICKLED, ".bin.index.json")) and name != "training_args.bin"]
    if pickled and not any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files):
        raise run.origin.error(
            "model.name_or_path",
            f"is {run.model.name_or_path!r}, whose weights are pickled ({pickled[0]}): such a file can hold more than "
            "numbers. Save the model in safetensors, or write model.pickled_weights: true",
        )


def _loaded_by_plugin(framework: AccelerationFramework | None) -> bool:
    """Whether a plugin's loader made the model: then its marks are the plugin's, and true."""
    return framework is not None and any(plugin.loads for plugin in framework.active_plugins)


def locate(run: RunFile) -> tuple[str, str | None]:
    """Where the model lies (an absolute folder or a hub id), and the GGUF file to read from it.

    Raises:
        ConfigError: there is no such folder, package or file.
    """
    name = run.model.name_or_path
    if name.startswith(_PACKAGE):
        folder = _package_folder(run, name.removeprefix(_PACKAGE))
    else:
        folder = run.find(name)
        if not folder.is_dir():
            if name.startswith((".", "/", "~")):
                raise run.origin.error("model.name_or_path", f"is {name!r}, but there is no such folder")
            return name, run.model.gguf_file
    # Absolute: "models/tiny" would read as a hub id in PEFT, which looks for its config.json on the network.
    folder = folder.resolve()
    gguf_file = run.model.gguf_file
    if gguf_file is not None:
        if not (folder / gguf_file).is_file():
            raise run.origin.error("model.gguf_file", f"is {gguf_file!r}, but there is no such file in {folder}")
    elif not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.glob("*.gguf"))
        if len(found) != 1:
            what = "more than one GGUF file: write model.gguf_file" if found else "neither config.json nor a GGUF file"
            raise run.origin.error("model.name_or_path", f"is {name!r}, a folder with {what}")
        gguf_file = found[0]
    return str(folder), gguf_file


def _package_folder(run: RunFile, package: str) -> Path:
    top = package.partition("/")[0]
    # A dotted name would import its parent; a folder below the package is written with a slash.
    spec = importlib.util.find_spec(top) if top.isidentifier() else None
    locations = spec.submodule_search_locations if spec is not None else None
    if not locations:
        distribution = top.replace("_", "-")
        raise run.origin.error(
            "model.name_or_path", f"names the package {top!r}, which is not installed: pip install {distribution}"
        )
    folder = Path(next(iter(locations))).parent / package
    if not folder.is_dir():
        raise run.origin.error("model.name_or_path", f"names {package!r}, but there is no such folder")
    return folder


def _dtype(name: str, gguf_file: str | None) -> Any:
    import torch

    if name == "auto":
        return torch.float32 if gguf_file is not None else "auto"
    return getattr(torch, name)


def _forget_gguf(model: PreTrainedModel) -> None:
    """Takes the mark "quantized" off a model whose GGUF blocks were dequantized into plain weights.

    Trainer refuses to train what carries the mark, and the saved configuration would ask for a GGUF loader.
    """
    assert all(parameter.is_floating_point() for parameter in model.parameters()), "the GGUF weights are still packed"
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)
