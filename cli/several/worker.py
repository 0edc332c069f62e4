"""The process of one model: imports everything that serving needs, waits for arguments, and runs `radixlm serve`.

It reads its arguments as a line of JSON from standard input, and stops when that closes, that is, with its parent.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable

_STDIN = 0


def main(run: Callable[[], None] | None = None) -> None:
    """Run the process. `run` replaces the `radixlm` command in tests."""
    from radixlm.runtime.malloc_arenas import share_one_arena

    share_one_arena()
    load()
    line = _read_line()
    if not line:
        return
    from ..main import main as radixlm

    threading.Thread(target=_stop_at_end, name="radixlm-lifeline", daemon=True).start()
    sys.argv = ["radixlm", *json.loads(line)]
    (run or radixlm)()


def load() -> None:
    """Import everything that serving needs, so that a model starts quickly."""
    gc.disable()  # as in `serve`
    from radixlm.runtime.engine.engine import Engine  # noqa: F401
    from radixlm.runtime.model.model_runner import ModelRunner  # noqa: F401

    from .. import serve, serving  # noqa: F401

    gc.freeze()
    gc.enable()


def _read_line() -> bytes:
    """Read the first line of standard input and nothing beyond it; empty if it closes before."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(_STDIN, 1)
        if not byte:
            return b""
        line += byte
    return bytes(line)


def _stop_at_end() -> None:
    """End this process once its standard input closes, because the router has ended."""
    while os.read(_STDIN, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
