"""The counts of the walk, between two markers in the README beside this folder.

python integration-tests/every_architecture/counts.py            # print them
python integration-tests/every_architecture/counts.py --write    # write them into integration-tests/README.md
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import transformers
from tiny_configs import UNTESTABLE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from walk import Outcome, walk

from foak.core.report import PatchRecord

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- every architecture: begin -->", "<!-- every architecture: end -->"

MAPPED: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every type that transformers maps to a causal language model."""

NOT_BUILT: Mapping[str, str] = {row.model_type: row.reason for row in UNTESTABLE if find_spec(row.package) is None}
"""Type to the reason for which it cannot be built here."""

WALKED: tuple[str, ...] = tuple(name for name in MAPPED if name not in NOT_BUILT)
"""The types that are walked."""

NO_FUSED_LOSS: Mapping[str, str] = {
    "dory": "its output head is not a plain linear layer",
    "gemma4_assistant": "its forward takes no labels",
    "gemma4_unified_assistant": "its forward takes no labels",
    "musicgen": "it has a head for each codebook",
    "musicgen_melody": "it has a head for each codebook",
    "prophetnet": "its loss reads log-probabilities of several future tokens: the real logits are computed",
}
"""The types whose loss is not computed without logits, and why; for all others it is."""


def table(outcomes: Mapping[str, Outcome]) -> str:
    """The counts as Markdown.

    Args:
        outcomes: type to what it showed, for every type of `WALKED`.
    """
    equal = [name for name, outcome in outcomes.items() if not outcome.differences]
    fused = [name for name, outcome in outcomes.items() if outcome.loss.fused and not outcome.loss.computed]
    computed = [name for name, outcome in outcomes.items() if outcome.loss.computed]
    lines = [
        f"transformers {transformers.__version__}, float32 on a CPU, every kernel on `auto`:",
        "",
        "| types | count |",
        "|---|---|",
        f"| mapped to a causal language model | {len(MAPPED)} |",
        f"| built and stepped | {len(outcomes)} |",
        f"| of these, with equal loss, logits and gradients | {len(equal)} |",
        f"| of these, with a loss without logits | {len(fused)} |",
        f"| of these, with logits that had to be computed during the step | {len(computed)} |",
        f"| not built | {len(NOT_BUILT)} |",
        "",
        "| rule | types with a module patched | modules patched | types with a module kept |",
        "|---|---|---|---|",
        *_rule_rows(outcomes),
        "",
        "Kept, with the reason:",
        "",
        *_kept_rows(outcomes),
        "",
        "No loss without logits:",
        "",
        *(f"- {name}: {reason}" for name, reason in NO_FUSED_LOSS.items()),
        "",
        "Not built:",
        "",
        *(f"- {name}: {reason}" for name, reason in NOT_BUILT.items()),
    ]
    return "\n".join(lines)


def _rule_rows(outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    for rule in sorted({record.rule for outcome in outcomes.values() for record in outcome.applied}):
        patched = {name: _count(outcome, rule, "patched") for name, outcome in outcomes.items()}
        kept = [name for name, outcome in outcomes.items() if _count(outcome, rule, "kept")]
        types = sum(count > 0 for count in patched.values())
        yield f"| {rule} | {types} | {sum(patched.values())} | {len(kept)} |"


def _count(outcome: Outcome, rule: str, what: str) -> int:
    return sum(record.rule == rule and record.outcome == what for record in outcome.applied)


def _kept_rows(outcomes: Mapping[str, Outcome]) -> Iterable[str]:
    types: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, outcome in outcomes.items():
        for record in outcome.applied.kept:
            types[record.rule, _without_numbers(record)].add(name)
    for (rule, reason), names in sorted(types.items()):
        examples = ", ".join(sorted(names)[:4]) + (", …" if len(names) > 4 else "")
        yield f"- {rule}, {len(names)} type{'s' * (len(names) > 1)} ({examples}): {reason}"


def _without_numbers(record: PatchRecord) -> str:
    """A reason without what depends on the machine or on the tiny size."""
    return re.sub(r"\d+(\.\d+)?e[+-]\d+|\(\d+\)", "…", record.reason)


def written() -> str:
    """The counts that the README holds."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def write(counts: str) -> None:
    """Put the counts into the README."""
    text = README.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(f"{before}\n\n{counts}\n\n{after}", encoding="utf-8")


def main(arguments: list[str], say: Callable[[str], object] = print) -> None:
    """Walk every type; print the counts, or write them with ``--write``."""
    counts = table({name: walk(name) for name in WALKED})
    if arguments == ["--write"]:
        write(counts)
        say(f"wrote {README}")
    else:
        say(counts)


if __name__ == "__main__":
    main(sys.argv[1:])
