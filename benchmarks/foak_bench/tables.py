"""Tables of records: those of README.md (Markdown) and the one that a run ends with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from foak_bench.records import DOES_NOT_FIT, Record
from foak_bench.verdict import judge

__all__ = [
    "NONE",
    "full_table",
    "groups",
    "head",
    "kernel_contribution_table",
    "lora_table",
    "markdown",
    "memory",
    "status",
    "terminal_tables",
]

_SHOWN = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "bitsandbytes", "liger-kernel", "unsloth")
_GIB = 2**30

Records = Mapping[str, Record]


def full_table(folders: Mapping[str, Records]) -> str:
    """Full fine-tuning with and without foak, on every GPU that there are results of."""
    return _speed_tables(folders, lambda record: record.scenario.work.method == "full" and _is_whole(record))


def lora_table(folders: Mapping[str, Records]) -> str:
    """LoRA, on dense and quantized bases, with and without foak."""
    return _speed_tables(folders, lambda record: record.scenario.work.method != "full" and _is_whole(record))


def kernel_contribution_table(folders: Mapping[str, Records]) -> str:
    """What each kernel gives by itself, beside plain and all of them."""
    return "\n\n".join(_kernel_tables(folders)) or NONE


NONE = "There are no results for this table yet."


def _speed_tables(folders: Mapping[str, Records], wanted: Callable[[Record], bool]) -> str:
    found = []
    for records in folders.values():
        chosen = [record for record in records.values() if not record.scenario.check and wanted(record)]
        if any(record.runs for record in chosen):
            found.append(f"{head(chosen)}\n\n{_speed_table(chosen, records)}")
    return "\n\n".join(found) or NONE


def _speed_table(chosen: Sequence[Record], records: Records) -> str:
    header = [
        "work",
        "by",
        "tokens/s",
        "against plain",
        "step, s (p10 – p90)",
        "peak GiB (held)",
        "loss (norm) off fp32",
    ]
    rows = []
    for group, members in groups(chosen):
        for index, record in enumerate(members):
            cells = [f"`{group}`" if index == 0 else "", record.scenario.row.label]
            if not record.runs:
                cells += [status(record), "", "", "", ""]
            else:
                step = record.step_seconds
                cells += [
                    _strong(f"{record.tokens_per_second:,.0f}", record),
                    _gain(record, records),
                    f"{step['median']:.3f} ({step['p10']:.3f} – {step['p90']:.3f})",
                    memory(record),
                    str(judge(record, records)),
                ]
            rows.append(cells)
    return markdown(header, rows)


def _kernel_tables(folders: Mapping[str, Records]) -> Iterator[str]:
    header = [
        "work",
        "kernel",
        "tokens/s",
        "against plain",
        "peak GiB",
        "against plain",
        "loss (norm) off fp32",
    ]
    for records in folders.values():
        works = {r.scenario.group for r in records.values() if _one_kernel(r) and r.runs and not r.scenario.check}
        chosen = [
            record
            for record in records.values()
            if record.scenario.group in works
            and not record.scenario.check
            and (_one_kernel(record) or record.scenario.row.label in ("plain", "foak"))
            and record.runs
        ]
        rows = []
        for group, members in groups(chosen):
            for index, record in enumerate(members):
                label = record.scenario.row.label
                name = {"plain": "none", "foak": "all"}.get(label, label.removeprefix("foak."))
                plain = records.get(f"{group}/plain")
                saved = "" if plain is None or not plain.runs else f"{record.peak_bytes / plain.peak_bytes - 1:+.1%}"
                rows.append(
                    [
                        f"`{group}`" if index == 0 else "",
                        name,
                        _strong(f"{record.tokens_per_second:,.0f}", record),
                        _gain(record, records),
                        f"{record.peak_bytes / _GIB:.1f}",
                        "" if label == "plain" else saved,
                        str(judge(record, records)),
                    ]
                )
        if rows:
            yield f"{head(chosen)}\n\n{markdown(header, rows)}"


def terminal_tables(records: Records) -> Group:
    """A table for each work, with the figures of each row or the reason why it has none."""
    tables = []
    chosen = [record for record in records.values() if not record.scenario.check]
    for group, members in groups(chosen):
        header = (
            "by",
            "tokens/s",
            "against plain",
            "step, s",
            "p10 – p90",
            "peak GiB (held)",
            "loss (norm) off fp32",
        )
        table = Table(*header, title=escape(group), title_justify="left")
        for record in members:
            label = escape(record.scenario.row.label)
            if record.runs:
                step = record.step_seconds
                cells = [
                    f"{record.tokens_per_second:,.0f}",
                    _gain(record, records),
                    f"{step['median']:.3f}",
                    f"{step['p10']:.3f} – {step['p90']:.3f}",
                    memory(record),
                    str(judge(record, records)),
                ]
                table.add_row(label, *map(escape, cells))
            else:
                table.add_row(label, escape(record.status))
        tables.append(table)
    return Group(*tables)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def groups(chosen: Sequence[Record]) -> Iterator[tuple[str, list[Record]]]:
    """The rows of each work: plain first, the others, foak's last."""

    def order(record: Record) -> tuple[str, int, str]:
        label = record.scenario.row.label
        return record.scenario.group, 0 if label == "plain" else 2 if label.startswith("foak") else 1, label

    for group, members in itertools.groupby(sorted(chosen, key=order), key=lambda record: record.scenario.group):
        yield group, list(members)


def _is_whole(record: Record) -> bool:
    """Whether it trains dense batches, and not by one kernel alone."""
    return record.scenario.work.data == "dense" and not _one_kernel(record)


def _one_kernel(record: Record) -> bool:
    return record.scenario.row.by == "foak" and len(record.scenario.row.kernels) == 1


def _gain(record: Record, records: Records) -> str:
    """The gain over plain; only of a row whose loss allows it to count."""
    plain = records.get(f"{record.scenario.group}/plain")
    if plain is None or not plain.runs or record.scenario.row.label == "plain":
        return ""
    if judge(record, records).counts is False:
        return "does not count"
    return f"{record.tokens_per_second / plain.tokens_per_second - 1:+.1%}"


def memory(record: Record) -> str:
    held = record.reserved_bytes
    return f"{record.peak_bytes / _GIB:.1f}" + ("" if held is None else f" ({held / _GIB:.1f})")


def status(record: Record) -> str:
    return record.status if record.status == DOES_NOT_FIT else f"{record.status}: {record.reason}"


def _strong(text: str, record: Record) -> str:
    return f"**{text}**" if record.scenario.row.label == "foak" else text


def head(chosen: Sequence[Record]) -> str:
    """GPU, versions, and how often each row was measured."""
    measured = [record for record in chosen if record.runs]
    devices = _values(f"{r.device['processes']} × {r.device['name']}" for r in measured)
    versions = [
        f"{name} {found}"
        for name in sorted({name for record in measured for name in record.versions if name.startswith("foak-")})
        + list(_SHOWN)
        if (found := _values(record.versions[name] for record in measured if name in record.versions))
    ]
    commits = _values(record.commit for record in measured if record.commit)
    repeats = _values(str(len(record.runs)) for record in measured)
    steps = _values(f"{r.scenario.work.steps} steps after {r.scenario.work.warmup} of warm-up" for r in measured)
    return (
        f"{devices}; {', '.join(versions)}{f'; commit {commits}' if commits else ''}. Medians of {repeats} "
        f"{'run' if repeats == '1' else 'runs'} of {steps}."
    )


def _values(values: Iterable[str]) -> str:
    """The different values, each once."""
    return " / ".join(dict.fromkeys(values))
