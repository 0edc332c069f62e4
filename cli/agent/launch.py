"""Start an agent in this terminal: in place of this process, or while this process serves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading

import click

# In a foreground process group of its own, so that Ctrl-C reaches only the agent.
_IN_FOREGROUND = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
os.setpgid(0, 0)
if os.isatty(0):
    os.tcsetpgrp(0, os.getpid())
signal.signal(signal.SIGTTOU, signal.SIG_DFL)
os.execvp("sh", ["sh", "-c", sys.argv[1]])
"""


def replace_process(command: str) -> None:
    """Replace this process by a shell that runs `command`."""
    os.execvp("sh", ["sh", "-c", f"exec env {command}"])


def launch_beside_server(command: str) -> None:
    """Start `command` in a shell from another thread, and stop this process, a server, when the command ends.

    Until then the terminal belongs to the agent: the server's log goes to a file, and Ctrl-C only to the agent.
    """
    log = tempfile.NamedTemporaryFile(prefix="radixlm-agent-", suffix=".log", delete=False)  # noqa: SIM115
    click.echo(f"the server's log is in {log.name}", err=True)
    terminal = os.dup(2)
    sys.stderr.flush()
    os.dup2(log.fileno(), 2)

    def run() -> None:
        try:
            agent = [sys.executable, "-c", _IN_FOREGROUND, f"exec env {command}"]
            subprocess.run(agent, stderr=terminal, check=False)
        finally:
            os.dup2(terminal, 2)
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=run, name="radixlm-agent", daemon=True).start()
