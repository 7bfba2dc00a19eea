"""Reads how much memory a device holds, on the host and without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch


class Reading(NamedTuple):
    """What an allocator says at one moment, in bytes.

    Attributes:
        allocated: what tensors hold now.
        peak: the most that they have held since the process started, or since a user has set the counter back.
        total: the sum of all allocations so far, whatever has been freed since.
    """

    allocated: int
    peak: int
    total: int


class Meter(Protocol):
    """Where readings come from."""

    def read(self) -> Reading:
        """The allocator's state now."""
        ...

    def capacity(self) -> int:
        """The bytes that this process can hold at most."""
        ...


class CudaMeter:
    """PyTorch's caching allocator on one CUDA device. Its counters are read and never set back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self) -> Reading:
        """A host call of some ten microseconds; nothing is synchronised."""
        counters = torch.cuda.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        return Reading(counters["current"], counters["peak"], counters["allocated"])

    def capacity(self) -> int:
        """What is free on the device, and what this process's allocator has already."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device)


def meter_for(device: torch.device) -> Meter | None:
    """The meter of a device that holds tensors; None where its memory cannot be read.

    Of CUDA's allocators only PyTorch's own keeps all counters, and not without its cache
    (PYTORCH_NO_CUDA_MEMORY_CACHING): then all of them stay zero.
    """
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    meter = CudaMeter(device)
    return meter if meter.read().allocated > 0 else None
