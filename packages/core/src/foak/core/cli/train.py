"""`foak train RUN.yaml`: the main job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from foak.core.errors import ConfigError
from foak.core.plugin import require_package

__all__ = ["train_command"]


def train_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN.yaml", help="The run file: model, data, peft, training, acceleration.")
    ],
    set: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Changes one key: --set training.max_steps=5. May be repeated."
        ),
    ] = None,
) -> None:
    """Fine-tune a model as RUN.yaml says: report, progress, loss; saves the adapter or model and foak_report.json.

    Several processes: accelerate launch -m foak.core train RUN.yaml
    """
    for package in ("trl", "peft", "datasets", "matplotlib"):
        require_package(package, "foak train", "foak-core[train]")
    from rich.console import Console

    from foak.core.train.interrupt import Interrupted
    from foak.core.train.job import Job
    from foak.core.train.runfile import read_run_file
    from foak.core.train.storage import last_checkpoint

    console = Console()
    try:
        job = Job(read_run_file(run, set or []), console)
        job.train()
        job.save()
    except ConfigError:
        # Every rank reads the same file and finds the same fault: one of them says it.
        if int(os.environ.get("RANK", "0")) > 0:
            raise typer.Exit(2) from None
        raise
    except Interrupted as interrupted:
        if int(os.environ.get("RANK", "0")) == 0:
            last = last_checkpoint(Path(job.args.output_dir))
            resume = f"to go on: foak train {run} --set training.resume_from_checkpoint=true"
            rest = "training.save_strategy left no checkpoint" if last is None else f"{last} is whole; {resume}"
            console.print(f"Stopped by {interrupted}; {rest}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(128 + interrupted.signum) from None
