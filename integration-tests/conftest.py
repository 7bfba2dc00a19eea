"""Options of the integration tests, and the counts of a run: `--record` writes them into the README."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("foak")
    group.addoption("--full", action="store_true", help="every case, fault and example, not the short forms: hours")
    group.addoption("--record", action="store_true", help="write what was counted into integration-tests/README.md")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the smallest model that `foak train` can be run on."""
    from byte_llama import write_byte_llama

    folder = tmp_path_factory.mktemp("tiny")
    write_byte_llama(folder)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Under `--record`: one row for each folder that counted something; rows of other folders stay."""
    if not config.getoption("record") or "PYTEST_XDIST_WORKER" in os.environ:
        return
    import counting

    counted: dict[str, Counter[str]] = {}
    failed: set[str] = set()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport):
                continue
            folder = counting.folder_of(report.nodeid)
            if outcome in ("failed", "error"):
                failed.add(folder)
            for name, value in report.user_properties:
                if name == "counts" and report.when == "call" and report.passed:
                    counted.setdefault(folder, Counter()).update(value)
    for folder in failed & counted.keys():
        terminalreporter.write_line(f"{folder}: a test failed, so nothing is recorded", yellow=True)
    counting.record({folder: dict(c) for folder, c in counted.items() if folder not in failed}, HERE / "README.md")
