"""SmolLM2-135M on ragged sequences on a CPU: real tokens per second padded, padding-free and with multipack.

    python packages/padding-free/benchmarks/smollm2_ragged.py [--steps 6] [--batch 8] [--kernels]

LoRA r16 on all linear layers, float32, plain `Trainer`; lengths have the shape of FLAN (log-normal, short with a heavy
tail), a tenth of its size so that a CPU gets through. Every mode starts from the same weights and trains the same
examples in the same order (multipack: in batches of as many tokens on average). The first step of a mode is not
counted, and is the check: its loss is the padded one's for the same samples.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from foak.core import AccelerationFramework
from foak.core.train.model import LoadedModel, load_model
from foak.core.train.runfile import read_run_file

RUN_FILE = Path(__file__).parents[3] / "examples" / "quickstart" / "run.yaml"
KERNELS = {
    "fast_loss": "fused_linear",
    "fast_rms_layernorm": True,
    "fast_rope_embeddings": True,
    "fast_activation": True,
}
TOLERANCE = 1e-4
"""Relative, of two losses of one batch in float32."""


def examples(count: int, vocab_size: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(count, generator=generator).mul(0.9).add(3.0).exp().long().clamp(2, 204)
    return [
        {"input_ids": (ids := torch.randint(5, vocab_size, (int(n),), generator=generator).tolist()), "labels": ids}
        for n in lengths
    ]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Seconds from one step's end to the next's."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now


class Counted(Trainer):  # type: ignore[misc]
    """Keeps the real tokens of every step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        self.__dict__.setdefault("tokens", []).append(
            int(mask.sum()) if mask is not None else inputs["input_ids"].numel()
        )
        return super().training_step(model, inputs, *args, **kwargs)


def measure(loaded: LoadedModel, data: Any, training: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = get_peft_model(copy.deepcopy(loaded.model), LoraConfig(r=16, lora_alpha=32, **targets))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch,
            max_steps=options.steps + 1,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Counted(
            model,
            arguments,
            train_dataset=data,
            data_collator=DataCollatorForSeq2Seq(loaded.tokenizer),
            callbacks=[clock := Clock()],
        )
        report = AccelerationFramework({"plugins": {"training": training}}).apply(trainer) if training else None
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "real_tokens_per_second": round(sum(trainer.tokens[1:]) / sum(clock.seconds[1:]), 1),
        "tokens": sum(trainer.tokens[1:]),
        "seconds": round(sum(clock.seconds[1:]), 1),
        "first_loss": losses[0],
        "notes": [] if report is None else report.notes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--kernels", action="store_true", help="foak's kernels in every mode")
    options = parser.parse_args()
    loaded = load_model(read_run_file(RUN_FILE, []))
    data: Any = examples(options.batch * (options.steps + 2), loaded.model.config.vocab_size)
    kernels = {"fused_ops_and_kernels": KERNELS} if options.kernels else {}
    free = {"attention": {"padding_free": {}}}
    rows = {}
    for name, training in {
        "padded": kernels,
        "padding-free": {**kernels, **free},
        "multipack": {**kernels, **free, "dataloader": {"multipack": {}}},
    }.items():
        rows[name] = measure(loaded, data, training, options)
        print(name, json.dumps(rows[name]), flush=True)
    assert abs(rows["padding-free"]["first_loss"] / rows["padded"]["first_loss"] - 1) < TOLERANCE
    rate = {name: row["real_tokens_per_second"] for name, row in rows.items()}
    for name in ("padding-free", "multipack"):
        print(f"{name}: {rate[name] / rate['padded']:.2f} x padded")


if __name__ == "__main__":
    main()
