"""What padding-free training makes of a trainer: its training batches, and what is counted about them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_utils import seed_worker

from foak.core import UnsupportedError
from foak.padding_free.collator import PaddingFreeCollator
from foak.padding_free.lengths import sample_lengths
from foak.padding_free.packed import PACKED
from foak.padding_free.sampler import MultipackSampler

__all__ = ["InputTokens", "TrainingBatches", "check_trainer"]


def check_trainer(trainer: Any, key: str, multipack_key: str | None) -> None:
    """Refuse a trainer whose batches cannot be laid end to end.

    Args:
        trainer: a `transformers.Trainer`.
        key: the dotted key of padding-free training, for messages.
        multipack_key: that of multipack, or None without it.

    Raises:
        UnsupportedError: names what was found and what to change.
    """
    args = trainer.args
    trl = next((cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] == "trl"), None)
    if trl is not None and not any(cls.__name__ == "SFTTrainer" for cls in type(trainer).__mro__):
        raise UnsupportedError(
            f"{key}: {trl.__name__} reads its batches row by row, so they cannot be laid end to end; of TRL's trainers "
            "SFTTrainer is served"
        )
    if getattr(trainer, "_is_vision_dataset", False):
        raise UnsupportedError(f"{key}: batches with images cannot be laid end to end")
    if getattr(args, "neftune_noise_alpha", None) is not None:
        raise UnsupportedError(
            f"{key}: NEFTune scales its noise by the length of a row, and a packed row is as long as all sequences of "
            "the batch; set neftune_noise_alpha to None"
        )
    streams = isinstance(trainer.train_dataset, IterableDataset)
    if streams and args.world_size > 1 and args.accelerator_config.dispatch_batches is not False:
        raise UnsupportedError(
            f"{key}: accelerate would cut the batches of a streamed data set apart to deal them to "
            f"{args.world_size} processes; set accelerator_config={{'dispatch_batches': False}}"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if max(getattr(parallelism, name, None) or 1 for name in ("sp_size", "cp_size")) > 1:
        raise UnsupportedError(f"{key}: sequences that are split over devices cannot be laid end to end")
    if multipack_key is None:
        return
    if args.dataloader_drop_last:
        raise UnsupportedError(f"{multipack_key} drops no sample; set dataloader_drop_last to False")
    strategy = str(getattr(args, "train_sampling_strategy", "random"))
    if "random" not in strategy:
        raise UnsupportedError(
            f"{multipack_key} chooses which samples meet in a batch, and so does train_sampling_strategy={strategy!r}; "
            "use 'random'"
        )


class TrainingBatches:
    """Takes the place of a trainer's `get_train_dataloader`.

    Args:
        trainer: the trainer.
        key: the dotted key of multipack, for messages.
        multipack: the values of its section, or None: then the trainer's own sampler and batch size stay.
        rows: whether the model needs the rows of buckets.
    """

    def __init__(self, trainer: Any, key: str, multipack: Mapping[str, Any] | None, *, rows: bool = True) -> None:
        self.trainer, self.key, self.multipack, self.rows = trainer, key, multipack, rows
        self.inner = trainer.get_train_dataloader

    def __call__(self) -> DataLoader[Any]:
        """The data loader of the training, whose batches are packed."""
        trainer = self.trainer
        collator = PaddingFreeCollator(trainer.data_collator, trainer.args.device.type, rows=self.rows)
        if self.multipack is not None:
            return self._multipacked(collator)
        before = trainer.data_collator
        trainer.data_collator = collator
        try:
            loader: DataLoader[Any] = self.inner()
        finally:
            trainer.data_collator = before
        return loader

    def sampler(self) -> MultipackSampler:
        """The batches of this process; reads the lengths of all samples."""
        assert self.multipack is not None
        args = self.trainer.args
        lengths = sample_lengths(
            self.trainer.train_dataset,
            num_processes=self.multipack["num_processes"],
            length_column=args.length_column_name,
            key=self.key,
        )
        if not (lengths > 0).all():
            raise UnsupportedError(
                f"{self.key}: sample {int((lengths <= 0).argmax())} of the training data has no token; leave it out"
            )
        max_tokens = self.multipack["max_tokens"]
        if max_tokens is None:
            # the batch size of now: smaller than the arguments' where auto_find_batch_size has run out of memory
            average = math.ceil(self.trainer._train_batch_size * float(lengths.mean()))
            max_tokens = max(average, int(lengths.max(initial=1)))
        return MultipackSampler(
            lengths,
            max_tokens,
            world_size=args.world_size,
            rank=args.process_index,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            key=f"{self.key}.max_tokens",
        )

    def _multipacked(self, collator: PaddingFreeCollator) -> DataLoader[Any]:
        from accelerate.data_loader import prepare_data_loader

        trainer, args = self.trainer, self.trainer.args
        if trainer.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        sampler = self.sampler()
        dataset = trainer.train_dataset
        if isinstance(getattr(dataset, "column_names", None), list):
            dataset = trainer._remove_unused_columns(dataset, description="training")
        else:
            collator.collator = trainer._get_collator_with_removed_columns(collator.collator, description="training")
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            worker_init_fn=functools.partial(
                seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
            ),
        )
        # The sampler deals to the ranks itself; accelerate would deal its batches once more.
        accelerator = trainer.accelerator
        prepared: DataLoader[Any] = prepare_data_loader(
            loader, accelerator.device, num_processes=1, process_index=0, put_on_device=accelerator.device_placement
        )
        accelerator._dataloaders.append(prepared)
        return prepared


class InputTokens:
    """Takes the place of a trainer's `_track_num_input_tokens`, which counts by the mask where a batch has one.

    Without it, the tokens that end a text would not be counted where they pad as well.
    """

    def __init__(self, trainer: Any) -> None:
        self.inner = trainer._track_num_input_tokens

    def __call__(self, inputs: Mapping[str, Any]) -> None:
        if PACKED in inputs:
            inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
        self.inner(inputs)
