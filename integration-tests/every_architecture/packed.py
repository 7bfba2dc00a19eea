"""Which types can be trained padding-free: the table of those that are refused, and the walk that holds it to account.

python integration-tests/every_architecture/packed.py            # print the summary
python integration-tests/every_architecture/packed.py --write    # write it into integration-tests/README.md
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from counts import WALKED
from tiny_configs import VOCAB_SIZE, tiny_type
from walk import Step, build, differences, quiet, step_of

from foak.core import AccelerationFramework, UnsupportedError
from foak.padding_free.packed import PACKED, PackedSequences
from foak.padding_free.plugin import PaddingFreePlugin

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- padding-free: begin -->", "<!-- padding-free: end -->"
LENGTHS = (5, 11, 1, 9, 13, 2)

REFUSED: Mapping[str, str] = {
    "reads attention masks outside of transformers' attention interface": """
        axk2 big_bird bloom deepseek_v32 doge dots3_note dots3_note_text falcon glm_moe_dsa gpt_neo gpt_neox_japanese
        hy_v4 megatron-bert mpt mvp qwen4_exp qwen4_exp_text rembert roformer trocr xglm
    """,
    "a layer mixes tokens across sequences": """
        falcon_mamba jamba mamba mamba2 minimax openai-gpt recurrent_gemma reformer rwkv zaya
    """,
    "masks by bidirectional_mask_function": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart
    """,
    "masks by or_masks": "gemma4_unified git",
    "the logits of packed sequences differ from those of padded ones": """
        camembert data2vec-text roberta roberta-prelayernorm xlm xlm-roberta xlm-roberta-xl xlnet xmod
    """,
    "a bias over positions cannot be packed": "inkling2_loop_text inkling2_text inkling_text",
    "caches and cross attention cannot be packed": "blt deepseek_v4",
    "so nothing can be held against them": "cpmant prophetnet",
    "short sequences could not be tried": "gemma4_assistant gemma4_unified_assistant xlstm",
    "it has no embedding of tokens": "musicgen musicgen_melody",
}
"""Words of the reason to the types that are refused for it."""

RANDOM_IN_TRAINING = ("phimoe",)
"""Types whose training step differs each time (a jitter of the router's input): stepped in evaluation mode."""

REASON_OF: Mapping[str, str] = {name: reason for reason, names in REFUSED.items() for name in names.split()}


@dataclass(frozen=True)
class PackedOutcome:
    """What one type showed.

    Attributes:
        refusal: why it is refused, or None.
        differences: of the packed step from the padded one, beyond rounding.
        mixers: layers without attention that take each sequence by itself.
    """

    refusal: str | None
    differences: tuple[str, ...] = ()
    mixers: int = 0


def walk_packed(model_type: str) -> PackedOutcome:
    """Apply padding-free training to a tiny model of a type, and step it packed beside its plain copy padded."""
    with quiet():
        model = build(tiny_type(model_type))
        if model_type in RANDOM_IN_TRAINING:
            model.eval()
        plain = copy.deepcopy(model)
        configuration = {"plugins": {"training": {"attention": {"padding_free": {}}}}}
        try:
            report = AccelerationFramework(configuration, plugins=[PaddingFreePlugin]).apply(model)
        except UnsupportedError as error:
            return PackedOutcome(str(error))
        padded, packed = batches()
        mine = step_of(model, packed)
        theirs = step_of(plain, padded)
    rows = [row[:length] for row, length in zip(theirs.logits, LENGTHS, strict=True)]
    expected = Step(theirs.loss, torch.cat(rows)[None], theirs.gradients)
    mixers = sum(record.rule == "packed_mixer" for record in report.patched)
    return PackedOutcome(None, tuple(differences(expected, mine)), mixers)


def batches() -> tuple[dict[str, Any], dict[str, Any]]:
    """The same sequences padded at the right, and packed into several buckets."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]
    labels = [torch.cat([torch.tensor([-100]), part[1:]]) for part in parts]
    pad = torch.nn.utils.rnn.pad_sequence
    padded = {
        "input_ids": pad(parts, batch_first=True),
        "attention_mask": pad([torch.ones_like(part) for part in parts], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }
    layout = PackedSequences(LENGTHS, call_cost=0.0)
    packed = {"input_ids": torch.cat(parts)[None], "labels": torch.cat(labels)[None], PACKED: layout}
    return padded, {**packed, "position_ids": layout.position_ids()}


def summary() -> str:
    """The table as Markdown."""
    served = [name for name in WALKED if name not in REASON_OF]
    lines = [
        f"transformers {transformers.__version__}, float32 on a CPU: of {len(WALKED)} types {len(served)} are trained",
        f"padding-free, with loss, logits and gradients equal to the padded step; {len(REASON_OF)} are refused:",
        "",
        *(f"- {reason}: {', '.join(sorted(names.split()))}" for reason, names in REFUSED.items()),
    ]
    return "\n".join(lines)


def written() -> str:
    """The summary that the README holds."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main(arguments: list[str], say: Callable[[str], object] = print) -> None:
    """Print the summary, or write it with ``--write``."""
    if arguments == ["--write"]:
        text = README.read_text(encoding="utf-8")
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        README.write_text(f"{before}\n\n{summary()}\n\n{after}", encoding="utf-8")
        say(f"wrote {README}")
    else:
        say(summary())


if __name__ == "__main__":
    main(sys.argv[1:])
