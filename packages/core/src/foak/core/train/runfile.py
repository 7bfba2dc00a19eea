"""RUN.yaml: which sections and keys a run has, how the file is read, and how `--set` changes it.

```yaml
model:        {name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct, dtype: bfloat16}
data:         {train: train.jsonl, eval_fraction: 0.1}
peft:         {r: 16, lora_alpha: 32, target_modules: all-linear}     # absent: full fine-tuning
training:     {max_steps: 100, learning_rate: 2e-4}                   # the fields of trl.SFTConfig
acceleration: {plugins: {training: {fused_ops_and_kernels: {fast_loss: fused_linear}}}}
```
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from foak.core.config import RUN_SECTIONS, describe_kind, read_yaml
from foak.core.errors import ConfigError
from foak.core.train.fields import Origin, did_you_mean, read_fields

__all__ = ["DataSection", "ModelSection", "RunFile", "read_run_file"]

_Section = TypeVar("_Section", "ModelSection", "DataSection")

# Fields that PEFT or the trainer fills in by itself, or that would contradict another section of the run file.
_PEFT_INTERNAL = {
    "peft_type",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "inference_mode",
    "runtime_config",
}
_TRAINING_ELSEWHERE = {
    "model_init_kwargs": "is not read here: the keys of the section model say how the model is loaded",
    "trust_remote_code": "is not read here: write model.trust_remote_code",
    "disable_tqdm": "is not read here: the job shows its own progress",
    "local_rank": "is not read here: accelerate launch and torchrun set it",
}


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The section `model`.

    Attributes:
        name_or_path: a hub id, a folder, or `package:NAME` for a folder inside an installed Python package.
        dtype: dtype of the weights; `auto` keeps the checkpoint's own (float32 for a GGUF file, which is dequantized).
        gguf_file: name of the GGUF file in the folder; found by itself in a folder that holds one and no config.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
        pickled_weights: whether weights may be read from files of `torch.save` (.bin, .pt), which can hold more than
            numbers; otherwise from safetensors (or a GGUF file) only.
        attn_implementation: attention of transformers, such as `sdpa`.
    """

    name_or_path: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    gguf_file: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    pickled_weights: bool = False
    attn_implementation: str | None = None


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The section `data`.

    Attributes:
        train: a .jsonl, .json (one object a line) or .parquet file, or a hub id and maybe a split: `owner/name:split`.
        eval: the same, for held-out examples.
        eval_fraction: the share of `train` to hold out instead, between 0 and 1.
    """

    train: str
    eval: str | None = None
    eval_fraction: float | None = None


@dataclass(frozen=True)
class RunFile:
    """A run as written: read, completed with `--set`, and checked.

    Attributes:
        path: the file.
        model: the section `model`.
        data: the section `data`.
        peft: fields of `peft.LoraConfig`, checked; None means full fine-tuning.
        training: fields of `trl.SFTConfig`, checked; `output_dir` is always there.
        resume: `training.resume_from_checkpoint`: whether, or from which folder, a run goes on.
        acceleration: the mapping that holds `plugins:`; None means no acceleration.
        origin: where a key comes from, for messages.
    """

    path: Path
    model: ModelSection
    data: DataSection
    peft: dict[str, Any] | None
    training: dict[str, Any]
    resume: bool | str
    acceleration: dict[str, Any] | None
    origin: Origin

    def to_dict(self) -> dict[str, Any]:
        """The run as a mapping that JSON and YAML can hold, for the report; tokens of the hub are masked."""
        training = {
            key: f"<{key.upper()}>" if value is not None and key.endswith("hub_token") else copy.deepcopy(value)
            for key, value in self.training.items()
        }
        return {
            "model": dataclasses.asdict(self.model),
            "data": dataclasses.asdict(self.data),
            "peft": copy.deepcopy(self.peft),
            "training": {**training, "resume_from_checkpoint": self.resume},
            "acceleration": copy.deepcopy(self.acceleration),
        }

    def find(self, name: str) -> Path:
        """A path that the file names: beside the file if it is there, else in the working directory."""
        given = Path(name).expanduser()
        beside = self.path.parent / given
        return beside if not given.is_absolute() and beside.exists() else given


def read_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Reads and checks a run file.

    Args:
        path: the file.
        overrides: what `--set` gave: `dotted.key=value`, the value read as YAML.

    Raises:
        ConfigError: the file is missing, empty or not YAML, or a key or value in it is wrong.
    """
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a run file is a mapping with the sections {', '.join(RUN_SECTIONS)}")
    overridden = [_override(content, assignment) for assignment in overrides]
    origin = Origin(path, overridden)
    for name, value in content.items():
        if name not in RUN_SECTIONS:
            allowed = ", ".join(RUN_SECTIONS)
            raise origin.error(name, f"is no section of a run file ({allowed}){did_you_mean(name, RUN_SECTIONS)}")
        if value is not None and not isinstance(value, dict):
            raise origin.error(name, f"must be a mapping, but is {describe_kind(value)}")
    training, resume = _read_training(content.get("training") or {}, origin)
    training.setdefault("output_dir", str(Path("runs") / path.stem))
    return RunFile(
        path=path,
        model=_read_section(ModelSection, content.get("model"), "model", origin),
        data=_check_data(_read_section(DataSection, content.get("data"), "data", origin), origin),
        peft=None if content.get("peft") is None else _read_peft(content["peft"], origin),
        training=training,
        resume=resume,
        acceleration=content.get("acceleration"),
        origin=origin,
    )


def _override(content: dict[str, Any], assignment: str) -> str:
    """Applies one `dotted.key=value` to `content`; returns the dotted key."""
    key, separator, text = assignment.partition("=")
    parts = key.split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set: expected section.key=value, such as training.max_steps=5, not {assignment!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set: the value of {key} is not valid YAML: {text!r}") from None
    node = content
    for depth, part in enumerate(parts[:-1], start=1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise ConfigError(f"--set: {key} leads through {'.'.join(parts[:depth])}, which is not a mapping")
    node[parts[-1]] = value
    return key


def _read_section(cls: type[_Section], values: Mapping[str, Any] | None, section: str, origin: Origin) -> _Section:
    hints = typing.get_type_hints(cls)
    read = read_fields(values or {}, hints, section, origin)
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and read.get(field.name) in (None, ""):
            raise origin.error(f"{section}.{field.name}", "is missing")
    return cls(**read)


def _check_data(data: DataSection, origin: Origin) -> DataSection:
    if data.eval_fraction is not None:
        if data.eval is not None:
            raise origin.error("data.eval_fraction", "and data.eval exclude each other: write one of them")
        if not 0 < data.eval_fraction < 1:
            raise origin.error("data.eval_fraction", f"must lie between 0 and 1, not {data.eval_fraction}")
    return data


def _read_peft(values: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    from peft import LoraConfig

    hints = _hints_of(LoraConfig)
    return read_fields(values, {k: v for k, v in hints.items() if k not in _PEFT_INTERNAL}, "peft", origin)


def _read_training(values: Mapping[str, Any], origin: Origin) -> tuple[dict[str, Any], bool | str]:
    from trl import SFTConfig

    for key, reason in _TRAINING_ELSEWHERE.items():
        if key in values:
            raise origin.error(f"training.{key}", reason)
    hints = {k: v for k, v in _hints_of(SFTConfig).items() if k not in _TRAINING_ELSEWHERE}
    read = read_fields(values, {**hints, "resume_from_checkpoint": bool | str | None}, "training", origin)
    if read.get("output_dir", "x") in (None, ""):
        raise origin.error("training.output_dir", "must be the name of a folder")
    return read, read.pop("resume_from_checkpoint", None) or False


def _hints_of(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
