"""Which scenarios are due, in which order, in which process; keeps the records."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foak_bench.peers import impossible, process_kind
from foak_bench.records import DOES_NOT_FIT, FAILED, SKIPPED, Record, load_record, path_of
from foak_bench.scenarios import Scenario
from foak_bench.worker import MARK

__all__ = ["Runner", "in_order"]

_BENCHMARKS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Due:
    """One measurement that is still to be made: a repeat of a scenario."""

    scenario: Scenario
    repeat: int


def in_order(scenarios: Sequence[Scenario], repeats: int) -> Iterator[Due]:
    """Group by group; within one, repeat by repeat, so that a machine that slows down slows every row of it.

    A check is run once, with the first repeat: its losses do not depend on time. So is a row that says so.
    """
    for _, members in itertools.groupby(scenarios, key=lambda scenario: scenario.group):
        rows = list(members)
        for repeat in range(repeats):
            for scenario in rows:
                if repeat < _repeats_of(scenario, repeats):
                    yield Due(scenario, repeat)


def _repeats_of(scenario: Scenario, repeats: int) -> int:
    return 1 if scenario.check or scenario.row.once else repeats


class Runner:
    """Measures scenarios in processes of their own and keeps a record of each below `out`.

    Args:
        out: the folder of results; what is finished there is not measured again.
        scratch: a folder for logs, checkpoints and data; may be lost.
        repeats: how often a timed scenario is measured.
        share: whether scenarios of one kind may follow each other in one process.
        timeout: seconds after which a process is ended, counted anew for each scenario.
        devices: how many GPUs are here.
        commit: what the tree is at, for the records.
        report: called with a scenario, and with its record when something is known about it (None: it begins).
    """

    def __init__(
        self,
        out: Path,
        scratch: Path,
        *,
        repeats: int,
        share: bool,
        timeout: float,
        devices: int,
        commit: str | None,
        report: Callable[[Scenario, Record | None], None],
    ) -> None:
        self.out = out
        self.scratch = scratch
        self.repeats = repeats
        self.share = share
        self.timeout = timeout
        self.devices = devices
        self.commit = commit
        self.report = report
        self.records: dict[str, Record] = {}

    def plan(self, scenarios: Sequence[Scenario], *, again: bool) -> list[Due]:
        """The measurements that are left, in order; records what cannot run here."""
        due = []
        for item in in_order(scenarios, self.repeats):
            scenario = item.scenario
            if scenario.name not in self.records:
                self.records[scenario.name] = self._start_record(scenario, again=again)
            record = self.records[scenario.name]
            if record.status != SKIPPED and not record.finished(item.repeat + 1):
                due.append(item)
        return due

    def run(self, due: Sequence[Due]) -> None:
        """Measures what is left, as few processes as `share` allows."""
        left = list(due)
        while left:
            batch = self._next_batch(left)
            done = self._run_process([item.scenario for item in batch])
            left = left[done:]
            left = [item for item in left if self.records[item.scenario.name].status not in (DOES_NOT_FIT, FAILED)]

    def _start_record(self, scenario: Scenario, *, again: bool) -> Record:
        path = path_of(self.out, scenario)
        record = Record(scenario, status="", commit=self.commit)
        if path.is_file() and not again:
            earlier = load_record(path)
            if earlier.scenario == scenario and earlier.status not in (SKIPPED, FAILED):
                record = earlier
        reason = impossible(scenario, self.devices)
        if reason is not None and not record.runs:
            record.status, record.reason = SKIPPED, reason
            record.save(self.out)
            self.report(scenario, record)
        return record

    def _next_batch(self, left: Sequence[Due]) -> list[Due]:
        if not self.share:
            return [left[0]]
        kind = process_kind(left[0].scenario)
        return list(itertools.takewhile(lambda item: process_kind(item.scenario) == kind, left))

    def _run_process(self, scenarios: Sequence[Scenario]) -> int:
        """Runs a worker on scenarios; returns how many of them something is known about afterwards, one at least."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            job = Path(folder) / "job.json"
            content = {
                "scratch": str(self.scratch),
                "share": self.share,
                "scenarios": [scenario.to_dict() for scenario in scenarios],
            }
            job.write_text(json.dumps(content), encoding="utf-8")
            log = self.scratch / "logs" / f"{scenarios[0].name.replace('/', '_')}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            worker = subprocess.Popen(
                [*_launcher(scenarios[0].work.gpus), "-m", "foak_bench.worker", str(job)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=self._environment(scenarios[0].work.gpus),
                start_new_session=True,
            )
            try:
                return self._follow(worker, scenarios, job, log)
            finally:
                _end(worker)

    def _follow(self, worker: subprocess.Popen[str], scenarios: Sequence[Scenario], job: Path, log: Path) -> int:
        done = 0
        tail: list[str] = []
        with _Alarm(self.timeout, lambda: _end(worker)) as alarm, log.open("w", encoding="utf-8") as stream:
            assert worker.stdout is not None
            for line in worker.stdout:
                stream.write(line)
                tail = [*tail[-20:], line.strip()] if line.strip() else tail
                if not line.startswith(MARK):
                    continue
                event, index = line.removeprefix(MARK).split()
                if event == "start":
                    alarm.wind()
                    self.report(scenarios[int(index)], None)
                else:
                    result = json.loads(job.with_name(f"result-{index}.json").read_text(encoding="utf-8"))
                    self._add(scenarios[int(index)], result)
                    done = int(index) + 1
        code = worker.wait()
        if done == len(scenarios) or (code == 0 and done > 0):
            return done
        self._add(scenarios[done], _failure(code, alarm.rang, self.timeout, tail, log))
        return done + 1

    def _add(self, scenario: Scenario, result: dict[str, Any]) -> None:
        record = self.records[scenario.name]
        record.add(result)
        record.commit = self.commit
        record.save(self.out)
        self.report(scenario, record)

    def _environment(self, gpus: int) -> dict[str, str]:
        paths = [str(_BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(self.devices, 1))))
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "CUDA_VISIBLE_DEVICES": ",".join(visible.split(",")[:gpus]) if self.devices else "",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


class _Alarm:
    """Calls a function once the time since it was last wound is over; a context manager."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self.seconds = seconds
        self.call = call
        self.rang = False
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _Alarm:
        self.wind()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def wind(self) -> None:
        """Begins anew."""
        self._stop()
        self._timer = threading.Timer(self.seconds, self._ring)
        self._timer.daemon = True
        self._timer.start()

    def _ring(self) -> None:
        self.rang = True
        self.call()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _launcher(gpus: int) -> list[str]:
    if gpus == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]


def _failure(code: int, timed_out: bool, timeout: float, tail: Sequence[str], log: Path) -> dict[str, Any]:
    if timed_out:
        return {"status": FAILED, "reason": f"took longer than {timeout:g} s"}
    if code == -signal.SIGKILL:
        return {"status": DOES_NOT_FIT, "reason": "the system ended the process, as it does when memory runs out"}
    last = tail[-1] if tail else f"exit code {code}"
    return {"status": FAILED, "reason": f"{last} (exit code {code}; its output is in {log})"}


def _end(worker: subprocess.Popen[str]) -> None:
    """Ends a worker and the processes that it started, if it still runs."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
