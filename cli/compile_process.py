"""Compile a model in a process of its own, and read how far it is.

Knows `radixlm compile` and its pipes, not where artifacts are kept.
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
"""Gets the stage of a compile, and the part of it all that is done, 0 to 1."""


class StatusPipe:
    """Both ends of a pipe; lines are read one by one, and no more than a line at once."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        self.reader = os.fdopen(reader, "rb", buffering=0)
        self.writer = os.fdopen(writer, "wb", buffering=0)


def watch(process: subprocess.Popen[str], status: BinaryIO, kept: Say | None) -> None:
    """Have a thread tell `kept` whether the artifact is in the cache folder. Wrong weights end this process, which is
    told without `kept`, too."""
    from radixlm.compile.in_memory import NOT_KEPT, WRONG

    def wait() -> None:
        with status:
            said = status.readline().decode().rstrip()
        said = said or f"{NOT_KEPT}: the process that writes it to the disk was killed"
        process.wait()
        if said.startswith(WRONG):
            (kept or partial(click.echo, err=True))(f"Error: {said.removeprefix(WRONG).lstrip()}")
            os.kill(os.getpid(), signal.SIGTERM)
        elif kept is not None:
            kept(said)

    threading.Thread(target=wait, name="radixlm-kept", daemon=True).start()


class _Lines:
    """Hands the lines of a process's error stream to `say`, in a thread of its own, but for its `Error: `."""

    def __init__(self, process: subprocess.Popen[str], say: Say | None) -> None:
        self._last = ""
        self._thread = threading.Thread(target=self._read, args=(process, say), name="radixlm-said", daemon=True)
        self._thread.start()

    def last(self) -> str:
        """Wait for the end of the stream; return its last line."""
        self._thread.join()
        return self._last

    def _read(self, process: subprocess.Popen[str], say: Say | None) -> None:
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
    """Run `radixlm compile` to its end, or until it says that the artifact can be used.

    Until then it ends with this process, but for a SIGKILL.

    Args:
        descriptors: which it has while it runs.
        status: through which it says that.
        written: called when it says that the artifact is complete.
        progressed: called with the stage and the part that is done when it says how far it is.
    """
    from radixlm.compile.in_memory import PROGRESS, WRITTEN

    debug = click.get_current_context().find_root().params.get("debug")
    command = [*_RADIXLM, *(["--debug"] if debug else []), "compile", *arguments]
    # In a session of its own Ctrl-C reaches it once, from here, and not in the midst of its tidying up.
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
        while status is not None and (told := status.reader.readline().decode().rstrip()):
            kind, *words = told.split()
            if kind == PROGRESS:
                if progressed is not None:
                    progressed(words[0], int(words[1]) / 100)
            elif kind != WRITTEN:
                is_ready = True
                break
            elif written is not None:
                written()
        said = lines.last()
        code = 0 if is_ready else process.wait()
    finally:
        if not is_ready and process.poll() is None:
            process.terminate()
            process.wait()
    if code < 0:
        raise CompileError(f"compiling was killed by signal {-code}; if memory was short, compile on a larger machine")
    if code and say is not None:
        raise CompileError(said.removeprefix("Error: "))
    if code:
        raise click.exceptions.Exit(code)
    return process
