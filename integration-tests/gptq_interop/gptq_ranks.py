"""What each of two processes runs: a LoRA on a GPTQ base in one process, under DDP and under FSDP2, plain and fused.

python gptq_ranks.py CHECKPOINT PORT OUT      # the first process writes the losses of each run to OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gptq_models import INPUT_IDS, SECTION
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from foak.core import AccelerationFramework

WORLD_SIZE = 2
STEPS = 4


def build(checkpoint: str, fused: bool) -> Any:
    quantization: dict[str, Any] = {"auto_gptq": SECTION}
    if fused:
        quantization["fused_ops_and_kernels"] = {"base_layer": "auto_gptq", "fused_lora": True}
    framework = AccelerationFramework({"plugins": {"peft": {"quantization": quantization}}})
    torch.manual_seed(0)
    base = framework.load_model(checkpoint, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    framework.apply(model)
    return model


def shard(model: Any) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def losses_of(model: nn.Module) -> list[float]:
    """Each process has the same batch, so every run must give the same losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    found = []
    for _ in range(STEPS):
        loss = model(input_ids=INPUT_IDS, labels=INPUT_IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main(rank: int, checkpoint: str, port: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=WORLD_SIZE)
    found = {}
    for fused in (False, True):
        for name, wrap in (("one process", lambda model: model), ("DDP", DistributedDataParallel), ("FSDP2", shard)):
            found[f"{name}{', fused' * fused}"] = losses_of(wrap(build(checkpoint, fused)))
    if rank == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=tuple(sys.argv[1:]), nprocs=WORLD_SIZE)
