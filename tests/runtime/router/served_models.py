"""A router in front of small servers, all of them on Unix sockets in one event loop."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import uvicorn
from radixlm.runtime.errors import ModelFailed
from radixlm.runtime.router.app import router_app
from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.router.model_table import ModelTable
from radixlm.runtime.router.pulling import Library
from radixlm.runtime.router.unix_request import ask, ask_whole
from radixlm.runtime.server import create_app
from radixlm.runtime.server.about import ModelList, ModelReply
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.server_options import ServerOptions
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..server.conftest import FakeEngine

KEYS = ("key-one", "key-two")


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    while not is_so():
        await asyncio.sleep(0.001)


class UnixServer:
    """An application on a Unix socket in this event loop."""

    def __init__(self, app: ASGIApp, path: Path, *, lifespan: str = "off") -> None:
        self.path = path
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        config = uvicorn.Config(
            app, log_config=None, lifespan=lifespan, http=HTTPProtocol, forwarded_allow_ips="*", access_log=False
        )
        config.timeout_graceful_shutdown = 1
        self.server = uvicorn.Server(config)
        self.server.capture_signals = nullcontext  # type: ignore[method-assign]
        self.task = asyncio.create_task(self.server.serve(sockets=[listener]))

    async def started(self) -> None:
        while not self.server.started:
            await asyncio.sleep(0.001)

    async def stop(self) -> None:
        self.server.should_exit = True
        await self.task

    def kill(self) -> None:
        """Break all connections off, and take no more."""
        self.path.unlink(missing_ok=True)
        for connection in self.server.server_state.connections:
            connection._transport.abort()  # type: ignore[union-attr]
        self.server.should_exit = True


@dataclass
class WithOllamasLists:
    """A server that lists its model in Ollama's words, too."""

    app: ASGIApp
    name: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_list = scope["path"] in ("/api/tags", "/api/ps")
        listed = JSONResponse({"models": [{"name": self.name, "said": scope["path"]}]})
        await (listed if is_list else self.app)(scope, receive, send)


@dataclass(eq=False)
class FakeServer:
    """A model behind its whole server."""

    engine: FakeEngine
    served: UnixServer
    described: Mapping[str, ModelReply]
    memory_bytes: int = 10
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(
        self, method: str, target: bytes, headers: Sequence[tuple[bytes, bytes]] = (), body: bytes = b""
    ) -> AsyncGenerator[Message]:
        return ask(self.served.path, method, target, headers, body)

    async def stop(self) -> None:
        await self.served.stop()
        self.ended.set()

    async def wait_until_ended(self) -> str:
        await self.ended.wait()
        return "its process ended by signal 9"

    def kill(self) -> None:
        self.served.kill()
        self.ended.set()


@dataclass
class Models:
    """The client of a router, and what is behind it."""

    client: httpx.AsyncClient
    table: ModelTable[FakeServer]
    engines: dict[str, FakeEngine]
    loaded: list[FakeServer] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    loading: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.loading.set()

    def of(self, name: str) -> FakeServer:
        """The server of a loaded model."""
        row = self.table.named(name)
        assert row is not None and row.worker is not None
        return row.worker

    @property
    def states(self) -> list[str]:
        return [row.state for row in self.table.rows]


def engine_of(name: str, loras: Sequence[str] = ()) -> FakeEngine:
    """An engine that says its name."""
    adapters = SimpleNamespace(names=tuple(loras), named=lambda name: SimpleNamespace(digest=name))
    return FakeEngine(words=[f"I am {name}", ", said", " once", "."], adapters=adapters)


@asynccontextmanager
async def models(
    *specs: ModelSpec, options: ServerOptions | None = None, library: Library | None = None, **of_table: Any
) -> AsyncIterator[Models]:
    """A router of these models."""
    options = options or ServerOptions()
    with tempfile.TemporaryDirectory(prefix="rlm-") as folder:
        engines = {spec.name: engine_of(spec.name, spec.loras) for spec in specs}
        headers = [(b"authorization", f"Bearer {key}".encode()) for key in options.api_keys[:1]]

        number = count()

        class Loader:
            async def open(self) -> None:
                """There is nothing to get ready,"""

            async def close(self) -> None:
                """or to free."""

            async def load(self, spec: ModelSpec, progressed: Callable[[str, float | None], None]) -> FakeServer:
                await found.loading.wait()
                if spec.name in found.broken:
                    raise ModelFailed(f"{spec.name} is broken")
                progressed("compile", 0.5)
                names = [spec.name, *spec.aliases]
                engine = engines.setdefault(spec.name, engine_of(spec.name))
                app = create_app(engine, model_ids=names, api_keys=options.api_keys)  # type: ignore[arg-type]
                served = UnixServer(WithOllamasLists(app, spec.name), Path(folder) / f"{next(number)}.sock")
                await served.started()
                _, said = await ask_whole(served.path, "GET", b"/v1/models", headers)
                replies = {each.id: each for each in msgspec.json.decode(said, type=ModelList).data}
                found.loaded.append(FakeServer(engine, served, replies))
                return found.loaded[-1]

        table = ModelTable[FakeServer](specs, Loader(), **of_table)
        path = Path(folder) / "router.sock"
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20) as client:
            found = Models(client, table, engines)
            front = UnixServer(router_app(table, options, library), path, lifespan="on")  # type: ignore[arg-type]
            try:
                await front.started()
                yield found
            finally:
                await front.stop()
    table.check()
    assert all(row.num_requests == 0 for row in table.rows), "no request holds a model for ever"
