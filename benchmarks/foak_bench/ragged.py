"""The table of ragged data: each way to batch it beside padded batches, dense ones, and TRL's packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from foak_bench.records import Record
from foak_bench.scenarios import Work
from foak_bench.tables import NONE, groups, head, markdown, memory, status
from foak_bench.verdict import judge

__all__ = ["ragged_table"]

_HEADER = (
    "work",
    "batches",
    "s per million tokens",
    "real tokens/s",
    "against plain padded",
    "of foak's dense",
    "of TRL packed",
    "peak GiB (held)",
    "loss (norm) off fp32",
)


def ragged_table(folders: Mapping[str, Mapping[str, Record]]) -> str:
    """Every work on ragged data, with the dense batches of foak's that its folder holds."""
    tables = []
    for records in folders.values():
        chosen = [record for record in records.values() if not record.scenario.check]
        works = {record.scenario.group for record in chosen if record.scenario.work.data != "dense"}
        compared = [record for record in chosen if record.scenario.group in works or _is_compared(record, chosen)]
        if any(record.runs for record in compared):
            tables.append(f"{head(compared)}\n\n{markdown(_HEADER, list(_rows(compared, records)))}")
    return "\n\n".join(tables) or NONE


def _rows(compared: list[Record], records: Mapping[str, Record]) -> Iterator[list[str]]:
    for group, members in groups(compared):
        for index, record in enumerate(members):
            cells = [f"`{group}`" if index == 0 else "", _batches(record)]
            if not record.runs:
                yield [*cells, status(record), *[""] * (len(_HEADER) - 3)]
                continue
            speed = record.tokens_per_second
            dense = _dense(record, records)
            yield [
                *cells,
                f"{1e6 / speed:.1f}",
                f"**{speed:,.0f}**" if "multipack" in record.scenario.row.plugins else f"{speed:,.0f}",
                _ratio(record, records.get(f"{group}/plain"), percent=True),
                "" if dense is record else _ratio(record, dense),
                _ratio(record, records.get(f"{group}/trl-packed")),
                memory(record),
                str(judge(record, records)),
            ]


def _is_compared(record: Record, chosen: list[Record]) -> bool:
    """Whether ragged works are held against it."""
    return any(_is_dense_of(record, other) for other in chosen if other.scenario.work.data != "dense")


def _batches(record: Record) -> str:
    row, work = record.scenario.row, record.scenario.work
    if row.by == "trl-packed":
        return "TRL packed, FlexAttention" + (" (foak's loader)" if work.method == "gptq" else "")
    by = "TRL" if row.by == "plain" else row.by
    if work.data == "dense":
        return f"{by}, dense"
    if "padding_free" not in row.plugins:
        return f"{by}, padded"
    return f"{by}, padding-free" + (", multipack" if "multipack" in row.plugins else "")


def _ratio(record: Record, other: Record | None, *, percent: bool = False) -> str:
    """The speed against another row's; nothing for the row itself, and where the other was not measured."""
    if other is None or not other.runs or other is record:
        return ""
    ratio = record.tokens_per_second / other.tokens_per_second
    return f"{ratio - 1:+.1%}" if percent else f"{ratio:.2f} ×"


def _dense(record: Record, records: Mapping[str, Record]) -> Record | None:
    """foak's run on dense batches of as many tokens, of the same model, method and settings."""
    return next((other for other in records.values() if _is_dense_of(other, record)), None)


def _is_dense_of(dense: Record, ragged: Record) -> bool:
    if dense.scenario.check or dense.scenario.row.label != "foak" or dense.scenario.work.data != "dense":
        return False
    ours, theirs = (_without_batches(record.scenario.work) for record in (dense, ragged))
    work = dense.scenario.work
    return ours == theirs and work.batch * work.seq == ragged.scenario.work.tokens


def _without_batches(work: Work) -> Work:
    return dataclasses.replace(work, batch=1, seq=1, data="dense", steps=1, warmup=1, tokens=1)
