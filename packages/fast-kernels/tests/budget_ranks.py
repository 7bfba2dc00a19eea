"""What each of two processes runs: a budgeted model under DDP and under FSDP2, and the same without a budget.

python budget_ranks.py FOLDER      # writes FOLDER/0.pt and FOLDER/1.pt
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from budgeted import MIB, budget_of, checkpointed, framework, llama
from storages import LivingStorages
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from foak.fast_kernels.checkpointing import budget as budgets

WORLD_SIZE = 2
STEPS = 3
LENGTHS = (48, 40)
"""Of each rank's rows."""


def launch(folder: Path) -> list[dict[str, Any]]:
    """Run both processes; what each of them has found."""
    command = [sys.executable, __file__, str(folder)]
    subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).parent)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD_SIZE)]


def _shard(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _train(rank: int, prepare: Any, budget: Any) -> tuple[list[torch.Tensor], Any, list[str]]:
    """Losses and, at last, all gradients; the model; the report's notes."""
    model = checkpointed(llama())
    report = framework(budget).apply(model) if budget is not None else None
    prepared = prepare(model)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(0, 128, (4, LENGTHS[rank]), generator=generator)
        prepared.zero_grad()
        loss = prepared(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    found += [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
    return found, model, [] if report is None else report.notes


def _process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=120))
    result: dict[str, Any] = {}
    with LivingStorages() as meter:
        budgets.meter_for = lambda device: meter  # type: ignore[assignment]
        for name, prepare in (("ddp", DistributedDataParallel), ("fsdp", _shard)):
            plain = _train(rank, prepare, None)[0]
            budget = (meter.allocated + (16 if rank == 0 else 2.75) * MIB) / 2**30
            fast, model, notes = _train(rank, prepare, budget)
            decision = budget_of(model).decision
            result |= {
                f"{name} equal": all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True)),
                f"{name} kept": decision.kept if decision else None,
                f"{name} notes": notes,
            }
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.spawn(_process, args=(sys.argv[1],), nprocs=WORLD_SIZE, join=True)
