"""`foak doctor`: versions, devices, precisions, and what each plugin finds."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from foak.core import precision
from foak.core.cli.output import print_json, print_line, print_table
from foak.core.discovery import installed_plugins

__all__ = ["diagnosis", "doctor_command"]

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "triton", "bitsandbytes", "gguf")
"""Shown even where no installed package of foak asks for them."""


def doctor_command(as_json: bool) -> None:
    """Prints the diagnosis.

    Raises:
        ConfigError: a plugin cannot be imported.
        SystemExit: with code 1 when a required package is missing or its version is out of the declared range.
    """
    found = diagnosis()
    if as_json:
        print_json(found)
    else:
        rows = [(row["name"], row["found"] or "-", row["required"] or "-", row["state"]) for row in found["versions"]]
        print_table("Versions", ("package", "found", "declared", "state"), rows)
        print_table("Devices and precisions", ("what", "finding"), found["devices"])
        print_table("What trains", precision.HEADER, found["precision"])
        for name, lines in found["plugins"].items():
            if lines:
                print_table(f"Plugin {name}", ("what", "finding"), lines)
        if not found["plugins"]:
            print_line("No plugin is installed; start with: pip install foak-fast-kernels")
    if any(row["state"] in ("missing", "out of range") for row in found["versions"]):
        raise SystemExit(1)


def diagnosis() -> dict[str, Any]:
    """What `foak doctor --json` prints.

    Returns:
        `versions`, `devices`, `precision` (the rows of `foak.core.precision`), and `plugins` (name to rows of what and
        finding).
    """
    plugins = {
        item.plugin.name: [[str(what), str(finding)] for what, finding in item.plugin.diagnose()]
        for item in installed_plugins()
    }
    return {
        "versions": _versions(),
        "devices": [*_devices(), ["kernels", _kernels(plugins)]],
        "precision": _precision(),
        "plugins": plugins,
    }


def _kernels(plugins: Mapping[str, object]) -> str:
    """Core has no kernels and knows none: each plugin speaks for its own."""
    return "those of the plugins, which say below what runs here" if plugins else "none: no plugin is installed"


def _versions() -> list[dict[str, Any]]:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    declared: dict[str, list[tuple[str, Requirement]]] = {}
    own: set[str] = set()
    for dist in metadata.distributions():
        name: str = canonicalize_name(dist.name or "")
        if not name.startswith("foak-") or name in own:
            continue
        own.add(name)
        for line in dist.requires or ():
            requirement = Requirement(line)
            declared.setdefault(canonicalize_name(requirement.name), []).append((name, requirement))
    rows = [_version_row("python", platform.python_version(), [])]
    for name in [*sorted(own), *LIBRARIES, *sorted(set(declared) - own - set(LIBRARIES))]:
        try:
            found: str | None = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = None
        rows.append(_version_row(name, found, declared.get(name, [])))
    return rows


def _version_row(name: str, found: str | None, declared: list[tuple[str, Any]]) -> dict[str, Any]:
    ranges = dict.fromkeys(str(requirement.specifier) for _, requirement in declared if requirement.specifier)
    # A requirement with a marker belongs to an extra: without it the package may be absent.
    needed = any(requirement.marker is None for _, requirement in declared)
    if found is None:
        state = "missing" if needed else "not installed"
    elif all(requirement.specifier.contains(found, prereleases=True) for _, requirement in declared):
        state = "ok"
    else:
        state = "out of range"
    return {"name": name, "found": found, "required": ", ".join(ranges) or None, "state": state}


def _precision() -> list[list[str]]:
    import torch

    served = "fp16" if torch.accelerator.is_available() else "fp16 (needs a GPU)"
    return [[weights, served if mixed == "fp16" else mixed, *cells] for weights, mixed, *cells in precision.rows()]


def _devices() -> list[list[str]]:
    import torch

    rows = [["cpu", f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"]]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            rows.append(
                [
                    f"cuda:{index}",
                    f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
                    f"{properties.major}.{properties.minor}",
                ]
            )
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        modern = torch.cuda.get_device_capability()[0] >= 8
        rows.append(["weights in", "float32, float16" + (", bfloat16" if bf16 else "")])
        rows.append(["mixed precision", "fp16" + (", bf16" if bf16 else "") + (", tf32" if modern else "")])
    else:
        rows.append(["cuda", "no CUDA device"])
        rows.append(["weights in", "float32, bfloat16"])
        rows.append(["mixed precision", "bf16 (fp16 needs a GPU)"])
    return rows
