"""Quantizes the tiny llama with AutoGPTQ on a CPU, in several ways: `python write_autogptq.py FOLDER`.

Runs in AutoGPTQ's own environment. Its quantizer works on a CPU once the device that it calls CUDA_0 is one.
"""

import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.modeling import _base
from auto_gptq.modeling.llama import LlamaGPTQForCausalLM
from tiny_llama import calibration, tiny_llama, write_expected

VARIANTS = {
    "autogptq-4bit-g32": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "autogptq-4bit-g32-asym-act": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "autogptq-8bit-column": {"bits": 8, "group_size": -1, "sym": True, "desc_act": False},
    "autogptq-3bit-g64-asym": {"bits": 3, "group_size": 64, "sym": False, "desc_act": False},
    "autogptq-2bit-g16": {"bits": 2, "group_size": 16, "sym": True, "desc_act": False},
}


def dense(layer: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The weight that the layer multiplies with: its product with the identity, which is exact."""
    layer.to(dtype)
    with torch.no_grad():
        product = layer(torch.eye(layer.infeatures, dtype=dtype))
    assert not layer.bias.any()
    return product.t().contiguous()


def main(folder: Path) -> None:
    _base.CUDA_0 = torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    for name, options in VARIANTS.items():
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        model = LlamaGPTQForCausalLM(tiny_llama(), False, BaseQuantizeConfig(**options))
        # The layers whose product is plain PyTorch on a CPU.
        model.quantize(calibration(), use_triton=False, use_cuda_fp16=False)
        model.save_quantized(str(target), use_safetensors=True)
        layers = {n: m for n, m in model.model.named_modules() if hasattr(m, "qweight")}
        assert len(layers) == 7
        write_expected(
            target,
            {n: dense(layer, torch.float16) for n, layer in layers.items()},
            {n: dense(layer, torch.float32) for n, layer in layers.items()},
            f"auto-gptq {version('auto_gptq')}, transformers {version('transformers')}, torch {version('torch')}",
        )
        print(name, sorted(path.name for path in target.iterdir()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
