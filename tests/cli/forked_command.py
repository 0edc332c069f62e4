"""Run `radixlm` in a process that is forked from one which has loaded it: a command starts in a twentieth of the time.

The command has its own arguments, environment, streams and exit code, as if a shell had started it. Only imports are
shared. Tests of starts, of signals and of what stays when a command is killed start the real one.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_LOADED = ("radixlm.cli.compile", "radixlm.compile.compiler", "radixlm.runtime.engine.engine", "radixlm.runtime.server")
_CONTEXT = multiprocessing.get_context("forkserver")


def run_forked(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    max_file_bytes: int | None = None,
    timeout_s: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run the command, and return its exit code and what it wrote. Processes that it leaves behind are not waited for.

    Args:
        env: variables that it has beside this process's.
        max_file_bytes: which no file that it writes may be larger than.

    Raises:
        subprocess.TimeoutExpired: it went on for longer, and was killed.
    """
    _CONTEXT.set_forkserver_preload([*_LOADED, __name__])
    with tempfile.TemporaryDirectory(prefix="radixlm-command-") as folder:
        environment = {**os.environ, **(env or {})}
        process = _CONTEXT.Process(
            target=_be_the_command, args=(list(arguments), environment, os.getcwd(), folder, max_file_bytes)
        )
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s)
        output, errors = ((Path(folder) / name).read_text() for name in ("output", "errors"))
        return subprocess.CompletedProcess(list(arguments), process.exitcode, output, errors)


def _be_the_command(
    arguments: list[str], environment: dict[str, str], directory: str, folder: str, max_file_bytes: int | None
) -> None:
    from radixlm.cli.main import main

    for name, descriptor in (("output", 1), ("errors", 2)):
        file = os.open(Path(folder) / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["radixlm", *arguments]
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # which processes of `multiprocessing` leave out
