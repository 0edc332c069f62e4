"""`radixlm` in a process of its own, whose artifacts are fake: `python -m tests.cli.serving_process serve NAME ...`.

The command, its engine and its server are the real ones. A step takes 20 ms. With RADIXLM_TELL_CONNECTIONS
set, stderr has a line for each connection. With RADIXLM_OPENS_IN_S, opening the model takes so long.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from radixlm.cli import cached_artifact, serving
from radixlm.cli.main import main
from radixlm.cli.several import serve_models, worker_flags
from radixlm.runtime.artifact import CHAT_TEMPLATE, Artifact
from radixlm.runtime.engine import opening
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.server.http.http_protocol import HTTPProtocol

from ..runtime.server.real_server import SlowModel, open_fake_artifact


def open_artifact(path: str | Path) -> Any:
    """What is at a path, wherever that is; nothing is at `nowhere.radixlm`."""
    return REAL_OPEN(path) if Path(path).name == "nowhere.radixlm" else open_fake_artifact()


def read_manifest(path: Path) -> Any:
    return REAL_READ_MANIFEST(path) if path.name == "nowhere.radixlm" else None


def open_runner(artifact: Any, num_pages: int, options: EngineOptions, **_: object) -> SlowModel:
    assert options.kv_budget is None, "this model looks nowhere"
    time.sleep(float(os.environ.get(OPENS_IN_S, "0")))
    model = SlowModel(num_pages)
    model.step_s = 0.02
    return model


def connection_made(self: HTTPProtocol, transport: asyncio.Transport) -> None:
    """Say of an accepted connection whether its packets wait for one another."""
    accepted: socket.socket = transport.get_extra_info("socket")
    no_delay = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    print(f"accepted TCP_NODELAY={no_delay}", file=sys.stderr, flush=True)
    REAL_CONNECTION_MADE(self, transport)


TELL_CONNECTIONS = "RADIXLM_TELL_CONNECTIONS"
OPENS_IN_S = "RADIXLM_OPENS_IN_S"
REAL_OPEN = Artifact.open
REAL_READ_MANIFEST = serving.read_manifest
REAL_CONNECTION_MADE = HTTPProtocol.connection_made


def use_fake_artifacts() -> None:
    """Have this process open fake artifacts, and start processes of models that do, too."""
    Artifact.open = staticmethod(open_artifact)  # type: ignore[assignment,method-assign]
    serving.read_manifest = read_manifest
    cached_artifact.read_manifest = lambda path: SimpleNamespace(files=[CHAT_TEMPLATE])  # type: ignore[assignment,return-value]
    serve_models.read_manifest = lambda path: read_manifest(path) or open_fake_artifact().manifest  # type: ignore[assignment]
    worker_flags.WORKER = (sys.executable, "-m", "tests.cli.several.fake_worker")  # type: ignore[assignment]
    opening._open_runner = open_runner
    if TELL_CONNECTIONS in os.environ:
        HTTPProtocol.connection_made = connection_made  # type: ignore[method-assign]


if __name__ == "__main__":
    use_fake_artifacts()
    main()
