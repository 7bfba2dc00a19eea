"""Launches that go past Triton's own: never of another variant than it would choose, and never unseen by a hook."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.language import constexpr
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from foak.kernels import launcher as launcher_module
from foak.kernels import layer_norm, rms_norm, swiglu
from foak.kernels.launcher import Launcher, planned, variant_key

INTEGERS = (
    *(0, 1, 2, 15, 16, 17, 48, 4096, -1, -16),
    *(2**31 - 1, 2**31 - 16, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, -(2**31) - 16),
    *(2**63 - 1, 2**63 - 16, 2**63, 2**63 + 1, -(2**63)),
)


def kernel_body(x_ptr, y_ptr, count, stride, eps, WIDTH: constexpr, FLAG: constexpr):  # type: ignore[no-untyped-def]
    """Never run: its signature is what is launched."""


@pytest.fixture
def kernel() -> JITFunction[Any]:
    return JITFunction(kernel_body, do_not_specialize=["count"])


def pointers() -> list[Tensor]:
    """Tensors of several dtypes at every kind of address; one of no elements has the address 0."""
    storage = torch.zeros(256, dtype=torch.uint8)
    start = -storage.data_ptr() % 16
    aligned = [storage[start : start + 32].view(dtype) for dtype in (torch.bfloat16, torch.float32, torch.int64)]
    shifted = [storage[start + shift : start + shift + 32] for shift in (2, 4, 8)]
    askew = [
        part.view(dtype) for part, dtype in zip(shifted, (torch.bfloat16, torch.float32, torch.int64), strict=True)
    ]
    return [*aligned, *askew, torch.empty(0, dtype=torch.float32)]


def calls() -> Iterator[tuple[tuple[Tensor, Tensor], tuple[int | float, int | float, int | float]]]:
    numbers = (*INTEGERS, 0.0, 1.0, 16.0, True, False)
    first, *_ = given = pointers()
    for pair in itertools.product(given, repeat=2):
        for number in numbers:
            yield pair, (number, 4096, 1e-6)
    for count, stride, eps in itertools.product(numbers, numbers, (1e-6, 1, 16, 5)):
        yield (first, first), (count, stride, eps)


def test_one_key_never_stands_for_two_variants(kernel: JITFunction[Any]) -> None:
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    by_key: dict[Any, set[str]] = {}
    for tensors, numbers in calls():
        _, specialization, _ = bind(*tensors, *numbers, 64, True)
        key, addresses = variant_key(0, tensors, numbers)
        assert addresses == [tensor.data_ptr() for tensor in tensors]
        by_key.setdefault(key, set()).add(str(specialization))
    assert {len(found) for found in by_key.values()} == {1}
    assert len(set().union(*by_key.values())) > 100  # the calls differ in Triton's eyes too


def test_other_lengths_have_the_same_key() -> None:
    x, *_ = pointers()
    same = {variant_key(0, (x, x), (count, stride, 1e-6))[0] for count in (3, 17, 1001) for stride in (48, 64, 4096)}
    assert len(same) == 1


def test_devices_have_keys_of_their_own() -> None:
    x, *_ = pointers()
    assert variant_key(0, (x,), ())[0] != variant_key(1, (x,), ())[0]


class OnGpu:
    """What a launch asks a tensor on a GPU."""

    is_cuda = True
    dtype = torch.bfloat16

    def __init__(self, address: int, device: int = 0) -> None:
        self._address = address
        self._device = device

    def data_ptr(self) -> int:
        return self._address

    def get_device(self) -> int:
        return self._device


class Variant(CompiledKernel):
    """A compiled kernel that notes what it is started with."""

    def __init__(self, starts: list[tuple[Any, ...]]) -> None:
        self._run = lambda *args: starts.append(args)
        self.function = "function"
        self.packed_metadata = "metadata"
        self.module = None


class Watch:
    """A kernel under a launcher, and what Triton and the variants are asked to launch."""

    def __init__(self, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.device = 0
        variant = Variant(self.direct)

        def launch(_: Any, grid: tuple[int, ...]) -> Any:
            def call(*args: Any, **keywords: Any) -> Variant:
                self.by_triton.append((grid, args, keywords))
                return variant

            return call

        monkeypatch.setattr(launcher_module, "_DIRECT", True)
        monkeypatch.setattr(JITFunction, "__getitem__", launch)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream {device}", raising=False)
        self.kernel = kernel
        self.launcher = Launcher(kernel, num_warps=4, WIDTH=64, FLAG=True)

    def launch(self, x: int = 256, y: int = 512, count: int = 7, stride: int = 64, device: int = 0) -> None:
        self.launcher((5, 2), (OnGpu(x, device), OnGpu(y, device)), count, stride, 1e-6)  # type: ignore[arg-type]


@pytest.fixture
def watch(kernel: JITFunction[Any], monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(kernel, monkeypatch)


def test_the_second_launch_of_a_kind_starts_the_variant(watch: Watch) -> None:
    watch.launch()
    assert watch.direct == []
    ((grid, args, keywords),) = watch.by_triton
    assert grid == (5, 2)
    assert args[2:] == (7, 64, 1e-6)
    assert keywords == {"WIDTH": 64, "FLAG": True, "num_warps": 4}
    watch.launch(x=1024, count=9, stride=128)
    assert len(watch.by_triton) == 1
    grid_and_function = (5, 2, 1, "stream 0", "function", "metadata", None, None, None)
    assert watch.direct == [(*grid_and_function, 1024, 512, 9, 128, 1e-6, 64, True)]


@pytest.mark.parametrize("other", [{"x": 258}, {"y": 8}, {"stride": 65}, {"stride": 1}, {"count": 2**31}])
def test_another_kind_goes_through_triton(other: dict[str, int], watch: Watch) -> None:
    watch.launch()
    watch.launch(**other)
    assert len(watch.by_triton) == 2
    watch.launch()
    watch.launch(**other)
    assert len(watch.by_triton) == 2
    assert len(watch.direct) == 2


@pytest.mark.parametrize("what", ["launch_enter_hook", "launch_exit_hook", "replaced hook", "pre_run_hook", "debug"])
def test_who_watches_launches_sees_every_one(what: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    watch.launch()
    runtime = triton.knobs.runtime
    with monkeypatch.context() as patch:
        if what == "pre_run_hook":
            patch.setattr(watch.kernel, "pre_run_hooks", [print])
        elif what == "debug":
            patch.setattr(runtime, "debug", True)
        elif what == "replaced hook":
            patch.setattr(runtime, "launch_enter_hook", print)
        else:
            patch.setattr(getattr(runtime, what), "calls", [print])
        watch.launch()
        watch.launch(stride=65)
        assert len(watch.by_triton) == 3
        assert watch.direct == []
    watch.launch()
    assert len(watch.direct) == 1
    watch.launch(stride=65)  # what was compiled meanwhile, perhaps with assertions, is not kept
    assert len(watch.by_triton) == 4


def test_another_device_is_made_current_for_the_launch(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    class Current:
        def __init__(self, device: int) -> None:
            self.inside = device

        def __enter__(self) -> None:
            self.before, watch.device = watch.device, self.inside

        def __exit__(self, *_: object) -> None:
            watch.device = self.before

    monkeypatch.setattr(torch.cuda, "device", Current)
    watch.launch()
    watch.launch(device=1)
    assert len(watch.by_triton) == 2
    watch.launch(device=1)
    assert [args[3] for args in watch.direct] == ["stream 1"]
    assert watch.device == 0


class MatrixOnGpu(OnGpu):
    """What a descriptor asks a tensor on a GPU."""

    def __init__(self, shape: tuple[int, ...], stride: int, address: int = 256) -> None:
        super().__init__(address)
        self.shape = torch.Size(shape)
        self._stride = stride

    def numel(self) -> int:
        return self.shape.numel()

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int) -> int:
        return {-1: 1, -2: self._stride}[dim]


MATRICES = [((40, 64), 64), ((7, 72), 80), ((2, 5, 64), 64)]
"""Shapes, and how far apart rows are: contiguous, apart, and of more dimensions."""


def test_the_stride_of_a_dimension_of_size_1_is_not_that_of_the_rows() -> None:
    """A tensor is contiguous whatever it is."""
    tensor = torch.empty(1, 24, 64).transpose(0, 1)
    assert tensor.is_contiguous()
    assert tensor.stride() == (64, 1536, 1)
    assert launcher_module._matrix(tensor) == ([24, 64], [64, 1])


def descriptors(watch: Watch, shape: tuple[int, ...], stride: int, address: int = 256) -> list[Any]:
    """Launches with a described matrix and a pointer; gives the first argument of each launch so far."""
    watch.launcher((3,), (MatrixOnGpu(shape, stride, address), OnGpu(512)), 7, 64, 1e-6)  # type: ignore[arg-type]
    return [args[0] for _, args, _ in watch.by_triton] + [args[9] for args in watch.direct]


@pytest.fixture
def described(watch: Watch) -> Watch:
    watch.launcher = Launcher(watch.kernel, num_warps=4, blocks=[[16, 32]], WIDTH=64, FLAG=True)
    return watch


@pytest.mark.parametrize(("shape", "stride"), MATRICES)
def test_a_variant_gets_the_descriptor_that_triton_would(shape: tuple[int, ...], stride: int, described: Watch) -> None:
    descriptors(described, (16, 32), 32)
    _, direct = descriptors(described, shape, stride)
    (_, args, _), *others = described.by_triton
    assert not others
    assert isinstance(args[1], OnGpu)
    assert described.direct[0][10:] == (512, 7, 64, 1e-6, 64, True)
    rows = torch.Size(shape[:-1]).numel()
    fields = [field.name for field in dataclasses.fields(TensorDescriptor) if field.name != "base"]
    wanted = TensorDescriptor(direct.base, [rows, shape[-1]], [stride, 1], [16, 32])
    assert [getattr(direct, field) for field in fields] == [getattr(wanted, field) for field in fields]
    assert direct.base.data_ptr() == 256


def test_what_a_descriptor_describes_is_no_part_of_the_variant(kernel: JITFunction[Any]) -> None:
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))

    def variant(shape: tuple[int, ...], stride: int, block: list[int]) -> str:
        matrix = [torch.Size(shape[:-1]).numel(), shape[-1]]
        base = torch.empty(4096, dtype=torch.bfloat16)
        described = TensorDescriptor(base[-base.data_ptr() % 16 // 2 :], matrix, [stride, 1], block)
        return str(bind(described, base, 7, 64, 1e-6, 64, True)[1])

    assert len({variant(shape, stride, [16, 32]) for shape, stride in MATRICES}) == 1
    assert variant((40, 64), 64, [16, 32]) != variant((40, 64), 64, [16, 64])


def test_a_matrix_at_an_odd_address_is_refused_after_launches_of_others(described: Watch) -> None:
    for _ in range(2):
        descriptors(described, (40, 64), 64)
    with pytest.raises(AssertionError, match="aligned"):
        descriptors(described, (40, 64), 64, address=264)
    assert len(described.direct) == 1


def test_a_limit_of_registers_reaches_the_compiler(watch: Watch) -> None:
    watch.launcher = Launcher(watch.kernel, num_warps=4, registers=128, WIDTH=64, FLAG=True)
    watch.launch()
    watch.launch()
    ((_, _, keywords),) = watch.by_triton
    assert keywords == {"WIDTH": 64, "FLAG": True, "num_warps": 4, "maxnreg": 128}
    assert watch.direct[0][9:] == (256, 512, 7, 64, 1e-6, 64, True)


def test_constants_out_of_order_are_noticed(watch: Watch) -> None:
    watch.launcher = Launcher(watch.kernel, num_warps=4, FLAG=True, WIDTH=64)
    with pytest.raises(AssertionError, match="in this order"):
        watch.launch()


@pytest.mark.parametrize(("version", "known"), [("3.5.1", False), ("3.6.0", True), ("3.9.0", True), ("3.10.0", False)])
def test_an_unknown_triton_launches_itself(version: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, print, raising=False)
    assert launcher_module._knows_triton() is known


def test_a_plan_is_made_once_for_its_arguments() -> None:
    made: list[int] = []

    @planned
    def plan(length: int) -> int:
        made.append(length)
        return 2 * length

    assert [plan(3), plan(3), plan(4)] == [6, 6, 8]
    assert made == [3, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
@pytest.mark.parametrize("length", [64, 72, 33])
def test_the_same_bits_as_by_triton(shift: int, length: int, device: torch.device, monkeypatch: Any) -> None:
    """Rows at aligned and odd addresses and distances, one after another, so that a key which is too coarse shows."""
    assert launcher_module._DIRECT, "this Triton is not known: its launches are all its own"
    generator = torch.Generator(device).manual_seed(0)
    storage = torch.randn(40 * (length + shift) + shift, generator=generator, device=device).bfloat16()
    x = storage[shift:].view(40, length + shift)[:, :length].requires_grad_()
    weight = torch.randn(length, generator=generator, device=device).bfloat16().requires_grad_()

    def results() -> list[Tensor]:
        outputs = [rms_norm(x, weight), layer_norm(x, weight, weight), swiglu(x, x)]
        gradients = torch.autograd.grad(outputs, (x, weight), [torch.ones_like(output) for output in outputs])
        return [*outputs, *gradients]

    results()
    direct = results()
    monkeypatch.setattr(launcher_module, "_DIRECT", False)
    for got, wanted in zip(direct, results(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_a_launch_hook_sees_the_kernels(device: torch.device) -> None:
    x = torch.ones(4, 64, device=device)
    rms_norm(x)
    seen: list[object] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(seen.append)
    try:
        rms_norm(x)
    finally:
        hook.remove(seen.append)
    assert len(seen) == 1
