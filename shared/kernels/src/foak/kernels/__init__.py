"""Fused ops for training language models: plain differentiable functions on tensors.

Each op has a Triton kernel and a plain PyTorch twin; `foak.kernels.backend` says which of them runs where. Importing
this package imports torch and nothing else: triton is imported when a kernel runs for the first time.
"""

from foak.kernels._version import __version__

__all__ = ["__version__"]
