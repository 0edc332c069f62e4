"""A process that serves calls, one JSON line each, so that engines are measured in separate processes.

Both ends: `serve` in the process, `Worker` in the one that starts it. Knows nothing of what is called, and imports
nothing of ours, so that it runs in any Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
_READY = "ready"


def serve(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Serve calls from standard input until it ends; output of `methods` goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    replies.write(json.dumps({"result": _READY}) + "\n")
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": methods[call["method"]](**call["arguments"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")


class WorkerError(Exception):
    """A call failed in the worker, or the worker died; the message has its last output."""


class Closable:
    """Closes itself at the end of a `with` block."""

    def close(self) -> None:
        """End it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Worker(Closable):
    """A running `python -m MODULE ARGUMENTS`; close it, or use it as a context manager."""

    def __init__(self, module: str, *arguments: object, python: str = sys.executable, root: Path = ROOT) -> None:
        """Start it in the checkout `root` and wait until it serves.

        Raises:
            WorkerError: it ended or failed before that.
        """
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [python, "-m", module, *map(str, arguments)],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._reply() == _READY

    @property
    def pid(self) -> int:
        """The process's id, for measuring its memory."""
        return self._process.pid

    def call(self, method: str, **arguments: Any) -> Any:
        """Return the method's result; raise WorkerError if it raises."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None
        return self._reply()

    def close(self) -> None:
        """End its input, and wait until it has ended."""
        self._process.communicate()
        self._errors.close()

    def _reply(self) -> Any:
        """Return the result of the worker's next reply.

        Raises:
            WorkerError: the call failed, or the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(self._last_words())
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def _last_words(self) -> str:
        """Wait for the process to end, and return its exit status with the last line of its errors."""
        self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return f"the process ended with {self._process.returncode}: {words[-1]}"
