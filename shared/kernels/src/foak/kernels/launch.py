"""What a kernel launch needs to know of the device that a tensor lies on."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()
_multiprocessors: dict[int, int] = {}


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which kernels are launched on `tensor`'s device, on that device's current stream.

    Triton launches on the current device whatever its arguments are. Changing it costs microseconds, so it is done
    only where it differs.
    """
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(tensor.get_device())


def multiprocessor_count(tensor: Tensor) -> int:
    """The streaming multiprocessors of `tensor`'s device; 2 on a CPU, so that the interpreter runs several programs."""
    if not tensor.is_cuda:
        return 2
    index = tensor.get_device()
    count = _multiprocessors.get(index)
    if count is None:
        count = torch.cuda.get_device_properties(index).multi_processor_count
        if not torch.compiler.is_compiling():
            _multiprocessors[index] = count
    return count


def empty_rows(like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous tensor of the shape and device of `like`; the quickest call that makes one."""
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def promoted(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The dtype that PyTorch promotes both to; the question costs a microsecond, so it is asked only if they differ."""
    return first if first is second else torch.promote_types(first, second)


def next_power_of_two(number: int) -> int:
    """The least power of two that is at least `number` (1 for 0)."""
    return 1 << max(number - 1, 0).bit_length()
