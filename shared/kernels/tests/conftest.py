"""Fixtures of the kernel tests.

Every test that takes `backend` runs twice: on the plain PyTorch twin and on the Triton kernel. Where a GPU is, the
kernel runs compiled on it; elsewhere it runs on the CPU in Triton's interpreter, which Triton turns on by reading
`TRITON_INTERPRET` while the kernels' modules are imported. So it is set here, before a kernel is first asked for.

    pytest shared/kernels/tests            # CPU, or compiled where a GPU is
    pytest shared/kernels/tests -m gpu     # only what needs a GPU
"""

import os
from collections.abc import Iterator

import pytest
import torch

from foak.kernels.backend import Backend, backend_for, forced_backend, triton_available
from foak.kernels.testing import make_interpreter_round_bf16

ON_GPU = torch.cuda.is_available()

if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    if triton_available():
        make_interpreter_round_bf16()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU a test marked `gpu` is skipped; the session `gpu` is the one that fails where none is."""
    if ON_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Backend]:
    """The implementation that the ops of a test run; "triton" is what is chosen here without any forcing."""
    name: Backend = request.param
    if name == "triton":
        assert backend_for(torch.empty(0, device=device)) == "triton", "the kernels do not run here"
        yield name
    else:
        with forced_backend(name):
            yield name


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory from `torch.empty*` is full of NaN (or of the largest integer), so that an element nobody wrote shows."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

    for name in ("empty", "empty_like", "empty_strided"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, _original=original, **kwargs: poison(_original(*args, **kwargs)))
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: poison(new_empty(*args, **kwargs)))
