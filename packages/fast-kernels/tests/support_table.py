"""The README's table "which kernel for which model", made from what the plugin does to each tiny configuration.

python packages/fast-kernels/tests/support_table.py           prints it
python packages/fast-kernels/tests/support_table.py --write   puts it into the README
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from foak.core import AccelerationFramework
from foak.core.report import PatchRecord

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
COLUMNS = {
    "norm": ("rms_norm", "layer_norm"),
    "position": ("rope",),
    "loss": ("linear_cross_entropy",),
    "activation": ("swiglu", "geglu"),
    "fused LoRA": ("fused_lora",),
}
NOTHING_OF_THE_KIND = {
    "norm": "no norm",
    "position": "no rotary embedding",
    "loss": "no output head",
    "activation": "no gated MLP",
    "fused LoRA": "no linear layer that an adapter fits",
}
KERNELS: dict[str, Any] = {
    "fast_loss": "auto",
    "fast_rms_layernorm": "auto",
    "fast_rope_embeddings": "auto",
    "fast_activation": "auto",
    "fused_lora": "auto",
}


def _architectures() -> Any:
    """The module beside this file, under whichever import mode the tests run."""
    name = "foak_test_architectures"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "architectures.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def records_of(architecture: Any) -> list[PatchRecord]:
    """What every kernel does to one architecture with an adapter on each linear layer, on the meta device."""
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(architecture.tiny_config())
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    framework = AccelerationFramework({"plugins": {"training": {"fused_ops_and_kernels": KERNELS}}})
    return list(framework.apply(adapted, strict=False))


def cell(column: str, records: Iterable[PatchRecord]) -> str:
    """One cell: what is patched, and what is kept and why."""
    mine = [record for record in records if record.rule in COLUMNS[column]]
    if not mine:
        return f"– ({NOTHING_OF_THE_KIND[column]})"
    patched = sorted({record.kernel for record in mine if record.outcome == "patched"})
    kept = sorted({f"{record.module_class}: {record.reason}" for record in mine if record.outcome == "kept"})
    parts = [", ".join(patched)] if patched else []
    parts += [f"kept: {reason}" for reason in kept]
    return "; ".join(parts)


def table() -> str:
    """The table as Markdown."""
    lines = [f"| model | {' | '.join(COLUMNS)} |", "|" + " --- |" * (len(COLUMNS) + 1)]
    for architecture in _architectures().ARCHITECTURES:
        records = records_of(architecture)
        lines.append(f"| {architecture.name} | {' | '.join(cell(column, records) for column in COLUMNS)} |")
    return "\n".join(lines)


def replaced(text: str) -> str:
    """The README's text with the present table between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
