"""The plugin for `training.attention.padding_free` and `training.dataloader.multipack`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from foak.core.errors import UnsupportedError
from foak.core.plugin import AccelerationPlugin, Key, Section

__all__ = ["PaddingFreePlugin"]

PADDING_FREE = "training.attention.padding_free"
MULTIPACK = "training.dataloader.multipack"


class PaddingFreePlugin(AccelerationPlugin):
    """Reads and checks the two sections, and refuses them: this release does not train padding-free.

    Ignoring the sections instead would train with padding, and without balanced batches, while the file says otherwise.
    """

    name = "padding-free"
    any_of = (PADDING_FREE, MULTIPACK)
    order = 200
    keys = (
        Key("method", ("huggingface",), "how the batch is flattened", default="huggingface", under=(PADDING_FREE,)),
        Key("num_processes", (int,), "processes that compute the packing", default=4, under=(MULTIPACK,)),
    )

    @classmethod
    def from_config(cls, section: Section) -> Self:
        """Refuses the sections.

        Raises:
            UnsupportedError: always, naming the sections that the configuration has.
        """
        sections = " and ".join(f"{section.root}.{path}" for path in section.paths)
        raise UnsupportedError(
            f"{section.source or 'configuration'}: {sections} cannot be served: foak-padding-free 0.1 does not train "
            "padding-free yet; remove the section, or use TRL's own padding_free=True or packing=True"
        )

    @classmethod
    def diagnose(cls) -> Sequence[tuple[str, str]]:
        """One row for each section."""
        return (("padding-free attention", "not in this release"), ("multipack", "not in this release"))
