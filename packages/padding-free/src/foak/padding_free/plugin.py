"""The plugin for `training.attention.padding_free` and `training.dataloader.multipack`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from foak.core.errors import ConfigError
from foak.core.plugin import AccelerationPlugin, Key, Section

if TYPE_CHECKING:
    from foak.padding_free.forward import Settings
    from foak.padding_free.statistics import FillCallback

__all__ = ["PaddingFreePlugin"]

PADDING_FREE = "training.attention.padding_free"
MULTIPACK = "training.dataloader.multipack"


class PaddingFreePlugin(AccelerationPlugin):
    """Lays the sequences of a training batch end to end, and fills batches by tokens instead of by samples."""

    name = "padding-free"
    any_of = (PADDING_FREE, MULTIPACK)
    order = 200
    keys = (
        Key("method", ("huggingface",), "how the batch is flattened", default="huggingface", under=(PADDING_FREE,)),
        Key(
            "attention",
            ("auto", "varlen", "sdpa"),
            "form of attention: varlen_attn, SDPA over buckets of sequences of similar length, or what fits",
            default="auto",
            under=(PADDING_FREE,),
        ),
        Key("num_processes", (int,), "processes that read the samples' lengths", default=4, under=(MULTIPACK,)),
        Key(
            "max_tokens",
            (int,),
            "tokens of a device's batch at most; as many as per_device_train_batch_size samples have on average",
            under=(MULTIPACK,),
        ),
    )

    def __init__(self, section: Section) -> None:
        super().__init__(section)
        self._callbacks: list[FillCallback] = []
        self._packing: Settings | None = None

    @classmethod
    def from_config(cls, section: Section) -> Self:
        """Checks what the sections need of each other.

        Raises:
            ConfigError: multipack without padding_free, or a number below one.
        """
        where = section.source or "configuration"
        if PADDING_FREE not in section.paths:
            raise ConfigError(
                f"{where}: {section.root}.{MULTIPACK} needs {section.root}.{PADDING_FREE}: "
                "batches of equal tokens are only as cheap as they look without padding"
            )
        for name in ("num_processes", "max_tokens"):
            value = section.get(name)
            if value is not None and value < 1:
                raise ConfigError(f"{where}: {section.key(name)} is {value}; allowed: a whole number of at least 1")
        return cls(section)

    def augment(self, model: Any, train_args: Any, peft_config: Any) -> None:
        """Makes the model take packed batches, or refuses it with the reason."""
        from foak.padding_free.support import add_rules

        key = f"{self.section.root}.{PADDING_FREE}"
        self._packing = add_rules(self.patcher, model, train_args, key, self.section["attention"])

    def prepare(self, trainer: Any) -> None:
        """Makes the trainer's training batches packed ones; evaluation and prediction keep theirs."""
        from foak.padding_free.statistics import CountedStep, FillCallback
        from foak.padding_free.trainer import InputTokens, TrainingBatches, check_trainer

        packs = MULTIPACK in self.section.paths
        key = f"{self.section.root}.{MULTIPACK}"
        check_trainer(trainer, f"{self.section.root}.{PADDING_FREE}", key if packs else None)
        multipack = {name: self.section[name] for name in ("num_processes", "max_tokens")} if packs else None
        assert self._packing is not None, "a trainer is prepared after its model"
        batches = TrainingBatches(trainer, key, multipack, rows=self._packing.reads_rows)
        counter = FillCallback(self.patcher.report)
        self.patcher.set_attribute(trainer, "get_train_dataloader", batches)
        self.patcher.set_attribute(trainer, "training_step", CountedStep(trainer, counter, self._packing))
        self.patcher.set_attribute(trainer, "_track_num_input_tokens", InputTokens(trainer))
        self._callbacks = [counter]

    def callbacks(self) -> Sequence[Any]:
        """The one that adds what was gained to the report."""
        return tuple(self._callbacks)

    @classmethod
    def diagnose(cls) -> Sequence[tuple[str, str]]:
        """Which form of attention packed batches get on a GPU and on a CPU."""
        from foak.padding_free import varlen

        cuda = "varlen_attn" if varlen.is_available() else "SDPA over buckets of sequences (no varlen_attn here)"
        return (("packed batches on cuda", cuda), ("packed batches on cpu", "SDPA over buckets of sequences"))
