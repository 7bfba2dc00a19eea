"""Measures every op of `foak.kernels` against what its bytes or FLOPs allow, beside Liger's and plain PyTorch's.

    python benchmarks/kernels.py --out kernels.json      # on a GPU: the sizes of an 8B model, 8192 tokens, bf16
    python benchmarks/kernels.py --tiny                  # anywhere: the same code on tiny sizes; its times mean nothing

Each op is first compared with fp64; a run in which one is too far off ends with exit code 1 and its figures are not
shown. Three figures then say how good an op is:

- GPU time: the median over replays of a CUDA graph that holds several calls, on inputs that rotate through more memory
  than the L2 cache holds. The losses wait for the device (to learn how many labels count) and are timed by events.
- The fraction of the bound: the time that the op's bytes take at the copy bandwidth, or its FLOPs at the matmul rate,
  both measured in the same run, over the time it took.
- Host cost: what one eager call takes until it returns, measured by enqueueing many calls on tiny tensors.
"""

import argparse
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich
import torch
from kernel_cases import TINY, Case, Function, Maker, Sizes, cases
from rich.table import Table
from torch import Tensor

import foak.kernels
from foak.kernels.testing import tolerance

ROTATED_BYTES = 256 * 2**20
"""Inputs rotate through this much memory, five times a Hopper GPU's L2 cache."""


@dataclass(frozen=True)
class Figure:
    """One pass of one implementation of one op. Times in microseconds; None where there is none to show."""

    op: str
    part: str  # "forward", "backward" or "both"
    implementation: str
    error: float
    gpu: float
    bound: float
    host: float | None = None
    extra_mib: float | None = None


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def trained(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [leaf for leaf in leaves if leaf.requires_grad]


def upstream_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator(device=outputs[0].device).manual_seed(1)
    return [
        torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype) if x.dim() else torch.ones_like(x)
        for x in outputs
    ]


def as_activations(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Views of what trains: rivals write into their inputs, which autograd forbids for leaves."""
    return [leaf.view_as(leaf) if leaf.requires_grad else leaf for leaf in leaves]


def run(function: Function, leaves: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then the gradients of what trains; on copies, because some rivals write into their inputs."""
    copies = as_activations([leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves])
    outputs = outputs_of(function(*copies))
    if not trained(copies):
        return [output.detach() for output in outputs]
    flowing_in = [gradient.to(output.dtype) for gradient, output in zip(upstream, outputs, strict=True)]
    return [*(output.detach() for output in outputs), *torch.autograd.grad(outputs, trained(copies), flowing_in)]


def errors(case: Case, functions: dict[str, Function], leaves: list[Tensor]) -> dict[str, float]:
    """The largest relative L2 error over outputs and gradients of each implementation, against fp64."""
    outputs = outputs_of(case.plain(*leaves))
    upstream = upstream_of([output.detach() for output in outputs])
    wide = [
        leaf.detach().double().requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    expected = run(case.plain, wide, upstream)
    found = {}
    for name, function in functions.items():
        actual = run(function, leaves, upstream)
        distances = [float((a.double() - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True)]
        found[name] = max(math.inf if math.isnan(distance) else distance for distance in distances)
    return found


class Clock:
    """Times work on the device of the run: by CUDA graphs or events on a GPU, by the wall clock on a CPU.

    All work is on one stream, because autograd runs a backward on its forward's stream and only that one is captured.
    """

    def __init__(self, device: torch.device, replays: int) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.replays = replays

    def seconds(self, call: Callable[[], object], graph: bool) -> float:
        """The median over several runs of `call`, which is captured first if `graph` is set."""
        call()
        if self.stream is None:
            return statistics.median(self._wall(call) for _ in range(self.replays))
        if graph:
            torch.cuda.synchronize()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=self.stream):
                call()
            call = captured.replay
            call()
        marks = []
        for _ in range(self.replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            marks.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1000

    @staticmethod
    def _wall(call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Bench:
    """One run: where it is, how it takes time, and the two rates that its bounds are made of."""

    sizes: Sizes
    make: Maker
    clock: Clock
    bytes_per_second: float
    flops_per_second: float


def start(sizes: Sizes, device: torch.device) -> Bench:
    """Measures the copy bandwidth (bytes read and written) and the rate of the head's matrix product."""
    make = Maker(device, torch.bfloat16, torch.Generator(device).manual_seed(0))
    clock = Clock(device, sizes.replays)
    tiny = sizes.tokens < 1024
    source = make.normal(2**16 if tiny else 2**29, trains=False)
    target = torch.empty_like(source)
    # Not in a graph: there it becomes a node for the copy engine, which is slower than a kernel that copies.
    copying = clock.seconds(lambda: target.copy_(source), graph=False)
    copied = 2 * source.numel() * source.element_size()
    rows = make.normal(min(sizes.tokens, 2048), sizes.hidden, trains=False)
    weight = make.normal(sizes.vocabulary, sizes.hidden, trains=False)
    multiplying = clock.seconds(lambda: rows @ weight.t(), graph=True)
    return Bench(sizes, make, clock, copied / copying, 2 * rows.shape[0] * weight.numel() / multiplying)


def host_microseconds(call: Callable[[], object], calls: int) -> float:
    """How long one call takes to return, while the device lags behind."""
    samples = []
    for _ in range(8):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples[1:]) * 1e6


def host_cost(case: Case, name: str, bench: Bench) -> tuple[float, float | None]:
    """Microseconds on the host of an eager forward, and of forward and backward, on tensors of next to no work."""
    small = next(other for other in cases(TINY, 2) if other.name == case.name)
    function = small.functions[name]
    inputs = as_activations(small.inputs(bench.make, 8))
    upstream = [torch.ones_like(output) for output in outputs_of(function(*inputs))]
    wanted = trained(inputs)
    calls = 2 if bench.clock.stream is None else 100
    forward = host_microseconds(lambda: function(*inputs), calls)
    if not wanted:
        return forward, None
    both = host_microseconds(lambda: torch.autograd.grad(outputs_of(function(*inputs)), wanted, upstream), calls)
    return forward, both


def measure(case: Case, name: str, function: Function, error: float, bench: Bench) -> list[Figure]:
    """All figures of one implementation of one op."""
    first = case.inputs(bench.make, bench.sizes.tokens)
    size = sum(leaf.numel() * leaf.element_size() for leaf in first)
    count = 1 if bench.clock.stream is None else max(1, -(-ROTATED_BYTES // size))
    more = (case.inputs(bench.make, bench.sizes.tokens) for _ in range(count - 1))
    sets = [as_activations(leaves) for leaves in (first, *more)]
    ones = [[torch.ones_like(output) for output in outputs_of(function(*leaves))] for leaves in sets]
    host_forward, host_both = host_cost(case, name, bench)

    def microseconds(call: Callable[[], object]) -> float:
        return bench.clock.seconds(call, case.capturable) / count * 1e6

    if case.flops:

        def step() -> None:
            for leaves, upstream in zip(sets, ones, strict=True):
                torch.autograd.grad(outputs_of(function(*leaves)), trained(leaves), upstream)

        extra = extra_mib(step)
        bound = case.flops / bench.flops_per_second * 1e6
        return [Figure(case.name, "both", name, error, microseconds(step), bound, host_both, extra)]

    def forward() -> None:
        for leaves in sets:
            function(*leaves)

    def backward() -> None:
        for outputs, leaves, upstream in zip(graphs, sets, ones, strict=True):
            torch.autograd.grad(outputs, trained(leaves), upstream, retain_graph=True)

    forward_time = microseconds(forward)
    forward_bound = case.forward_bytes / bench.bytes_per_second * 1e6
    of_forward = Figure(case.name, "forward", name, error, forward_time, forward_bound, host_forward)
    if not trained(first):
        return [of_forward]
    graphs = [outputs_of(function(*leaves)) for leaves in sets]
    backward_time = microseconds(backward)
    backward_bound = case.backward_bytes / bench.bytes_per_second * 1e6
    return [
        of_forward,
        Figure(case.name, "backward", name, error, backward_time, backward_bound),
        Figure(
            case.name,
            "both",
            name,
            error,
            forward_time + backward_time,
            forward_bound + backward_bound,
            host_both,
        ),
    ]


def extra_mib(step: Callable[[], object]) -> float | None:
    """The most memory that `step` takes on top of its inputs; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run_all(bench: Bench) -> tuple[list[Figure], list[str]]:
    """The figures, and a sentence for each op of ours that is too far from fp64."""
    figures: list[Figure] = []
    faults: list[str] = []
    for case in cases(bench.sizes, 2):
        present = case.functions
        found = errors(case, present, case.inputs(bench.make, bench.sizes.checked_tokens))
        allowed = max(tolerance(bench.make.dtype, case.length), 1.1 * found["plain"])
        if found["foak"] > allowed:
            faults.append(f"{case.name}: relative error {found['foak']:.2e} against fp64, allowed {allowed:.2e}")
            continue
        for name, function in present.items():
            figures += measure(case, name, function, found[name], bench)
    return figures, faults


def table_of(figures: list[Figure]) -> Table:
    table = Table("op", "pass", "by", "GPU µs", "bound µs", "of bound", "host µs", "extra MiB", "error")
    for index, figure in enumerate(figures):
        table.add_row(
            figure.op,
            figure.part,
            figure.implementation,
            f"{figure.gpu:.1f}",
            f"{figure.bound:.1f}",
            f"{figure.bound / figure.gpu:.0%}",
            "" if figure.host is None else f"{figure.host:.0f}",
            "" if figure.extra_mib is None else f"{figure.extra_mib:.0f}",
            f"{figure.error:.1e}",
            end_section=index + 1 == len(figures) or figures[index + 1].op != figure.op,
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for trying the script without a GPU")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the figures")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not arguments.tiny:
        parser.error("there is no CUDA device; --tiny tries the script on a CPU")
    device = torch.device("cuda" if on_gpu else "cpu")
    sizes = TINY if arguments.tiny else Sizes()
    # Everything runs on the stream that is captured; on a CPU there is none.
    bench = start(sizes, device)
    with torch.cuda.stream(bench.clock.stream):
        figures, faults = run_all(bench)
    device_name = torch.cuda.get_device_name() if on_gpu else "CPU (the times mean nothing)"
    rich.print(
        f"{device_name}, torch {torch.__version__}, foak-kernels {foak.kernels.__version__}, bf16, {sizes}\n"
        f"copy {bench.bytes_per_second / 1e12:.2f} TB/s, matmul {bench.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    rich.print(table_of(figures))
    for fault in faults:
        rich.print(f"[red]too far from fp64, not measured: {fault}")
    if arguments.out:
        result = {
            "device": device_name,
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton") if on_gpu else "",
            "foak_kernels": foak.kernels.__version__,
            "dtype": "bfloat16",
            "sizes": asdict(sizes),
            "bytes_per_second": bench.bytes_per_second,
            "flops_per_second": bench.flops_per_second,
            "figures": [asdict(figure) for figure in figures],
            "faults": faults,
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
