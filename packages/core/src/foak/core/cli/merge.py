"""`foak merge ADAPTER --into MODEL OUT`: a trained adapter becomes part of a 16-bit checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foak.core.errors import ConfigError
from foak.core.plugin import require_package

__all__ = ["merge_command"]


def merge_command(
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="Folder of a saved adapter, such as runs/quickstart/final.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    into: Annotated[
        str,
        typer.Option(
            "--into",
            metavar="MODEL",
            help="The unquantized model: a folder (of a GGUF file too), a hub id, or package:NAME.",
        ),
    ],
    dtype: Annotated[
        str,
        typer.Option("--dtype", metavar="DTYPE", help="bfloat16, float16 or float32; auto: that of the checkpoint."),
    ] = "auto",
) -> None:
    """Merge a trained adapter into a model and save it for serving; also one trained on a quantized base."""
    for package in ("peft", "safetensors"):
        require_package(package, "foak merge", "foak-core[train]")
    from foak.core.cli.output import print_line
    from foak.core.merge import DTYPES, merge_adapter

    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype}; allowed: {', '.join(DTYPES)}")
    merged = merge_adapter(adapter, into, out, dtype)
    print_line(f"{merged.layers} layers merged in {merged.dtype}: {merged.folder}")
