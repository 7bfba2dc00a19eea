"""Data that is the same in every run: random words of a tokenizer that has one token for each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

from foak_bench.scenarios import Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["make_tokenizer", "write_data"]

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_MOST_WORDS = 32000
# Ragged lengths: the median and the spread (of the logarithm) of instruction data, with a tail up to the limit.
_MEDIAN_LENGTH, _LENGTH_SPREAD = 200, 1.0


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
    """Writes one text for each sequence of the run: four steps' worth of them, over and over, so that the loss falls.

    A text has a word for each token, so that TRL cuts a dense one to exactly `work.seq` tokens.
    """
    generator = random.Random(0)
    per_step = work.batch * work.gpus
    words = _words(vocab_size)

    def length() -> int:
        if work.data == "dense":
            return work.seq
        drawn = _MEDIAN_LENGTH * generator.lognormvariate(0.0, _LENGTH_SPREAD)
        return max(8, min(work.seq, round(drawn)))

    distinct = [" ".join(str(generator.randrange(words)) for _ in range(length())) for _ in range(4 * per_step)]
    with path.open("w", encoding="utf-8") as lines:
        for index in range((work.warmup + work.steps) * per_step):
            lines.write(json.dumps({"text": distinct[index % len(distinct)]}) + "\n")


def _words(vocab_size: int) -> int:
    return min(vocab_size - len(_SPECIAL), _MOST_WORDS)
