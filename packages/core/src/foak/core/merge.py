"""Merges a trained adapter into an unquantized model, through PEFT, and saves the result for serving.

The model that the adapter is merged into may be another copy of the one it was trained on: an adapter trained on a
quantized base goes into the unquantized checkpoint.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foak.core.errors import ConfigError, UnsupportedError
from foak.core.train.fields import Origin
from foak.core.train.model import LoadedModel, load_model, locate
from foak.core.train.runfile import DataSection, ModelSection, RunFile
from foak.core.train.storage import named_failure, replace_folder

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["DTYPES", "Merged", "merge_adapter"]

DTYPES = ("auto", "bfloat16", "float16", "float32")
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class Merged:
    """What was written.

    Attributes:
        folder: the merged model, in safetensors, with its tokenizer.
        dtype: dtype of its weights.
        layers: how many layers the adapter changed.
    """

    folder: Path
    dtype: str
    layers: int


def merge_adapter(adapter: Path, into: str, out: Path, dtype: str = "auto") -> Merged:
    """Merges an adapter into a model and saves it.

    PEFT adds each adapter's product to its weight: computed in float32 and rounded once to the weight's dtype. Where
    the adapter changes an output head that shares its weight with the embeddings, the two are separated first.

    Args:
        adapter: folder with `adapter_config.json` and `adapter_model.safetensors`.
        into: an unquantized model as a run file names it in `model.name_or_path`: a folder (of a GGUF file too), a hub
            id, or `package:NAME`.
        out: folder to write; must not exist.
        dtype: dtype of the merged weights, one of `DTYPES`; `auto` keeps the checkpoint's own (float32 for GGUF).

    Raises:
        ConfigError: something that was named is not there, or is there already.
        UnsupportedError: the adapter does not fit the model, or cannot be merged at all.
        OSError: the result could not be written.
    """
    if out.exists():
        raise ConfigError(f"OUT is {out}, which exists already: name a new folder, or remove it")
    settings = _read_adapter(adapter)
    loaded = _load(into, dtype)
    model = loaded.model
    stored = _stored_tensors(adapter / _WEIGHTS)
    _separate_head(model, stored)
    adapted = _attach(model, adapter, into)
    _check_complete(adapted, stored, adapter, into)
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise UnsupportedError(
            f"ADAPTER is {adapter}, of the type {settings.get('peft_type')}, which PEFT cannot merge"
        )
    layers = sum(1 for module in adapted.modules() if hasattr(module, "base_layer") and hasattr(module, "merge"))
    try:
        merged = adapted.merge_and_unload(safe_merge=True)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedError(f"ADAPTER is {adapter}, which PEFT does not merge: {error}") from error
    with named_failure("The merged model", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(out, lambda folder: _save(merged, folder, adapter, loaded.tokenizer), owner=True)
    return Merged(out, str(merged.dtype).removeprefix("torch."), layers)


def _read_adapter(adapter: Path) -> dict[str, Any]:
    for name in (_CONFIG, _WEIGHTS):
        if not (adapter / name).is_file():
            raise ConfigError(f"ADAPTER is {adapter}, a folder without {name}: name the folder of a saved adapter")
    try:
        settings: dict[str, Any] = json.loads((adapter / _CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{adapter / _CONFIG} is not JSON: {error}") from error
    return settings


class _Model(Origin):
    """Words errors about the key `model.name_or_path` of a run as errors about the option."""

    def error(self, key: str, text: str) -> ConfigError:
        return ConfigError(f"MODEL {text}")


def _load(into: str, dtype: str) -> LoadedModel:
    """Loads the model as `foak train` does, so that what a run trained on can be named in the same way."""
    from transformers import AutoConfig

    run = RunFile(
        path=Path("MODEL"),
        model=ModelSection(name_or_path=into, dtype=cast("Any", dtype)),
        data=DataSection(train=""),
        peft=None,
        training={},
        resume=False,
        acceleration=None,
        origin=_Model(Path("MODEL")),
    )
    location, gguf_file = locate(run)
    if gguf_file is None:
        try:
            config = AutoConfig.from_pretrained(location)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise run.origin.error("", f"is {into!r}, which cannot be loaded: {reason[0]}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedError(
                f"MODEL is {into}, whose weights are quantized: name the unquantized model that it was made from"
            )
    return load_model(run)


def _stored_tensors(file: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except SafetensorError as error:
        raise ConfigError(f"{file} is cut off, or is no safetensors file: {error}") from error


def _separate_head(model: Any, stored: set[str]) -> None:
    """Unties the output head from the embeddings where the adapter changes either: merging would change both."""
    import torch

    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embeddings.weight:
        return
    names = [name for name, module in model.named_modules() if module is head or module is embeddings]
    if any(f".{name}." in f".{key}" for name in names for key in stored):
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False


def _attach(model: PreTrainedModel, adapter: Path, into: str) -> PeftModel:
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # What is missing is looked at below, and is an error there.
            warnings.filterwarnings("ignore", "Found missing adapter keys", UserWarning)
            return PeftModel.from_pretrained(model, str(adapter.resolve()))
    except (ValueError, RuntimeError, TypeError) as error:
        line = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), None)
        reason = line or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"ADAPTER {adapter} does not fit MODEL {into}: {reason}") from error


def _check_complete(adapted: Any, stored: set[str], adapter: Path, into: str) -> None:
    """Refuses an adapter of which a tensor found no place, or of which one is missing."""
    from peft import get_peft_model_state_dict

    wanted = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # PEFT stores the base's own embeddings and head as well where it finds them among the targets.
    own = {f"base_model.model.{name}" for name, _ in adapted.base_model.model.named_parameters(remove_duplicate=False)}
    stored = {name for name in stored if name in wanted or name not in own}
    for names, fault in ((stored - wanted, "has no place for"), (wanted - stored, "wants what is not there,")):
        if names:
            raise UnsupportedError(f"ADAPTER {adapter} does not fit MODEL {into}: the model {fault} {min(names)}")


def _save(merged: Any, folder: Path, adapter: Path, tokenizer: Any) -> None:
    """Saves model and tokenizer: the adapter's, whose chat template may be the run's, else the model's."""
    from transformers import AutoTokenizer

    if (adapter / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(adapter.resolve()))
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
