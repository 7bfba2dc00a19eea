"""Data that is the same in every run: random words of a tokenizer that has one token for each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from foak_bench.lengths import DISTRIBUTIONS
from foak_bench.scenarios import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["make_tokenizer", "write_data"]

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_MOST_WORDS = 32000
# Rows that fill their batches by tokens choose among this many times what they train, so that the last batches of an
# epoch, which stay part empty, are seldom among them.
_CHOICE = 3


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers, one token each; at most as many as the model's vocabulary holds."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *map(str, range(_words(vocab_size)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token=None
    )


def write_data(path: Path, work: Work, vocab_size: int) -> None:
    """Writes the run's texts, one a sequence: of dense data four steps' worth, over and over, so that the loss falls.

    A text has a word for each token, so that TRL cuts a dense one to exactly `work.seq` tokens. With the end of text
    that TRL adds, a ragged one has the length that was drawn, or `work.seq`.
    """
    generator = random.Random(0)
    words = _words(vocab_size)
    texts = [" ".join(str(generator.randrange(words)) for _ in range(length)) for length in _lengths(work)]
    count = _samples(work) if work.data == "dense" else len(texts)
    with path.open("w", encoding="utf-8") as lines:
        for index in range(count):
            lines.write(json.dumps({"text": texts[index % len(texts)]}) + "\n")


def _samples(work: Work) -> int:
    """Samples that are trained where each step takes `work.batch` of them on each device."""
    return (work.warmup + work.steps) * work.batch * work.gpus


def _lengths(work: Work) -> list[int]:
    """Words of each text that differs from the others."""
    if work.data == "dense":
        return [work.seq] * (4 * work.batch * work.gpus)
    distribution = DISTRIBUTIONS[work.data]
    samples, tokens = _samples(work), _CHOICE * (work.warmup + work.steps) * work.tokens * work.gpus
    lengths: list[int] = []
    total = 0
    for length in distribution.draw(max(samples, tokens)):
        if len(lengths) >= samples and total >= tokens:
            break
        lengths.append(min(work.seq, length) - 1)
        total += lengths[-1]
    return lengths


def _words(vocab_size: int) -> int:
    return min(vocab_size - len(_SPECIAL), _MOST_WORDS)
