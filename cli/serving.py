"""Answer over HTTP from the start of the process until running replies had their time to end.

Knows sockets, the server and when an engine comes and goes; not the options that say how it is opened.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import click
import uvicorn
from radixlm.runtime.artifact import read_manifest
from radixlm.runtime.server import Loading, create_app
from radixlm.runtime.server.http.door import local_hosts
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import BACKLOG, MAX_ACCEPTED, listen
from starlette.types import ASGIApp

from .cached_artifact import is_artifact
from .log_config import log_config
from .tables import conversations, size

if TYPE_CHECKING:
    from radixlm.runtime import Engine
    from radixlm.runtime.server.server_options import ServerOptions

CLOSING_S = 5  # for the last step, and for what clients are told then


@dataclass(frozen=True)
class Serving:
    """A model behind an HTTP server on `host` and `port`, with its options and the form of its log."""

    model: str  # an artifact, or what is compiled into one
    host: str
    port: int
    options: ServerOptions  # `hosts` and `tells_cached_text` are found out once it listens
    log_format: str
    grace_s: float  # for running replies, once the server is told to stop

    def run(
        self,
        find_artifact: FindArtifact,
        open_engine: Callable[[Path], Engine],
        opened: Callable[[Engine], None] | None = None,
    ) -> None:
        """Listen at once, compile the model if need be, open the engine, and serve it until told to stop.

        Args:
            find_artifact: returns the artifact of the model. While it compiles one, it enters `meanwhile`. The engine
                is opened with what it gives to `written`, and served only once it has returned.
            opened: called once, when the engine is served; what it raises ends the server.

        Raises:
            ArtifactError: there is no model; the server has not listened then.
            ValueError: the address cannot be listened on; nothing was compiled then.
            Exception: raised by `find_artifact`, `open_engine` or `opened`.
        """
        if is_artifact(self.model):
            read_manifest(Path(self.model))  # what is no artifact is never listened for
        # First: an address in use is known before the model is compiled or loaded, and no other process takes it then.
        with _listen(self.host, self.port) as listener:
            host = f"[{self.host}]" if ":" in self.host else self.host
            url = f"http://{host}:{listener.getsockname()[1]}"
            is_loopback = _is_loopback(listener)
            loading = Loading()
            early = Early(open_engine)
            try:
                artifact = find_artifact(answered(listener, loading), written=early.begin)
            except BaseException:
                early.close()
                raise

            def serve(engine: Engine) -> None:
                has_keys = bool(self.options.api_keys)
                options = replace(
                    self.options,
                    tells_cached_text=has_keys or is_loopback,
                    hosts=local_hosts(self.host) if is_loopback and not has_keys else (),
                )
                loading.app = create_app(engine, **vars(options))
                self._say(f"serving {self.model} at {url}/v1")
                if (draft := engine.stats().draft) is not None and (about := draft.about) is not None:
                    taken = f"{size(about.weights_bytes)} of weights, {size(about.kv_bytes)} of keys and values"
                    self._say(f"guessing with {about.name}: {taken}")
                if engine.prompts.chat_template is None:
                    self._say(f"conversations: {conversations(False)}")
                if opened is not None:
                    opened(engine)

            def stop() -> None:
                serving.should_exit = True

            config = uvicorn.Config(
                loading,
                log_config=log_config(self.log_format),
                access_log=False,
                lifespan="off",
                http=HTTPProtocol,
                backlog=MAX_ACCEPTED,
            )
            serving = server(config, lambda: opening.close_value(), self.grace_s)
            self._say(f"loading {self.model}; {url}/health tells when it is ready")
            opening = Opening(lambda: early.result(artifact), opened=serve, failed=stop)
            try:
                serving.run(sockets=[listener])
            finally:
                opening.close()

    def _say(self, text: str) -> None:
        if self.log_format == "json":
            logging.getLogger("radixlm.serve").info(text)
        else:
            click.echo(text, err=True)


@contextmanager
def answered(listener: socket.socket, app: ASGIApp) -> Iterator[None]:
    """Answer requests with `app` in a thread, and leave `listener` open afterwards.

    Signals stay with the main thread. A client that connects between two servers waits for the second.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", http=HTTPProtocol, backlog=MAX_ACCEPTED
    )
    config.timeout_graceful_shutdown = CLOSING_S
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener.dup()]}, name="radixlm-loading", daemon=True
    )
    log = logging.getLogger("uvicorn.error")
    log.disabled = True  # or it says that the server has finished
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        log.disabled = False


def server(config: uvicorn.Config, close_engine: Callable[[], None], grace_s: float) -> uvicorn.Server:
    """A server that gives running replies `grace_s` to end when it is told to stop, and then closes the engine.

    Clients get an error in OpenAI's shape then. uvicorn alone would cancel the tasks, and clients would get an
    "Internal Server Error" or a stream that breaks off.
    """

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or ():  # asyncio accepts as many in a row as it lets wait, and is to accept fewer
                each.listen(BACKLOG)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            closing = loop.call_later(grace_s, lambda: loop.run_in_executor(None, close_engine))
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

    config.timeout_graceful_shutdown = math.ceil(grace_s) + CLOSING_S
    return Server(config)


def _is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can connect."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {port} of {host} is in use by another process; stop that one, or choose another --port, "
                "such as 0 for any free one"
            ) from error
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror}; choose another") from error


class Closable(Protocol):
    """What is opened."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class FindArtifact(Protocol):
    """Finds a model's artifact, or compiles it; see `cached_artifact.artifact_of`."""

    def __call__(
        self, meanwhile: AbstractContextManager[None], *, written: Callable[[Path], None] | None = None
    ) -> Path: ...


class Early:
    """Opens an engine and computes a first step, perhaps while it is not sure yet that the artifact is right.

    >>> class Model:
    ...     warm_up = close = lambda self: None
    >>> early = Early(lambda path: Model())
    >>> early.begin(Path("one"))
    >>> type(early.result(Path("one"))).__name__
    'Model'
    """

    def __init__(self, open_engine: Callable[[Path], Engine]) -> None:
        self._open_engine = open_engine
        self._begun: Future[Engine] | None = None

    def begin(self, artifact: Path) -> None:
        """Open it in another thread."""
        self._begun = Future()
        threading.Thread(target=self._run, args=(artifact, self._begun), name="radixlm-early", daemon=True).start()

    def result(self, artifact: Path) -> Engine:
        """The engine, which is opened now if that was not begun. Raises what opening raised."""
        return self._opened(artifact) if self._begun is None else self._begun.result()

    def close(self) -> None:
        """Close what was begun: the artifact is wrong."""
        if self._begun is not None and self._begun.exception() is None:
            self._begun.result().close()

    def _run(self, artifact: Path, begun: Future[Engine]) -> None:
        try:
            begun.set_result(self._opened(artifact))
        except BaseException as error:
            begun.set_exception(error)

    def _opened(self, artifact: Path) -> Engine:
        engine = self._open_engine(artifact)
        try:
            engine.warm_up()
        except BaseException:
            engine.close()
            raise
        return engine


class Opening(Generic[T]):
    """Opens something slow in a thread of its own, while something else answers in its place.

    Runs `open`, and then `opened` with what it returned, or `failed` if one of them raised.

    >>> import io
    >>> texts = []
    >>> opening = Opening(lambda: io.StringIO("text"), opened=lambda file: texts.append(file.read()), failed=print)
    >>> opening.close()
    >>> texts
    ['text']
    """

    def __init__(self, open: Callable[[], T], *, opened: Callable[[T], None], failed: Callable[[], None]) -> None:
        self._open, self._opened, self._failed = open, opened, failed
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="radixlm-opening", daemon=True)
        self._thread.start()

    def close_value(self) -> None:
        """Close what was opened, if it was by now; harmless twice, and from any thread."""
        if self._value is not None:
            self._value.close()

    def close(self) -> None:
        """Wait for the end of opening, close what was opened, and raise what opening raised."""
        self._thread.join()
        self.close_value()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._value = self._open()
            self._opened(self._value)
        except BaseException as error:
            self._error = error
            self._failed()
