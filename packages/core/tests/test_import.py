"""Importing foak.core does nothing: no CUDA, no triton, no transformers models, no change of the process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, os, sys, time
import torch
import transformers
before, modules, logger_handlers = dict(os.environ), set(sys.modules), len(__import__("logging").root.handlers)
threads = torch.get_num_threads()
start = time.process_time()
import foak.core
%s
seconds = time.process_time() - start
new = sorted(set(sys.modules) - modules)
print(json.dumps({
    "seconds": seconds,
    "new": new,
    "environment": before == dict(os.environ),
    "cuda": torch.cuda.is_initialized(),
    "threads": threads == torch.get_num_threads(),
    "handlers": logger_handlers == len(__import__("logging").root.handlers),
}))
"""

NAMES = "AccelerationFramework, AccelerationPlugin, ConfigError, ModelPatcher, PatchReport, Rule, UnsupportedError"


@pytest.mark.parametrize("then", ["", f"from foak.core import {NAMES}", "import foak.core.cli.app"])
def test_import_does_nothing(then: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE % then], capture_output=True, text=True, check=True, timeout=120
    )
    probe = json.loads(result.stdout)
    assert probe["environment"]
    assert probe["threads"]
    assert probe["handlers"]
    assert not probe["cuda"]
    heavy = (
        "triton",
        "peft",
        "trl",
        "datasets",
        "accelerate",
        "bitsandbytes",
        "transformers.trainer",
        "transformers.models",
    )
    assert [name for name in probe["new"] if name.startswith(heavy)] == []
    # CPU seconds, which do not depend on what else the machine does; measured: 0.01, 0.09 and 0.14.
    assert probe["seconds"] < (0.3 if not then else 0.6)
    if not then:
        assert [name for name in probe["new"] if name.startswith("foak")] == ["foak", "foak.core", "foak.core._version"]


def test_every_public_name_is_there() -> None:
    import foak.core

    for name in foak.core.__all__:
        assert getattr(foak.core, name) is not None
    assert set(foak.core.__all__) <= set(dir(foak.core))
    with pytest.raises(AttributeError, match="no attribute 'Acceleration'"):
        foak.core.Acceleration  # noqa: B018


def test_the_namespace_has_no_init() -> None:
    import foak

    assert foak.__file__ is None
