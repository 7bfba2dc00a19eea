"""What each of two processes runs: a model under DDP or FSDP2, stepped, and the same in one process on the whole batch.

python ranks.py FOLDER PORT      # two processes go through every run and write FOLDER/NAME.RANK.pt
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_pt_utils import LabelSmoother

from foak.core import AccelerationFramework, UnsupportedError
from foak.fast_kernels.loss.head import LAZY_WITHOUT_LABELS
from foak.fast_kernels.loss.label_smoothing import FusedLabelSmoother
from foak.fast_kernels.loss.lazy_logits import LazyLogits

WORLD_SIZE = 2
VOCAB_SIZE = 103  # does not divide by two
STEPS = 3


def configuration(**switches: Any) -> dict[str, Any]:
    values = {
        "fast_loss": "fused_linear",
        "fast_rms_layernorm": True,
        "fast_rope_embeddings": True,
        "fast_activation": True,
        **switches,
    }
    return {"plugins": {"training": {"fused_ops_and_kernels": values}}}


def build(*, tied: bool = False, prefix: str = "Llama", **fields: Any) -> Any:
    """A tiny model with random weights, those of the norms included."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
        **fields,
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model.train()


def batch(step: int) -> dict[str, torch.Tensor]:
    """Four rows; those of the second process have far fewer labels."""
    generator = torch.Generator().manual_seed(step)
    input_ids = torch.randint(3, VOCAB_SIZE, (4, 13), generator=generator)
    labels = input_ids.clone()
    labels[:2, :2] = -100
    labels[2:, :9] = -100
    return {"input_ids": input_ids, "labels": labels}


def part_of(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {key: value[2 * rank : 2 * rank + 2] for key, value in whole.items()}


def number_of_labels(whole: dict[str, torch.Tensor]) -> int:
    return int((whole["labels"][:, 1:] != -100).sum())


# -- how a model is prepared -----------------------------------------------------------------------------------------


def ddp(model: Any, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def ddp_unused(model: Any) -> nn.Module:
    """With a parameter that no forward uses."""
    model.model.layers[0].register_parameter("unused", nn.Parameter(torch.zeros(3)))
    return ddp(model, find_unused_parameters=True)


def fsdp(
    model: Any,
    *,
    head_alone: bool = False,
    root: bool = True,
    root_options: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Every decoder layer, then the root: accelerate's grouping."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if head_alone:
        fully_shard([model.model.norm, model.lm_head], **options)
    if root:
        fully_shard(model, **{**options, **(root_options or {})})
    return model


def fsdp_head_only(model: Any) -> nn.Module:
    """The head in a group of its own, resharded after its forward."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model.lm_head, reshard_after_forward=True)
    return fully_shard(model)


def checkpointed_only(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def checkpointed(model: Any) -> nn.Module:
    return fsdp(checkpointed_only(model))


def shared_folder() -> str:
    """A new folder, the same for both processes; whoever looks at the runs' results removes it with them."""
    found = [tempfile.mkdtemp(dir=os.environ["RANKS_FOLDER"]) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(found)
    return found[0]


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"])
    return get_peft_model(model, config)


def nf4_lora(model: Any) -> Any:
    """The same on the model in NF4, its packed weights stored as float32: FSDP wants one dtype of all parameters."""
    section = {"bitsandbytes": {"quant_type": "nf4", "storage_dtype": "float32"}}
    loader = AccelerationFramework({"plugins": {"peft": {"quantization": section}}})
    folder = shared_folder()
    model.save_pretrained(folder)  # which the first process does alone
    dist.barrier()
    return lora(loader.load_model(folder, dtype=torch.float32))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_OUTPUTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def own_loss(trained: Any, mine: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """The model's."""
    loss: torch.Tensor = trained(**mine, num_items_in_batch=items).loss
    return loss


def with_a_term(trained: Any, mine: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """The model's, and one over its logits, as a user's ``compute_loss`` adds it."""
    output = trained(**mine, num_items_in_batch=items)
    term: torch.Tensor = output.logits.float().logsumexp(-1).square().sum() / items
    return output.loss + 0.01 * term


def smoothed(trained: Any, mine: dict[str, torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """Trainer's, under ``label_smoothing_factor``."""
    output = trained(input_ids=mine["input_ids"])
    smoother: Any = LabelSmoother(epsilon=0.1)
    if isinstance(output.logits, LazyLogits):
        smoother = FusedLabelSmoother(smoother)
    loss: torch.Tensor = smoother(output, mine["labels"], shift_labels=True)
    return loss


def lazy_without_labels(model: Any) -> Any:
    """What the plugin's `prepare` does where a trainer smooths labels."""
    model.__dict__[LAZY_WITHOUT_LABELS] = True
    return model


@dataclass(frozen=True)
class Run:
    """One way to train over two processes.

    Attributes:
        prepare: from an accelerated model to what is trained.
        model: fields of the model.
        adapt: puts adapters on, before foak.
        sharded: whether parameters must be DTensors afterwards.
        mixed: whether it computes in bf16.
        late: whether the logits can still be read when the forward is over.
        loss: from the trained model, a batch and its number of labels over all processes.
        computed: whether the loss reads the logits.
        alone: whether one process with all rows gives the same (not for means over a process's own labels).
        switches: of foak.
        accumulated: micro-batches of a step; gradients are sent round after the last.
        saves: whether its state is saved, in full and in shards, and loaded again.
    """

    prepare: Callable[[Any], nn.Module]
    model: dict[str, Any] = field(default_factory=dict)
    adapt: Callable[[Any], Any] = field(default=lambda model: model)
    sharded: bool = True
    mixed: bool = False
    late: bool = True
    loss: Callable[[Any, dict[str, torch.Tensor], torch.Tensor], torch.Tensor] = own_loss
    computed: bool = False
    alone: bool = True
    switches: dict[str, Any] = field(default_factory=dict)
    accumulated: int = 1
    saves: bool = False


FUSED = {"fused_lora": True}
RUNS: dict[str, Run] = {
    "ddp": Run(ddp, sharded=False),
    "ddp, unused parameters": Run(ddp_unused, sharded=False),
    "ddp, static graph": Run(lambda m: ddp(m, static_graph=True), sharded=False),
    "ddp, buckets as gradients": Run(lambda m: ddp(m, gradient_as_bucket_view=True), sharded=False),
    "ddp, a term over the logits": Run(ddp, sharded=False, loss=with_a_term, computed=True),
    "ddp, unused parameters, a term over the logits": Run(ddp_unused, sharded=False, loss=with_a_term, computed=True),
    "ddp, unused parameters, label smoothing": Run(
        lambda m: ddp_unused(lazy_without_labels(m)), sharded=False, loss=smoothed, alone=False
    ),
    "ddp, tied": Run(ddp, {"tied": True}, sharded=False),
    "ddp, LoRA": Run(ddp, adapt=lora, sharded=False),
    "ddp, accumulated": Run(ddp, sharded=False, accumulated=2, saves=True),
    "ddp, fused LoRA, accumulated": Run(ddp, adapt=lora, sharded=False, switches=FUSED, accumulated=2),
    "ddp, fused LoRA on NF4": Run(ddp, adapt=nf4_lora, sharded=False, switches=FUSED),
    "ddp, real logits": Run(ddp, sharded=False, switches={"fast_loss": True}),
    "fsdp": Run(fsdp, saves=True),
    "fsdp, accumulated": Run(fsdp, accumulated=2),
    "fsdp, fused LoRA, accumulated": Run(lambda m: fsdp_lora(m), adapt=lora, switches=FUSED, accumulated=2, saves=True),
    "fsdp, fused LoRA on NF4, checkpointing": Run(
        lambda m: fsdp_lora(checkpointed_only(m)), adapt=nf4_lora, switches=FUSED
    ),
    "fsdp, LoRA on NF4, accumulated": Run(lambda m: fsdp_lora(m), adapt=nf4_lora, accumulated=2),
    "fsdp, a term over the logits": Run(fsdp, loss=with_a_term, computed=True),
    "fsdp, label smoothing": Run(lambda m: fsdp(lazy_without_labels(m)), loss=smoothed, alone=False),
    "fsdp, tied": Run(fsdp, {"tied": True}, saves=True),
    "fsdp, the head alone": Run(fsdp_head_only),
    "fsdp, resharded root": Run(lambda m: fsdp(m, reshard_after_forward=True), late=False),
    "fsdp, never resharded": Run(lambda m: fsdp(m, reshard_after_forward=False)),
    "fsdp, bf16": Run(lambda m: fsdp(m, mp_policy=BF16), mixed=True),
    "fsdp, bf16, fp32 outputs": Run(
        lambda m: fsdp(m, mp_policy=BF16, root_options={"mp_policy": BF16_OUTPUTS}), mixed=True
    ),
    "fsdp, checkpointing": Run(checkpointed),
    "fsdp, LoRA with a saved head": Run(lambda m: fsdp_lora(m), adapt=lora),
    "fsdp, Qwen3": Run(fsdp, {"prefix": "Qwen3"}),
    "fsdp, Gemma 2": Run(fsdp, {"prefix": "Gemma2", "head_dim": 16}),
    "fsdp, real logits": Run(fsdp, switches={"fast_loss": True}),
    "fsdp, norm and head as a group": Run(lambda m: fsdp(m, head_alone=True)),
    "fsdp, bf16, the head in a group": Run(lambda m: fsdp(m, head_alone=True, mp_policy=BF16), mixed=True),
}


def fsdp_lora(model: Any) -> nn.Module:
    fsdp(model.get_base_model(), root=False)
    return fully_shard(model)


# -- one process of a run --------------------------------------------------------------------------------------------


def full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().float().clone()


def plain_name(name: str) -> str:
    return name.removeprefix("module.")


def train(run: Run, trained: nn.Module, rank: int | None) -> dict[str, Any]:
    """Three steps of SGD; ``rank`` None trains on the whole batch."""
    optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
    losses, gradients = [], []
    for step in range(STEPS):
        whole = batch(step)
        mine = whole if rank is None else part_of(whole, rank)
        # DDP and FSDP average over the processes, as Trainer makes up for: a sum over all labels of all processes
        items = torch.tensor(number_of_labels(whole))
        scale = 1 if rank is None else WORLD_SIZE
        total = torch.zeros(())
        for part, synchronised in micro_batches(trained, mine, run.accumulated):
            with synchronised:
                loss = run.loss(trained, part, items) * scale
                loss.backward()
            total += loss.detach() / scale
        if rank is not None:
            dist.all_reduce(total)
        losses.append(float(total))
        gradients.append({plain_name(n): full(p.grad) for n, p in trained.named_parameters() if p.requires_grad})
        optimizer.step()
        optimizer.zero_grad()
    weights = {plain_name(n): full(p) for n, p in trained.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def micro_batches(
    trained: Any, rows: dict[str, torch.Tensor], count: int
) -> Iterator[tuple[dict[str, torch.Tensor], AbstractContextManager[Any]]]:
    """Parts of a batch, each with the context in which gradients stay at home but for the last."""
    size = rows["labels"].shape[0] // count
    for index in range(count):
        last = index == count - 1
        if hasattr(trained, "set_requires_gradient_sync"):
            trained.set_requires_gradient_sync(last)
        stays = not last and isinstance(trained, DistributedDataParallel)
        yield (
            {key: value[index * size : (index + 1) * size] for key, value in rows.items()},
            trained.no_sync() if stays else nullcontext(),
        )


def save_and_load(trained: Any, plain: Any, alone: Any) -> dict[str, Any]:
    """Of a trained model: its full state, loaded into a model of one process, and its shards, written and read."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full_state, plain_state = (get_model_state_dict(model, options=whole) for model in (trained, plain))
    result: dict[str, Any] = {"keys": [sorted(full_state), sorted(plain_state)]}
    if dist.get_rank() == 0:
        single = copy.deepcopy(alone)
        single.load_state_dict(full_state, strict=True)
        result["logits of the full state"] = evaluate(single, 0)
    folder = shared_folder()
    state = get_model_state_dict(trained)
    before = {name: full(tensor) for name, tensor in state.items()}
    checkpoint.save(state, checkpoint_id=folder)
    for tensor in state.values():
        tensor.zero_()
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(trained, state)
    after = {name: full(tensor) for name, tensor in get_model_state_dict(trained).items()}
    result["shards"] = [before, after]
    return result


def evaluate(trained: nn.Module, rank: int | None) -> torch.Tensor:
    """The logits of a batch after the training, read from an output with a loss: reading them is still possible."""
    mine = batch(9) if rank is None else part_of(batch(9), rank)
    trained.eval()
    with torch.no_grad():
        logits: torch.Tensor = trained(**mine).logits
        values = (logits + 0).float()
    trained.train()
    return values


def measure(run: Run, rank: int) -> dict[str, Any]:
    """The run accelerated, the same without foak, and without foak in one process on the whole batch."""
    result: dict[str, Any] = {}
    computed = [0]
    compute = LazyLogits.compute

    def counted(self: LazyLogits) -> torch.Tensor:
        computed[0] += 1
        return compute(self)

    fast = run.adapt(build(**run.model))
    alone = copy.deepcopy(fast)
    distributed = copy.deepcopy(fast)
    AccelerationFramework(configuration(**run.switches)).apply(fast)
    fast = run.prepare(fast)
    result["sharded"] = all(isinstance(p, DTensor) for p in fast.parameters())
    with mock.patch.object(LazyLogits, "compute", counted):
        result["fast"] = train(run, fast, rank)
    result["computed"] = computed[0]
    try:
        result["fast logits"] = evaluate(fast, rank)
    except UnsupportedError as error:
        result["unread"] = str(error)
    try:
        AccelerationFramework(configuration(**run.switches)).apply(fast)
    except UnsupportedError as error:
        result["refusal"] = str(error)
    prepared = run.prepare(distributed)
    result["plain"] = train(run, prepared, rank)
    result["plain logits"] = evaluate(prepared, rank)
    result["alone"] = train(run, alone, None)
    if run.saves:
        result["saved"] = save_and_load(fast, prepared, alone)
    return result


def process(rank: int, folder: str, port: int) -> None:
    """One process: every run, each result in a file of its own, an error as its text."""
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        RANKS_FOLDER=folder,
    )
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=300))
    for name, run in RUNS.items():
        try:
            result = measure(run, rank)
        except Exception:  # noqa: BLE001 - the next run must be measured too; the test shows the text
            result = {"error": traceback.format_exc()}
        torch.save(result, Path(folder) / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(process, args=(sys.argv[1], int(sys.argv[2])), nprocs=WORLD_SIZE, join=True)
