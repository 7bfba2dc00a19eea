"""Quantizes the tiny llama with GPTQModel on a CPU, in several ways: `python write_gptqmodel.py FOLDER [VARIANT ...]`.

Runs in GPTQModel's own environment, with GPTQMODEL_CPU_WORKERS=2.
"""

import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tiny_llama import VOCABULARY, calibration, tiny_llama, write_expected
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

VARIANTS = {
    "gptqmodel-4bit-g32": {"bits": 4, "group_size": 32},
    "gptqmodel-4bit-g32-act": {"bits": 4, "group_size": 32, "desc_act": True, "act_group_aware": False},
    "gptqmodel-4bit-g64-asym-v2": {"bits": 4, "group_size": 64, "sym": False, "format": "gptq_v2"},
    "gptqmodel-4bit-g32-asym": {"bits": 4, "group_size": 32, "sym": False},
    "gptqmodel-8bit-column": {"bits": 8, "group_size": -1, "act_group_aware": False},
    "gptqmodel-3bit-g32": {"bits": 3, "group_size": 32},
    "gptqmodel-2bit-g16-asym-v2": {"bits": 2, "group_size": 16, "sym": False, "format": "gptq_v2"},
    "gptqmodel-dynamic": {
        "bits": 4,
        "group_size": 32,
        "dynamic": {r"-:.*\.v_proj": {}, r".*\.down_proj": {"bits": 8, "group_size": 64}},
    },
}


def save_plain(folder: Path) -> None:
    """The unquantized model with a tokenizer, which GPTQModel asks for."""
    tiny_llama().save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w0",
    )
    tokenizer.save_pretrained(folder)


def dense(layer: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The layer's own decoding, by the method that it compiles for its forward."""
    layer.scales = layer.scales.to(dtype)
    layer.clear_weight_cache()
    return type(layer).dequantize_weight(layer).t().contiguous()


def main(folder: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as plain:
        save_plain(Path(plain))
        for name in names:
            target = folder / name
            shutil.rmtree(target, ignore_errors=True)
            model = GPTQModel.load(plain, QuantizeConfig(**VARIANTS[name]), dtype=torch.float16)
            model.quantize(calibration(), batch_size=1)
            model.save(str(target))
            loaded = GPTQModel.load(str(target), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
            layers = {n: m for n, m in loaded.model.named_modules() if hasattr(m, "qweight")}
            write_expected(
                target,
                {n: dense(layer, torch.float16) for n, layer in layers.items()},
                {n: dense(layer, torch.float32) for n, layer in layers.items()},
                f"gptqmodel {version('gptqmodel')}, transformers {version('transformers')}, torch {version('torch')}",
            )
            for extra in ("quant_log.csv", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                (target / extra).unlink(missing_ok=True)
            print(name, len(layers), sorted(path.name for path in target.iterdir()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(VARIANTS))
