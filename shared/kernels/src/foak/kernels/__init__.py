"""Fused ops for training language models: plain differentiable functions on tensors.

Each op has a Triton kernel and a plain PyTorch twin; `foak.kernels.backend` says which of them runs where. Importing
this package imports torch and nothing else: triton is imported when a kernel runs for the first time.
"""

from foak.kernels._version import __version__
from foak.kernels.cross_entropy import cross_entropy
from foak.kernels.geglu import geglu
from foak.kernels.gptq import dequantize_gptq
from foak.kernels.layer_norm import layer_norm
from foak.kernels.linear_cross_entropy import linear_cross_entropy
from foak.kernels.lora import LoraMember, PromisedLinear, lora_gated_linear, lora_linear, promise_lora_linears
from foak.kernels.nf4 import NestedScales, dequantize_nf4
from foak.kernels.rms_norm import rms_norm
from foak.kernels.rope import rope
from foak.kernels.swiglu import swiglu

__all__ = [
    "LoraMember",
    "NestedScales",
    "PromisedLinear",
    "__version__",
    "cross_entropy",
    "dequantize_gptq",
    "dequantize_nf4",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "lora_gated_linear",
    "lora_linear",
    "promise_lora_linears",
    "rms_norm",
    "rope",
    "swiglu",
]
