"""Fine-tunes SmolLM2-135M-Instruct on Tern's house style, and shows what the training and foak's kernels change.

    nox -s quickstart                                   # installs what it needs, offline after that
    python examples/quickstart/quickstart.py            # the same, where everything is installed
    python examples/quickstart/quickstart.py --set training.max_steps=80

The run itself is `foak train examples/quickstart/run.yaml`; around it this script asks the model one held-out question
before and after, and then takes the same steps once without and once with foak. It starts afresh each time: what an
earlier quickstart left in the output folder is removed. It ends with exit code 1 if the held-out loss does not fall, if
a loss differs by more than 1e-3, or if the steps with foak are slower than 0.97 times the plain ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from comparison import LOSS_TOLERANCE, MIN_SPEED_RATIO, Comparison, compare
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from foak.core.train.job import Job
from foak.core.train.model import LoadedModel, load_model
from foak.core.train.runfile import RunFile, read_run_file

HERE = Path(__file__).parent
QUESTION = "Why do planes have rounded windows?"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of run.yaml")
    parser.add_argument("--pairs", type=int, default=14, help="steps of the comparison, each taken plain and with foak")
    options = parser.parse_args()
    console = Console()
    start = time.perf_counter()
    run = read_run_file(HERE / "run.yaml", options.set)
    shutil.rmtree(run.training["output_dir"], ignore_errors=True)

    console.rule("1. A pretrained model")
    with console.status(f"Reading {run.model.name_or_path} …"):
        loaded = load_model(run)
    show_answer(console, "before training", ask(loaded))

    console.rule("2. foak train run.yaml")
    held_out = train(run, loaded, console)

    console.rule("3. The same steps, without and with foak")
    comparison = compare(run, loaded, console, pairs=options.pairs)
    console.print(comparison_table(comparison))

    console.rule("Result")
    passed = show_verdict(console, held_out, comparison)
    console.print(f"{time.perf_counter() - start:.0f} s in all", highlight=False)
    return 0 if passed else 1


def train(run: RunFile, loaded: LoadedModel, console: Console) -> tuple[float, float]:
    """Trains a copy of the model, shows its answer, and returns the held-out loss before and after."""
    job = Job(run, console, replace(loaded, model=copy.deepcopy(loaded.model)))
    job.train()
    result = job.save()
    show_answer(console, "after training", ask(replace(loaded, model=job.trainer.model)))
    losses = [entry["loss"] for entry in result.report["eval_loss"]]
    return losses[0], losses[-1]


def ask(loaded: LoadedModel) -> str:
    """The model's answer to the held-out question (greedy, so it is the same each time)."""
    messages = next(
        example["messages"]
        for line in (HERE / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
        if (example := json.loads(line))["messages"][1]["content"] == QUESTION
    )
    inputs = loaded.tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(loaded.model.device)
    loaded.model.eval()
    output = loaded.model.generate(**inputs, max_new_tokens=70, do_sample=False)
    return str(loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def show_answer(console: Console, when: str, answer: str) -> None:
    console.print(Panel(answer, title=f"{QUESTION}  ({when})", title_align="left", highlight=False))


def comparison_table(comparison: Comparison) -> Table:
    table = Table(title=f"{len(comparison.plain.seconds)} steps each, taken in turn", title_justify="left")
    for heading in ("", "plain", "foak", "foak / plain"):
        table.add_column(heading, justify="left" if not heading else "right")
    plain, foak = comparison.plain, comparison.foak
    table.add_row(
        "tokens/s",
        f"{plain.tokens_per_second:,.0f}",
        f"{foak.tokens_per_second:,.0f}",
        f"{comparison.speed_ratio:.2f} x",
    )
    if plain.peak_bytes and foak.peak_bytes:
        table.add_row(
            "memory a step adds",
            f"{plain.peak_bytes / 2**20:,.0f} MiB",
            f"{foak.peak_bytes / 2**20:,.0f} MiB",
            f"{foak.peak_bytes / plain.peak_bytes:.2f} x",
        )
    table.add_row("loss, first step", f"{plain.losses[0]:.6f}", f"{foak.losses[0]:.6f}", "")
    table.add_row("loss, last step", f"{plain.losses[-1]:.6f}", f"{foak.losses[-1]:.6f}", "")
    table.add_row("largest difference of a loss", "", "", f"{comparison.loss_difference:.1e}")
    return table


def show_verdict(console: Console, held_out: tuple[float, float], comparison: Comparison) -> bool:
    """Prints each check and returns whether all of them passed."""
    before, after = held_out
    checks = [
        (after < before, f"held-out loss falls: {before:.4f} → {after:.4f}"),
        (
            comparison.loss_difference <= LOSS_TOLERANCE,
            f"losses agree step by step: {comparison.loss_difference:.1e}, allowed {LOSS_TOLERANCE:.0e}",
        ),
        (
            comparison.speed_ratio >= MIN_SPEED_RATIO,
            f"speed with foak: {comparison.speed_ratio:.3f} x plain (median of pairs), at least {MIN_SPEED_RATIO} x",
        ),
    ]
    for passed, text in checks:
        console.print(f"[{'green' if passed else 'red'}]{'passed' if passed else 'FAILED'}[/]  {text}", highlight=False)
    return all(passed for passed, _ in checks)


if __name__ == "__main__":
    sys.exit(main())
