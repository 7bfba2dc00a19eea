"""Which implementation is chosen, that it is chosen cheaply, and that importing the package does nothing."""

import os
import subprocess
import sys
import timeit

import pytest
import torch

from foak.kernels import backend
from foak.kernels.backend import backend_for, explain, forced_backend, triton_available


class Wrapped(torch.Tensor):
    """A tensor subclass, as DTensor is one."""


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints for `code`."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**plain, **environment}, capture_output=True, text=True, check=True
    )
    return result.stdout.strip()


def test_what_the_kernels_cannot_take_runs_the_reference(device: torch.device) -> None:
    tensor = torch.ones(2, device=device)
    assert backend_for(tensor) == "triton"
    assert backend_for(tensor, None, torch.nn.Parameter(tensor)) == "triton"
    assert backend_for(tensor.double()) == "reference"
    assert backend_for(tensor, tensor.double()) == "reference"
    assert backend_for(tensor.as_subclass(Wrapped)) == "reference"
    assert backend_for(tensor, tensor.as_subclass(Wrapped)) == "reference"
    assert backend_for(torch.empty(2, device="meta")) == "reference"


def test_a_forced_backend_holds_inside_the_block_only(device: torch.device) -> None:
    tensor = torch.ones(2, device=device)
    with forced_backend("reference"):
        assert backend_for(tensor) == "reference"
        with pytest.raises(RuntimeError), forced_backend("triton"):
            raise RuntimeError
        assert backend_for(tensor) == "reference"
    assert backend_for(tensor) == "triton"


def test_a_cpu_without_the_interpreter_runs_the_reference() -> None:
    code = "import torch; from foak.kernels.backend import *; print(backend_for(torch.ones(2)), explain('cpu'))"
    assert run(code) == "reference cpu: plain PyTorch, because the Triton kernels need a CUDA or ROCm device"


ROUNDED = "from foak.kernels.testing import make_interpreter_round_bf16; make_interpreter_round_bf16(); "


def test_the_interpreter_runs_the_kernels_where_it_rounds_bf16() -> None:
    """The choice that was made before is made again. The interpreter takes tensors of a GPU too."""
    code = """
import torch
from foak.kernels.backend import *
def show():
    print(backend_for(torch.ones(2)), explain("cpu"), explain("cuda"), explain("mps"), sep="|")
show()
from foak.kernels.testing import make_interpreter_round_bf16
make_interpreter_round_bf16()
show()
"""
    before, after = (line.split("|") for line in run(code, TRITON_INTERPRET="1").splitlines())
    assert [before[0], after[0]] == ["reference", "triton"]
    for plain, kernels in zip(before[1:3], after[1:3], strict=True):
        assert "plain PyTorch, because Triton's interpreter (TRITON_INTERPRET=1) computes wrong numbers" in plain
        assert "foak.kernels.testing.make_interpreter_round_bf16()" in plain
        assert "Triton kernels in Triton's slow interpreter" in kernels
    assert "need a CUDA or ROCm device" in before[3]
    assert before[3] == after[3]


@pytest.mark.parametrize("before", ["", ROUNDED])
def test_the_interpreter_computes_no_wrong_numbers(before: str) -> None:
    """By itself it multiplies the bits of bf16 operands, of which one is bf16 only by the products' dtype here."""
    code = """
import torch
from foak.kernels import lora_linear
x, w, a, b = (torch.ones(*s) for s in [(16, 64), (32, 64), (4, 64), (32, 4)])
for t in (x, x.bfloat16()):
    print(lora_linear(t, w.bfloat16(), a, b, dtype=torch.bfloat16).unique().tolist())
"""
    assert run(before + code, TRITON_INTERPRET="1") == "[320.0]\n[320.0]"


def test_a_missing_triton_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(backend, "_by_device_type", {})
    assert not triton_available()
    assert explain("cuda").startswith("cuda: plain PyTorch, because triton cannot be imported (")


def test_importing_does_nothing() -> None:
    code = """
import os, sys, torch
before, threads, modules = dict(os.environ), torch.get_num_threads(), set(sys.modules)
import foak.kernels
assert dict(os.environ) == before and torch.get_num_threads() == threads
assert not torch.cuda.is_initialized()
assert not {"triton", "transformers"} & (set(sys.modules) - modules)
print(sorted(foak.kernels.__all__) == sorted(n for n in foak.kernels.__all__ if hasattr(foak.kernels, n)))
"""
    assert run(code) == "True"


def test_choosing_is_cheap(device: torch.device) -> None:
    """A kernel call has some 40 microseconds on the host in all. The least of many runs: other load only adds."""
    tensor = torch.ones(2, device=device)
    seconds = min(timeit.repeat(lambda: backend_for(tensor), number=1000, repeat=20)) / 1000
    assert seconds < 5e-6


def test_the_choice_can_be_compiled(device: torch.device) -> None:
    function = torch.compile(lambda x: x + (backend_for(x) == "reference"), fullgraph=True, backend="eager")
    assert torch.equal(function(torch.zeros(2, dtype=torch.float64)), torch.ones(2, dtype=torch.float64))
