"""Models and trainers that must be refused, each with a sentence that says what was found and what to change."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from foak.core import UnsupportedError
from foak.core.guards import check_model, check_train_args, check_trainer, is_trainer

MakeModel = Callable[[], LlamaForCausalLM]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def make_arguments(folder: Path, **kwargs: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **kwargs)


def refuse(model: object, *parts: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        check_model(model)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plain_models_pass(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    assert check_model(model) is model


def test_models_on_the_meta_device_pass(tiny_llama: MakeModel) -> None:
    check_model(tiny_llama().to("meta"))
    mixed = tiny_llama()
    mixed.lm_head.to("meta")
    check_model(mixed)


def test_peft_models_pass(tiny_llama: MakeModel) -> None:
    from peft import LoraConfig, get_peft_model

    check_model(get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])))


# -- already prepared -------------------------------------------------------------------------------------------------


def test_distributed_data_parallel_is_refused(tiny_llama: MakeModel, process_group: None) -> None:
    refuse(nn.parallel.DistributedDataParallel(tiny_llama()), "wrapped in DistributedDataParallel", "call apply")


def test_data_parallel_is_refused(tiny_llama: MakeModel) -> None:
    refuse(nn.DataParallel(tiny_llama()), "wrapped in DataParallel", "one process for each GPU")


def test_fsdp2_is_refused_wherever_it_is(tiny_llama: MakeModel, process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = tiny_llama()
    fully_shard(model.model.layers[1], mesh=init_device_mesh("cpu", (1,)))
    refuse(model, "model.layers.1", "FSDP2", "before fully_shard")


def test_fsdp1_is_refused(tiny_llama: MakeModel) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = tiny_llama()
    model.model.norm = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # its __init__ needs an accelerator
    nn.Module.__init__(model.model.norm)
    refuse(model, "model.norm", "sharded by FSDP")


def test_compiled_models_are_refused(tiny_llama: MakeModel) -> None:
    refuse(torch.compile(tiny_llama()), "compiled by torch.compile", "before torch.compile")
    in_place = tiny_llama()
    in_place.compile()
    refuse(in_place, "compiled in place")
    layer = tiny_llama()
    layer.model.layers[0].compile()
    refuse(layer, "model.layers.0", "compiled in place")


def test_a_deepspeed_engine_is_refused() -> None:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    refuse(engine(), "DeepSpeed engine", "before deepspeed.initialize")


def test_a_class_of_the_same_name_from_elsewhere_is_none(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    model.extra = type("DataParallel", (nn.Module,), {"__module__": "my_package"})()
    check_model(model)


# -- no model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [None, "gpt2", 3, {}, LlamaForCausalLM])
def test_what_is_no_module_is_named(target: object) -> None:
    refuse(target, "apply takes a transformers.Trainer, a PreTrainedModel or a PeftModel, but not ")


def test_a_model_without_config_is_refused() -> None:
    refuse(nn.Linear(2, 2), "Linear has no `config`")


# -- another patcher --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "name"),
    [("liger_kernel", "Liger-Kernel"), ("unsloth", "Unsloth"), ("unsloth_compiled_module_llama", "Unsloth")],
)
def test_an_instance_that_another_library_patched_is_refused(tiny_llama: MakeModel, package: str, name: str) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    forward.__module__ = f"{package}.models"
    model = tiny_llama()
    model.model.norm.forward = types.MethodType(forward, model.model.norm)
    refuse(model, name, "model.norm: LlamaRMSNorm", "do without foak")


def test_a_class_of_another_library_is_refused(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    model.model.norm = type("LigerRMSNorm", (nn.Module,), {"__module__": "liger_kernel.transformers.rms_norm"})()
    refuse(model, "Liger-Kernel", "LigerRMSNorm")


@pytest.mark.parametrize("attribute", ["forward", "rotary"])
def test_a_transformers_module_that_another_library_patched_is_refused(
    tiny_llama: MakeModel, monkeypatch: pytest.MonkeyPatch, attribute: str
) -> None:
    def replacement(*args: Any) -> Any:
        raise AssertionError

    replacement.__module__ = "liger_kernel.transformers.model.llama"
    if attribute == "forward":
        monkeypatch.setattr(LlamaForCausalLM, "forward", replacement)
    else:
        monkeypatch.setattr(sys.modules[LlamaForCausalLM.__module__], "apply_rotary_pos_emb", replacement)
    refuse(tiny_llama(), "Liger-Kernel")


def test_kernels_from_the_hub_are_refused(tiny_llama: MakeModel) -> None:
    model = tiny_llama()
    model._use_kernels = True  # what from_pretrained(use_kernels=True) sets
    refuse(model, "use_kernels=True")


# -- training arguments and trainers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["use_liger_kernel", "use_kernels"])
def test_arguments_for_another_patcher_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"argument {name} is on"):
        check_train_args(SimpleNamespace(**{name: True}))  # type: ignore[arg-type]


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    check_train_args(arguments)
    arguments._n_gpu = 2
    with pytest.raises(UnsupportedError, match=r"over 2 GPUs with DataParallel.*accelerate launch"):
        check_train_args(arguments)


def test_trainers_are_recognised_and_checked(tiny_llama: MakeModel, tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = Trainer(model=model, args=make_arguments(tmp_path))
    assert is_trainer(trainer)
    assert not is_trainer(model)
    check_trainer(trainer)
    trainer.args.use_liger_kernel = True
    with pytest.raises(UnsupportedError, match="use_liger_kernel"):
        check_trainer(trainer)
    trainer.args.use_liger_kernel = False
    trainer.model_wrapped = nn.DataParallel(model)
    with pytest.raises(UnsupportedError, match="DataParallel"):
        check_trainer(trainer)
    trainer.model = None
    with pytest.raises(UnsupportedError, match="no model yet"):
        check_trainer(trainer)
