"""`scenarios.yaml`: which fields a scenario has, how lists become a matrix, and what a scenario is called.

A set holds groups. A group names the work (every field that is a list is an axis of a matrix, so a group may stand for
several works) and the rows that do this work: `plain`, `compile`, `liger`, `unsloth`, `foak` (every kernel),
`foak:NAME+NAME` (these alone), `foak:each` (one row for each kernel alone) and `foak:none` (a quantized base's loader
alone). `all` stands for every kernel beside a plugin: `foak:all+padding_free+multipack`. `trl-packed` is TRL's own
packing under FlexAttention. A row written `NAME, once` is left out
of all repeats but the first; one written `NAME, unchecked` has no check. `check` changes the work, mostly to a
smaller one, for the runs whose losses are held against one in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from foak.core.errors import ConfigError
from foak.core.train.fields import Origin, did_you_mean, read_fields

__all__ = ["FP32", "KERNELS", "TABLE", "Row", "Scenario", "ScenarioSet", "Table", "Work", "read_table"]

TABLE = Path(__file__).parents[1] / "scenarios.yaml"
FP32 = "fp32"
"""The row that a group's losses are held against: plain, everything in float32."""

KERNELS: dict[str, Any] = {
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
    "fast_activation": True,
    "fused_lora": True,
}
"""The switches of the kernels plugin, with the value that a row gives them."""

PLUGINS: dict[str, Any] = {
    "padding_free": {"attention": {"padding_free": {"method": "huggingface"}}},
    "multipack": {"dataloader": {"multipack": {"num_processes": 1}}},
    "activation_budget": {"activation_checkpointing": {"budget": "auto"}},
}
"""What else a row of foak's may name, with its stanza under `plugins.training`."""

BUDGET = "activation_budget"
"""The one of them that may have a value: `activation_budget=55.6GiB`."""

PEERS = ("plain", "compile", "liger", "unsloth", "trl-packed")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is trained, and how: the same for every row of a group.

    Attributes:
        model: a geometry of the table's `models`; its weights are random, which throughput does not depend on.
        layers: fewer layers than the geometry has; None keeps its own.
        method: `full`, or a LoRA on a dense base, on an NF4 base, or on a GPTQ base of 4 bits.
        precision: `bf16` weights without autocast; `amp`, the same under autocast with adapters in float32;
            `mixed`, float32 weights under autocast; `fp32`.
        batch, seq: sequences per device and step, and their tokens (of ragged data: at most).
        checkpointing: whether every layer's activations are recomputed.
        targets: the attention's projections, or those of the MLP as well.
        rank, dropout: of the adapters.
        gpus: processes, each with its own device.
        data: every sequence full, or lengths of a distribution of `foak_bench.lengths`.
        tokens: per device and step at most, of ragged data in the rows that fill batches by tokens.
        steps, warmup: measured steps, after steps that are left out.
        training: further fields of SFTConfig.
    """

    model: str
    layers: int | None = None
    method: Literal["full", "lora", "qlora-nf4", "gptq"] = "full"
    precision: Literal["bf16", "amp", "mixed", "fp32"] = "bf16"
    batch: int = 4
    seq: int = 2048
    checkpointing: bool = True
    targets: Literal["qkvo", "all"] = "qkvo"
    rank: int = 16
    dropout: float = 0.0
    gpus: int = 1
    data: Literal["dense", "flan", "orca-math", "alpaca"] = "dense"
    tokens: int = 8192
    steps: int = 20
    warmup: int = 3
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Such as `mistral-7b.lora-all.amp.4x2048.gc.dropout0.1`: the fields that tell works apart."""
        method = self.method if self.method == "full" else f"{self.method}-{self.targets}"
        parts = [self.model if self.layers is None else f"{self.model}-{self.layers}-layers", method, self.precision]
        parts.append(f"{self.batch}x{self.seq}")
        parts += ["gc"] if self.checkpointing else []
        parts += [f"rank{self.rank}"] if self.method != "full" and self.rank != 16 else []
        parts += [f"dropout{self.dropout:g}"] if self.dropout else []
        parts += [self.data] if self.data != "dense" else []
        parts += [f"{self.tokens}tokens"] if self.data != "dense" and self.tokens != 8192 else []
        parts += [f"{self.gpus}gpus"] if self.gpus > 1 else []
        parts += [f"{key}-{value}" for key, value in sorted(self.training.items())]
        return ".".join(parts)


@dataclass(frozen=True)
class Row:
    """Who accelerates a work.

    Attributes:
        label: what it is called in tables and file names, such as `foak` or `foak.fast_loss`.
        by: `plain`, `compile`, `liger`, `unsloth`, `trl-packed` or `foak`.
        kernels: foak's switches, by name.
        plugins: foak's further plugins, by name.
        once: whether it is measured in the first of several repeats alone.
        checked: whether its losses are held against float32's, where its work has a check.
    """

    label: str
    by: str
    kernels: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    once: bool = False
    checked: bool = True

    @property
    def fills(self) -> bool:
        """Whether it fills batches by tokens, so that its steps train other samples than those of the other rows."""
        return self.by == "trl-packed" or "multipack" in self.plugins


@dataclass(frozen=True)
class Scenario:
    """One row of one work.

    Attributes:
        group: the name of the work that is timed.
        work: what this scenario trains: the group's work, or that of its check.
        row: who accelerates it.
        geometry: `type` and the fields of the transformers configuration.
        check: whether it is run for its losses alone.
    """

    group: str
    work: Work
    row: Row
    geometry: dict[str, Any]
    check: bool = False

    @property
    def name(self) -> str:
        """Unique in a set, and the path of its record below the folder of results."""
        return f"{self.group}/{'check/' if self.check else ''}{self.row.label}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for the record and the worker."""
        return {"name": self.name, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scenario:
        """The inverse of `to_dict`."""
        return cls(
            content["group"], Work(**content["work"]), Row(**content["row"]), content["geometry"], content["check"]
        )


@dataclass(frozen=True)
class ScenarioSet:
    """The scenarios that are run together.

    Attributes:
        scenarios: in the order of the table; a group's rows follow each other, a row's check is right behind it.
        repeats: how often a timed row is measured.
        share: whether scenarios may follow each other in one process, which saves its start.
    """

    scenarios: tuple[Scenario, ...]
    repeats: int
    share: bool


@dataclass(frozen=True)
class Table:
    """`scenarios.yaml`, read and checked: the sets by name."""

    sets: dict[str, ScenarioSet]


def read_table(path: Path = TABLE) -> Table:
    """Reads the table and expands every set.

    Raises:
        ConfigError: a key or a value is wrong, with its dotted name; or two scenarios of a set have one name.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    origin = Origin(path)
    return Table({name: _read_set(name, body, content["models"], origin) for name, body in content["sets"].items()})


def _read_set(name: str, body: Mapping[str, Any], models: Mapping[str, Any], origin: Origin) -> ScenarioSet:
    section = f"sets.{name}"
    hints = {"repeats": int, "share": bool, "defaults": dict[str, Any], "groups": list[dict[str, Any]]}
    read = read_fields(body, hints, section, origin)
    scenarios: list[Scenario] = []
    for index, group in enumerate(read["groups"]):
        scenarios += _read_group({**read.get("defaults", {}), **group}, f"{section}.groups[{index}]", models, origin)
    names = [scenario.name for scenario in scenarios]
    for duplicate in {name for name in names if names.count(name) > 1}:
        raise origin.error(section, f"has two scenarios named {duplicate}")
    return ScenarioSet(tuple(scenarios), read.get("repeats", 1), read.get("share", False))


def _read_group(group: Mapping[str, Any], key: str, models: Mapping[str, Any], origin: Origin) -> Iterator[Scenario]:
    fields = {name: value for name, value in group.items() if name not in ("rows", "check")}
    hints = {name: hint for name, hint in typing.get_type_hints(Work).items() if name != "name"}
    axes = [
        [(name, item) for item in (value if isinstance(value, list) else [value])] for name, value in fields.items()
    ]
    for choice in itertools.product(*axes):
        values = dict(choice)
        work = Work(**read_fields(values, hints, key, origin))
        if work.model not in models:
            hint = did_you_mean(work.model, models)
            raise origin.error(f"{key}.model", f"is {work.model!r}, which is not in models{hint}")
        if not work.warmup > 0 or not 0 < work.steps <= 50:
            raise origin.error(f"{key}.steps", "must lie between 1 and 50, after one step of warm-up at least")
        changed = group.get("check")
        checked = None if changed is None else Work(**read_fields({**values, **changed}, hints, f"{key}.check", origin))
        yield from _scenarios_of(work, checked, list(_rows_of(group["rows"], work, f"{key}.rows", origin)), models)


def _scenarios_of(work: Work, checked: Work | None, rows: list[Row], models: Mapping[str, Any]) -> Iterator[Scenario]:
    geometry = models[work.model]
    if checked is not None:
        wanted = dataclasses.replace(checked, precision="fp32")
        yield Scenario(work.name, wanted, Row(FP32, "plain"), geometry, check=True)
    for row in rows:
        yield Scenario(work.name, work, row, geometry)
        if checked is not None and checked != work and row.checked and not row.fills:
            yield Scenario(work.name, checked, row, geometry, check=True)


def _rows_of(labels: list[str], work: Work, key: str, origin: Origin) -> Iterator[Row]:
    usable = {name: on for name, on in KERNELS.items() if work.method != "full" or name != "fused_lora"}
    for text in labels:
        label, *remarks = text.split(", ")
        if not set(remarks) <= {"once", "unchecked"}:
            raise origin.error(key, f"holds {text!r}; after the comma there may be 'once' or 'unchecked'")
        for row in _row_named(label, usable, key, origin):
            yield dataclasses.replace(row, once="once" in remarks, checked="unchecked" not in remarks)


def _row_named(label: str, usable: Mapping[str, Any], key: str, origin: Origin) -> Iterator[Row]:
    by, _, chosen = label.partition(":")
    if by in PEERS and not chosen:
        yield Row(by, by)
    elif by != "foak":
        raise origin.error(
            key, f"holds {label!r}; a row is foak, foak:NAME+NAME, foak:each, foak:none, {', '.join(PEERS)}"
        )
    elif chosen == "":
        yield Row("foak", "foak", usable)
    elif chosen == "each":
        for name, on in usable.items():
            yield Row(f"foak.{name}", "foak", {name: on})
    else:
        yield _row_of(chosen, usable, key, origin)


def _row_of(chosen: str, usable: Mapping[str, Any], key: str, origin: Origin) -> Row:
    """The row of `NAME+NAME`, `none` or `all`."""
    kernels: dict[str, Any] = {}
    plugins: dict[str, Any] = {}
    for name in chosen.split("+"):
        if name == "all":
            kernels |= usable
        elif name in PLUGINS:
            plugins[name] = PLUGINS[name]
        elif name.startswith(f"{BUDGET}="):
            plugins[BUDGET] = {"activation_checkpointing": {"budget": name.partition("=")[2]}}
        elif name in usable:
            kernels[name] = usable[name]
        elif chosen != "none":
            raise _unknown_kernel(name, [*usable, *PLUGINS], key, origin)
    return Row(f"foak.{chosen}", "foak", kernels, plugins)


def _unknown_kernel(name: str, usable: list[str], key: str, origin: Origin) -> ConfigError:
    return origin.error(
        key, f"names {name!r}; of this method there are {', '.join(usable)}{did_you_mean(name, usable)}"
    )
