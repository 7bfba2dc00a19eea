"""The process that measures one or several scenarios: `python -m foak_bench.worker JOB.json`.

JOB.json holds `scratch`, `scenarios` and `share`: whether many share this process and make quantized bases in it. Each
scenario's result is a file beside it, announced by a line on stdout that begins with `MARK`. A process ends early, with
the rest of its scenarios undone, after one that did not fit, and when an earlier one left more than `_LEFTOVER_BYTES`
behind on the device: then the next peak would not be its own.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from foak_bench.scenarios import Scenario

__all__ = ["MARK", "main"]

MARK = "foak-bench: "
_LEFTOVER_BYTES = 256 * 2**20


def main(job_file: Path) -> None:
    """Measures the scenarios of a job file."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    scenarios = [Scenario.from_dict(content) for content in job["scenarios"]]
    if scenarios[0].row.by == "unsloth":
        # It patches transformers and TRL, and must come before them.
        import unsloth  # type: ignore[import-not-found]  # noqa: F401
    import torch
    from rich.console import Console

    from foak.core.errors import ConfigError, UnsupportedError
    from foak_bench.measure import measure
    from foak_bench.peers import left_as_found

    for index, scenario in enumerate(scenarios):
        if torch.cuda.is_available() and torch.cuda.memory_allocated() > _LEFTOVER_BYTES:
            break
        _announce("start", index)
        result: dict[str, Any]
        try:
            with left_as_found(scenario):
                measured = measure(scenario, Path(job["scratch"]), Console(width=160), quantize_here=job["share"])
            result = {"status": "measured", **measured}
        except (ConfigError, UnsupportedError) as error:
            result = {"status": "failed", "reason": str(error)}
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            traceback.print_exc()
            result = {"status": "does not fit", "reason": _first_line(error)}
        if int(os.environ.get("RANK", "0")) == 0:
            job_file.with_name(f"result-{index}.json").write_text(json.dumps(result), encoding="utf-8")
        _announce("end", index)
        if result["status"] == "does not fit":
            break


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the CPU's allocator (which has no type for it), had no memory left."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _announce(event: str, index: int) -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"\n{MARK}{event} {index}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
