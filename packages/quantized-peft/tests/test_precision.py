"""The table of weights and mixed precision, column "LoRA on a quantized base": each row trains for a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from foak.core import AccelerationFramework, UnsupportedError
from foak.core.precision import COMBINATIONS, Combination
from foak.quantized_peft.plugin import QuantizedPeftPlugin

IDS = torch.randint(96, (8, 12), generator=torch.Generator().manual_seed(0))
CELLS = [cell for cell in COMBINATIONS if cell.method == "quantized_lora"]


class Sentences(Dataset[dict[str, Any]]):
    """Eight random sequences, to be learned by heart."""

    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": IDS[index], "labels": IDS[index]}


@pytest.fixture(params=["bitsandbytes", "auto_gptq"])
def base(request: pytest.FixtureRequest, checkpoint: Path, write_gptq: Callable[..., Any]) -> tuple[str, Path]:
    """A section, and a checkpoint that it loads."""
    return request.param, checkpoint if request.param == "bitsandbytes" else write_gptq().path


def prepared(
    combination: Combination, base: tuple[str, Path], folder: Path, on_gpu: bool
) -> tuple[AccelerationFramework, Trainer]:
    section, checkpoint = base
    tree = {"plugins": {"peft": {"quantization": {section: {}}}}}
    framework = AccelerationFramework(tree, plugins=[QuantizedPeftPlugin])
    model = framework.load_model(checkpoint, dtype=getattr(torch, combination.weights))
    mode = {} if combination.mixed_precision == "none" else {combination.mixed_precision: True}
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not on_gpu,
        report_to=[],
        max_steps=6,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **mode,
    )
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    return framework, Trainer(model=adapted, args=args, train_dataset=Sentences())


def case(combination: Combination) -> Any:
    name = f"{combination.weights}-{combination.mixed_precision}"
    return pytest.param(combination, id=name, marks=[pytest.mark.gpu] if combination.mixed_precision == "fp16" else [])


@pytest.mark.parametrize("combination", [case(cell) for cell in CELLS])
def test_each_combination_trains(combination: Combination, base: tuple[str, Path], tmp_path: Path) -> None:
    assert combination.refusal is None
    framework, trainer = prepared(combination, base, tmp_path, combination.mixed_precision == "fp16")
    framework.apply(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert losses[-1] < losses[0] - 0.02  # one batch, so that nothing but learning moves it


@pytest.mark.parametrize("combination", [cell for cell in CELLS if cell.mixed_precision == "fp16"])
def test_fp16_is_refused_on_a_cpu(combination: Combination, base: tuple[str, Path], tmp_path: Path) -> None:
    framework, trainer = prepared(combination, base, tmp_path, on_gpu=False)
    with pytest.raises(UnsupportedError, match="fp16 is true, but on a CPU"):
        framework.apply(trainer)
