"""What the pages take for granted: a model, a trainer, tensors, files of the names that they use. All of it tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from blocks import ROOT

__all__ = ["Names", "World", "run_overrides"]

HUB_IDS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "path-or-hub-id")
GPTQ = ROOT / "integration-tests" / "gptq_interop" / "fixtures" / "gptqmodel-4bit-g32"

# What makes a run of a page a matter of seconds; everything else is as the page has it.
_TINY = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_length": 32,
    "max_steps": 1,
    "save_strategy": "no",
}


def run_overrides() -> list[str]:
    """The options behind a `foak train …` of a page that make it short."""
    return [part for key, value in _TINY.items() for part in ("--set", f"training.{key}={value}")]


class World:
    """A folder in which a page's commands and code run.

    Args:
        folder: an empty folder.
        tiny_model: the folder of a tiny model with a tokenizer.
        config: the configuration that the page shows first, or None.
        run: the run file that the page shows first, or None.
    """

    def __init__(self, folder: Path, tiny_model: Path, config: str | None, run: str | None) -> None:
        self.folder = folder
        for name in HUB_IDS:
            # A local folder of this name is found before the hub is asked.
            shutil.copytree(tiny_model, folder / name)
        rows = [{"text": "the quick brown fox " * (n % 3 + 1)} for n in range(24)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        default = {"plugins": {"training": {"fused_ops_and_kernels": {"fast_loss": "fused_linear"}}}}
        self.config = config or yaml.safe_dump(default)
        (folder / "foak.yaml").write_text(self.config, encoding="utf-8")
        self.run = run or yaml.safe_dump(
            {
                "model": {"name_or_path": HUB_IDS[0]},
                "data": {"train": "train.jsonl"},
                "peft": {"r": 4, "target_modules": "all-linear"},
                "acceleration": default,
            }
        )
        (folder / "run.yaml").write_text(self.run, encoding="utf-8")

    def model_for(self, config: Mapping[str, Any] | None = None) -> torch.nn.Module:
        """A model that fits a configuration: quantized as it says, else plain; without an adapter."""
        from foak.core import AccelerationFramework

        base = ((config or {}).get("plugins", {}).get("peft") or {}).get("quantization") or {}
        name = GPTQ if "auto_gptq" in base else self.folder / HUB_IDS[0]
        if "auto_gptq" in base or "bitsandbytes" in base:
            return AccelerationFramework(dict(config or {})).load_model(str(name), dtype=torch.float32)
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


class Names(dict[str, Any]):
    """The globals of a page's code: what it does not define itself is made when it is read.

    Args:
        world: the page's folder.
        kept: what earlier blocks of the page defined.
    """

    def __init__(self, world: World, kept: Mapping[str, Any]) -> None:
        super().__init__(kept)
        self.world = world
        # Where a page says `model = …` and then `trainer`, the trainer holds that model.
        self.makers: dict[str, Callable[[], Any]] = {
            "model": lambda: world.model_for(yaml.safe_load(world.config)),
            "trainer": self._trainer,
            "framework": self._framework,
            "dataset": lambda: [
                {"input_ids": [5, 6, 7, 8][: 2 + n % 3], "labels": [5, 6, 7, 8][: 2 + n % 3]} for n in range(8)
            ],
            "DataLoader": lambda: torch.utils.data.DataLoader,
            "mine": self._collator,
            "x": lambda: torch.randn(4, 64, requires_grad=True),
            "weight": lambda: torch.randn(64, requires_grad=True),
            "gate": lambda: torch.randn(4, 64, requires_grad=True),
            "up": lambda: torch.randn(4, 64, requires_grad=True),
        }

    def __missing__(self, name: str) -> Any:
        if name not in self.makers:
            raise KeyError(name)
        self[name] = self.makers[name]()
        return self[name]

    def _framework(self) -> Any:
        from foak.core import AccelerationFramework

        return AccelerationFramework(self.world.folder / "foak.yaml")

    def _collator(self) -> Any:
        from transformers import AutoTokenizer, DataCollatorForTokenClassification

        tokenizer = AutoTokenizer.from_pretrained(self.world.folder / HUB_IDS[0])
        return DataCollatorForTokenClassification(tokenizer, padding=True)

    def _trainer(self) -> Any:
        from datasets import load_dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer
        from trl import SFTConfig, SFTTrainer

        folder = self.world.folder
        return SFTTrainer(
            model=self["model"],
            args=SFTConfig(output_dir=str(folder / "trainer"), report_to=[], bf16=False, disable_tqdm=True, **_TINY),
            train_dataset=load_dataset("json", data_files=str(folder / "train.jsonl"), split="train"),
            processing_class=AutoTokenizer.from_pretrained(folder / HUB_IDS[0]),
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
