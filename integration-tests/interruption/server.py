"""Starts runs of `foak train` as processes that are forked: what a run imports takes far longer than its steps.

python server.py        # reads requests from its input and answers on its output, a line of JSON each
    {"arguments": [...], "output": path, "file_limit": bytes or null} -> {"pid": number}, later {"code": number}
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from typing import Any

PRELOADED = ("torch", "peft", "trl", "transformers.models.llama.modeling_llama", "foak.core.train.job")


def limit_files(size: int) -> None:
    """From now on a write beyond `size` bytes of a file fails, in the middle of it, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def run(request: dict[str, Any], output: int) -> int:
    """In the child: the command, which prints into a pipe; gives its exit code."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if request["file_limit"] is not None:
        limit_files(request["file_limit"])
    from foak.core.cli.app import main

    code = main(request["arguments"])
    sys.stdout.flush()
    return code


def serve() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # Another process writes the output: the limit on files is the run's alone.
        with open(request["output"], "wb") as file:
            writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
        assert writer.stdin is not None
        child = os.fork()
        if not child:
            code = 70
            try:
                code = run(request, writer.stdin.fileno())
            finally:
                os._exit(code)
        writer.stdin.close()
        print(json.dumps({"pid": child}), flush=True)
        status = os.waitpid(child, 0)[1]
        writer.wait()
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    serve()
