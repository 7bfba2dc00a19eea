"""A tiny model, a byte-level tokenizer and run files for the tests of the main job; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

RunWriter = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama (hidden size 32) whose tokenizer has one token for each byte."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def write_run(tmp_path: Path, tiny_model: Path) -> RunWriter:
    """Writes data and a run file into `tmp_path`; keyword arguments replace whole sections, None leaves one out."""

    def write(**sections: Any) -> Path:
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{n} + 1 ="},
                    {"role": "assistant", "content": f"{n + 1}" * (n % 3 + 1)},
                ]
            }
            for n in range(24)
        ]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        content = {
            "model": {"name_or_path": str(tiny_model), "dtype": "float32"},
            "data": {"train": "train.jsonl", "eval_fraction": 0.25},
            "peft": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "all-linear"},
            "training": {
                "output_dir": str(tmp_path / "out"),
                "max_steps": 4,
                "per_device_train_batch_size": 2,
                "learning_rate": 1e-2,
                "logging_steps": 1,
                "bf16": False,
                "gradient_checkpointing": False,
                "save_strategy": "no",
            },
        }
        for name, section in sections.items():
            if isinstance(section, dict) and name in content:
                content[name] = {**content[name], **section}
            elif section is None:
                content.pop(name, None)
            else:
                content[name] = section
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    return write
