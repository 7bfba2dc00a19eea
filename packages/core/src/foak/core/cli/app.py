"""The command `foak`: its subcommands and options, and how a failure ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foak.core._version import __version__
from foak.core.cli.merge import merge_command
from foak.core.cli.train import train_command
from foak.core.errors import ConfigError, UnsupportedError

__all__ = ["app", "main"]

app = typer.Typer(
    name="foak",
    help="Faster, exact fine-tuning of language models with Hugging Face Trainer and TRL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A configuration (foak.yaml) or a run file.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"foak-core {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    # Read by `main`, which takes it from anywhere on the command line; declared here for the help.
    debug: Annotated[bool, typer.Option("--debug", help="On an error, print the traceback too.")] = False,
) -> None:
    pass


app.command("train")(train_command)
app.command("merge")(merge_command)


@app.command()
def explain(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder, config.json or .gguf file, a hub id in the local cache, or a type such as llama.",
        ),
    ],
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Show what would be patched in a model and why not; needs no weights and no network."""
    from foak.core.cli.explain import explain_command

    explain_command(model, config, as_json)


@app.command()
def plugins(config: ConfigFile = None, as_json: Json = False) -> None:
    """List the installed plugins and the keys that activate each."""
    from foak.core.cli.plugins import plugins_command

    plugins_command(config, as_json)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show versions, devices, and which kernels and precisions work here."""
    from foak.core.cli.doctor import doctor_command

    doctor_command(as_json)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments without the program's name; those of the process if None.

    Returns:
        The exit code: 0; 2 for wrong usage or a wrong configuration; 1 for what cannot work here or fails on the way
        (files, disk, memory). A failure prints one sentence on stderr, and with `--debug` its traceback. An error that
        is a fault of foak itself keeps its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug = "--debug" in own
    arguments = [item for item in own if item != "--debug"] + arguments[len(own) :]
    try:
        app(args=arguments, prog_name="foak")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except _expected_failures() as error:
        if debug:
            raise
        sentence = " ".join(str(error).split()) or type(error).__name__
        print(f"foak: error: {sentence}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _expected_failures() -> tuple[type[BaseException], ...]:
    """What files, disks, memory, and the libraries below raise for reasons outside foak.

    `TypeError`, `AttributeError`, `KeyError` and the like are not among them: those are faults, and need a traceback.
    """
    safetensors = sys.modules.get("safetensors")  # raises a class of its own when the disk is full
    more = (safetensors.SafetensorError,) if safetensors is not None and hasattr(safetensors, "SafetensorError") else ()
    return (UnsupportedError, ConfigError, OSError, RuntimeError, ValueError, ImportError, MemoryError, *more)
