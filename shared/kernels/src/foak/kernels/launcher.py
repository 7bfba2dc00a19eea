"""Launches a Triton kernel again at a fraction of what `kernel[grid](...)` costs the host.

On every call Triton binds the arguments by name and works out, one by one, which compiled variant serves them: about
three times what the launch itself takes. A `Launcher` belongs to one kernel with its compile-time constants. The first
launch of each kind of arguments goes through Triton, which compiles the variant or finds it, and hands it over; later
ones start that variant. Two calls are of one kind only where Triton would choose the same variant for both, which
`variant_key` answers for and its test compares with Triton's own answer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, TypeVarTuple

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from foak.kernels.launch import on_device_of

Number = int | float
Key = tuple[object, ...]

_Arguments = TypeVarTuple("_Arguments")
_Plan = TypeVar("_Plan")

KNOWN_TRITON = ((3, 6), (3, 9))
"""The first and the last release whose compiled kernels are known to be called as `Launcher` calls them."""


class Launcher:
    """`kernel` with its constants: `launcher(grid, tensors, *numbers)` runs it.

    The kernel's parameters are pointers, then numbers, then constants (`tl.constexpr`), all of which are given here by
    name. A launcher is to be kept, under whatever its constants follow from: see `planned`.

    `registers` is the most that a thread may have, where the compiler takes so many that too few programs run at once;
    only Nvidia's knows of it.

    A kernel's first pointers may be tensor descriptors, through which Hopper's memory unit moves whole blocks: `blocks`
    has the shape [rows, columns] of a block for each. Such a tensor is a matrix, or one of more dimensions that is
    contiguous and counts as the matrix of its rows; it is not empty, and its rows begin at multiples of 16 bytes.

    Triton's own launch is used where a kept variant would not do: in the interpreter, while torch.compile traces, under
    a profiler's launch hooks or TRITON_DEBUG, on ROCm, and with releases of Triton other than `KNOWN_TRITON`.
    """

    def __init__(
        self,
        kernel: Any,  # a function under `triton.jit`; Triton has no type for it that both its kinds share
        *,
        num_warps: int,
        num_stages: int | None = None,
        registers: int | None = None,
        blocks: Sequence[list[int]] = (),
        **constants: object,
    ) -> None:
        self.kernel = kernel
        self.blocks = blocks
        self.keywords = constants | {"num_warps": num_warps}
        if num_stages is not None:
            self.keywords["num_stages"] = num_stages
        if registers is not None:
            self.keywords["maxnreg"] = registers
        self._values = tuple(constants.values())
        self._names = tuple(constants)
        self._variants: dict[Key, tuple[Any, Any, Any, CompiledKernel]] = {}

    def __call__(self, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *numbers: Number) -> None:
        """Runs the kernel on the device of the first of `tensors`, on that device's current stream.

        Args:
            grid: one to three numbers of programs.
            tensors: what the pointers point to, all on one device.
            numbers: the kernel's other arguments.
        """
        if not _DIRECT or torch.compiler.is_compiling() or not tensors[0].is_cuda:
            with on_device_of(tensors[0]):
                self.kernel[grid](*self._pointers(tensors), *numbers, **self.keywords)
            return
        device = tensors[0].get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self(grid, tensors, *numbers)
            return
        key, addresses = variant_key(device, tensors, numbers)
        variant = self._variants.get(key)
        if variant is None or _watched(self.kernel):
            started = self.kernel[grid](*self._pointers(tensors), *numbers, **self.keywords)
            self._keep(key, started, tensors, numbers)
            return
        pointers: list[Any] = addresses
        for index, block in enumerate(self.blocks):
            pointers[index] = _described(tensors[index], block)
        # Addresses in place of tensors spare a question to the driver for each of them.
        run, function, metadata, _ = variant
        run(
            grid[0],
            grid[1] if len(grid) > 1 else 1,
            grid[2] if len(grid) > 2 else 1,
            torch._C._cuda_getCurrentRawStream(device),
            function,
            metadata,
            None,  # what launch hooks are told, and the hooks: there are none
            None,
            None,
            *pointers,
            *numbers,
            *self._values,
        )

    def _pointers(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The kernel's first arguments as Triton's own launch takes them."""
        if not self.blocks:
            return tensors
        described = (_checked(tensor, block) for tensor, block in zip(tensors, self.blocks, strict=False))
        return *described, *tensors[len(self.blocks) :]

    def _keep(self, key: Key, variant: object, tensors: tuple[Tensor, ...], numbers: tuple[Number, ...]) -> None:
        # An autotuner's choice hangs on more than the key, and so does a number of a type of its own.
        if not isinstance(self.kernel, JITFunction) or not isinstance(variant, CompiledKernel):
            return
        if not {type(number) for number in numbers} <= {int, float, bool}:
            return
        if _watched(self.kernel):  # What debug mode compiles would serve calls after it.
            return
        names = tuple(self.kernel.arg_names[len(tensors) + len(numbers) :])
        assert names == self._names, f"a launcher's constants are {self._names}, the kernel's, in this order, {names}"
        # The last is not used: the loaded function lives as long as it does.
        self._variants[key] = (variant.run, variant.function, variant.packed_metadata, variant)


def variant_key(device: int, tensors: tuple[Tensor, ...], numbers: tuple[Number, ...]) -> tuple[Key, list[int]]:
    """A key that is equal for two calls only if Triton has one variant for both, and the addresses of `tensors`.

    Of one kernel with the same constants it makes variants by the pointers' dtypes and whether each address is a
    multiple of 16; by the type of a number; and, of an integer, by whether it is 1, whether it is a multiple of 16, and
    whether it needs 32 bits, 64, or 64 without a sign. Numbers under `do_not_specialize` are told apart here too: that
    costs a few keys, and no variant.
    """
    key: list[object] = [device, *[tensor.dtype for tensor in tensors]]
    addresses = [tensor.data_ptr() for tensor in tensors]
    joined = 0
    for address in addresses:
        joined |= address
    if joined & 15:  # Seldom, so that the usual key is short. The longer one has a length of its own.
        key += [address & 15 == 0 for address in addresses]
    for number in numbers:
        if type(number) is not int:
            key.append(type(number))
        elif -0x80000000 <= number < 0x80000000:
            key.append(16 if number & 15 == 0 else 1 if number == 1 else 0)
        else:
            key.append((-(2**63) <= number < 2**63, number & 15 == 0))
    return tuple(key), addresses


def row_stride(tensor: Tensor) -> int:
    """How many elements the rows of a matrix, or of a contiguous tensor of any other dimension, are apart.

    A contiguous tensor is not asked: its stride in a dimension of size 1 may be any number.
    """
    return tensor.stride(-2) if tensor.dim() == 2 else tensor.shape[-1]


def _matrix(tensor: Tensor) -> tuple[list[int], list[int]]:
    """The shape and the strides of a tensor as a matrix of its rows."""
    columns = tensor.shape[-1]
    return [tensor.numel() // columns, columns], [row_stride(tensor), 1]


def _checked(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    shape, strides = _matrix(tensor)
    return TensorDescriptor(tensor, shape, strides, block)


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """`_checked` without the checks, which take longer than the launch; what it describes is no part of a variant."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.base, descriptor.block_shape = tensor, block
    descriptor.shape, descriptor.strides = _matrix(tensor)
    return descriptor


def planned(plan: Callable[[*_Arguments], _Plan]) -> Callable[[*_Arguments], _Plan]:
    """Decorator of a function that makes a launcher from hashable arguments, which keeps what it made.

    The arguments are those that constants follow from, so there are as many plans as there are compiled variants.
    """
    kept: dict[tuple[object, ...], _Plan] = {}

    @functools.wraps(plan)
    def find(*args: *_Arguments) -> _Plan:
        if torch.compiler.is_compiling():  # Dynamo would guard on every plan there is.
            return plan(*args)
        found = kept.get(args)
        if found is None:
            found = kept[args] = plan(*args)
        return found

    return find


def _watched(kernel: Any) -> bool:
    """Whether someone looks at launches, as profilers do, or Triton's debug mode asks for variants of its own."""
    runtime = triton.knobs.runtime
    return bool(
        kernel.pre_run_hooks
        or runtime.debug
        or getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
    )


def _knows_triton() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return (
        KNOWN_TRITON[0] <= version <= KNOWN_TRITON[1]
        and torch.version.cuda is not None
        and hasattr(torch._C, "_cuda_getDevice")
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
    )


_DIRECT = _knows_triton()
