"""Which implementation of an op runs for a given tensor: its Triton kernel or its plain PyTorch twin.

The choice is made on every call from the tensor itself, so that one process may hold models on several devices. It is
never made by catching an error: each answer has a reason, which `explain` puts into words.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Backend = Literal["triton", "reference"]

_TRITON_DEVICES = ("cuda",)  # ROCm devices carry this name too
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_FLOAT64 = torch.float64
_functorch_level = torch._C._functorch.peek_interpreter_stack

_by_device_type: dict[str, Backend] = {}
_forced: Backend | None = None
_interpreter_is_right = False


def backend_for(tensor: torch.Tensor, *others: torch.Tensor | None) -> Backend:
    """The implementation that an op runs for `tensor`; `others` are its further arguments, of which each may be None.

    "triton" for tensors on a GPU when `triton` can be imported, and for CPU tensors when the environment has
    `TRITON_INTERPRET=1` (Triton's interpreter, for tests). By itself the interpreter computes wrong numbers in bf16, so
    nothing runs in it before `foak.kernels.testing.make_interpreter_round_bf16` is called. "reference" elsewhere, and
    always when one of the tensors is float64 (the kernels compute in fp32) or a tensor subclass (a DTensor has no
    single block of memory to point at), and inside a transform of `torch.func`. Tensors on different devices get the
    reference too, whose error says so.
    """
    if _forced is not None:
        return _forced
    if type(tensor) not in PLAIN_TYPES or tensor.dtype is _FLOAT64:
        return "reference"
    device = tensor.device
    for other in others:
        if other is not None and (type(other) not in PLAIN_TYPES or other.dtype is _FLOAT64 or other.device != device):
            return "reference"
    if not torch.compiler.is_compiling() and _functorch_level() is not None:
        return "reference"
    backend = _by_device_type.get(device.type)
    if backend is None:
        backend = _choose(device.type)
        if not torch.compiler.is_compiling():
            _by_device_type[device.type] = backend
    return backend


def in_function_transform() -> bool:
    """Whether `torch.func` (grad, vmap, ...) is at work: it sees through plain PyTorch only."""
    return _functorch_level() is not None


def triton_available() -> bool:
    """Whether `triton` can be imported here. Imports it when asked for the first time."""
    return _triton_problem() is None


def explain(device_type: str) -> str:
    """One sentence for people: which implementation runs for tensors on `device_type` ("cuda", "cpu", ...), and why."""
    if _choose(device_type) == "triton":
        if _interpreting():
            return f"{device_type}: Triton kernels in Triton's slow interpreter, because TRITON_INTERPRET=1 is set"
        version = importlib.import_module("triton").__version__
        return f"{device_type}: Triton kernels (triton {version})"
    if not _has_kernels(device_type):
        return f"{device_type}: plain PyTorch, because the Triton kernels need a CUDA or ROCm device"
    if triton_available():
        return (
            f"{device_type}: plain PyTorch, because Triton's interpreter (TRITON_INTERPRET=1) computes wrong numbers "
            "in bf16 unless foak.kernels.testing.make_interpreter_round_bf16() is called"
        )
    return f"{device_type}: plain PyTorch, because triton cannot be imported ({_triton_problem()})"


def trust_interpreter() -> None:
    """Says that Triton's interpreter was made to compute as GPUs do, so that kernels may run in it from now on."""
    global _interpreter_is_right
    _interpreter_is_right = True
    _by_device_type.clear()


@contextmanager
def forced_backend(backend: Backend) -> Iterator[None]:
    """Inside the block every op of this process runs `backend` whatever its tensors are: for tests and debugging."""
    global _forced
    before = _forced
    _forced = backend
    try:
        yield
    finally:
        _forced = before


def _choose(device_type: str) -> Backend:
    if _interpreting() and not _interpreter_is_right:  # for any dtype: operands do not tell that of their product
        return "reference"
    return "triton" if _has_kernels(device_type) and triton_available() else "reference"


def _has_kernels(device_type: str) -> bool:
    return device_type in _TRITON_DEVICES or (device_type == "cpu" and _interpreting())


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_problem() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
