"""Compile a model in a process of its own, and read its progress.

Knows `radixlm compile` and its pipes, not where artifacts are stored.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import BinaryIO

import click
from radixlm.runtime.errors import CompileError

_RADIXLM = (sys.executable, "-P", "-c", "from radixlm.cli.main import main; main()")

Say = Callable[[str], None]
Progressed = Callable[[str, float], None]
"""Called with the stage of a compile, and the overall progress, 0 to 1."""


class StatusPipe:
    """Both ends of a pipe for status lines. The reader is unbuffered, so that it never reads beyond a line."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader = os.fdopen(reader, "rb", buffering=0)
        self.writer = os.fdopen(writer, "wb", buffering=0)


def watch(process: subprocess.Popen[str], status: BinaryIO, kept: Say | None) -> None:
    """Wait in a thread until the artifact is written to the cache folder, and call `kept` with the result.

    Wrong weights end this process, with an error message even if `kept` is None.
    """
    from radixlm.compile.in_memory import NOT_KEPT, WRONG

    def wait() -> None:
        with status:
            outcome = status.readline().decode().rstrip()
        outcome = outcome or f"{NOT_KEPT}: the process that writes it to the disk was killed"
        process.wait()
        if outcome.startswith(WRONG):
            (kept or partial(click.echo, err=True))(f"Error: {outcome.removeprefix(WRONG).lstrip()}")
            os.kill(os.getpid(), signal.SIGTERM)
        elif kept is not None:
            kept(outcome)

    threading.Thread(target=wait, name="radixlm-kept", daemon=True).start()


class _Lines:
    """Passes the lines of a process's stderr to `say`, in a thread, except for its final `Error: ` line."""

    def __init__(self, process: subprocess.Popen[str], say: Say | None) -> None:
        self._last = ""
        self._thread = threading.Thread(target=self._read, args=(process, say), name="radixlm-said", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Wait for the end of the stream, and return its last line."""
        self._thread.join()
        return self._last

    def _read(self, process: subprocess.Popen[str], say: Say | None) -> None:
        """Pass each line of the process's errors to `say`, except its error message, and keep the last one."""
        for line in process.stderr or ():
            self._last = line.rstrip()
            if say is not None and not self._last.startswith("Error: "):
                say(self._last)


def run_compile(
    arguments: Sequence[str],
    descriptors: Sequence[int],
    say: Say | None,
    status: StatusPipe | None = None,
    written: Callable[[], None] | None = None,
    progressed: Progressed | None = None,
) -> subprocess.Popen[str]:
    """Run `radixlm compile` to its end, or until it reports that the artifact can be used.

    Until then, it is terminated if this process ends, except by SIGKILL.

    Args:
        descriptors: file descriptors that the process inherits.
        status: pipe for its reports.
        written: called when it reports that the artifact is complete.
        progressed: called with the stage and the overall progress when it reports them.
    """
    from radixlm.compile.in_memory import PROGRESS, WRITTEN

    debug = click.get_current_context().find_root().params.get("debug")
    command = [*_RADIXLM, *(["--debug"] if debug else []), "compile", *arguments]
    # In a session of its own, Ctrl-C reaches it only through this process, and never while it cleans up.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if say is None else subprocess.PIPE,
        text=True,
        pass_fds=(*descriptors, *([] if status is None else [status.writer.fileno()])),
        start_new_session=True,
    )
    is_ready = False
    lines = _Lines(process, say)
    try:
        if status is not None:
            status.writer.close()
        while status is not None and (line := status.reader.readline().decode().rstrip()):
            kind, *words = line.split()
            if kind == PROGRESS:
                if progressed is not None:
                    progressed(words[0], int(words[1]) / 100)
            elif kind != WRITTEN:
                is_ready = True
                break
            elif written is not None:
                written()
        last_line = lines.last()
        code = 0 if is_ready else process.wait()
    finally:
        if not is_ready and process.poll() is None:
            process.terminate()
            process.wait()
    if code < 0:
        raise CompileError(
            f"the compile process was killed by signal {-code}; if memory was short, compile on a larger machine"
        )
    if code and say is not None:
        raise CompileError(last_line.removeprefix("Error: "))
    if code:
        raise click.exceptions.Exit(code)
    return process
