"""Answer over HTTP from the start of the process until running replies had their time to end.

Knows sockets, the server and when an engine comes and goes; not the options that say how it is opened.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
import uvicorn
from radixlm.runtime.artifact import read_manifest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.artifact.model_names import is_artifact
from radixlm.runtime.server import Loading, create_app
from radixlm.runtime.server.http.root_path import UnderRootPath
from radixlm.runtime.server.http.uvicorn_server import CLOSING_S, TLS, Address, server, uvicorn_config
from radixlm.runtime.server.served import ANY, listed_of

from .log_config import log_config
from .opening import Early, Opening
from .tables import conversations, size, vector_rows

if TYPE_CHECKING:
    from radixlm.runtime import Engine
    from radixlm.runtime.server.server_options import ServerOptions


@dataclass(frozen=True)
class Serving:
    """A model behind an HTTP server, with its options and the form of its log."""

    model: str  # an artifact, or what is compiled into one
    address: Address
    options: ServerOptions  # `hosts` and `tells_cached_text` are found out once it listens
    log_format: str
    grace_s: float  # for running replies, once the server is told to stop
    root_path: str = ""
    tls: TLS | None = None  # None: plain HTTP
    hides_cached_text: bool = False  # else it is told where there are keys, or only this machine can connect

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
        if self.tls is not None:
            self.tls.check()
        if is_artifact(self.model):
            read_manifest(Path(self.model))  # what is no artifact is never listened for
        # First: an address in use is known before the model is compiled or loaded, and no other process takes it then.
        with self.address.listen() as listener:
            url = self.address.url(listener, self.tls)
            loading = Loading()
            app = UnderRootPath(loading, self.root_path) if self.root_path else loading
            early = Early(open_engine)
            try:
                meanwhile = answered(listener, uvicorn_config(app, listener, self.tls, None))
                artifact = find_artifact(meanwhile, written=early.begin, progressed=loading.progressed)
                loading.progressed("load", None)
            except BaseException:
                early.close()
                raise

            def serve(engine: Engine) -> None:
                options = self.address.decided(listener, self.options)
                options = replace(options, tells_cached_text=options.tells_cached_text and not self.hides_cached_text)
                served = create_app(engine, **vars(options))
                loading.app = served
                began.add_done_callback(lambda loop: loop.result().call_soon_threadsafe(served.state.resume))
                for line in ready_lines(engine, self.options.model_ids, url + self.root_path):
                    self._say(line)
                if (draft := engine.stats().draft) is not None and (about := draft.about) is not None:
                    taken = f"{size(about.weights_bytes)} of weights, {size(about.kv_bytes)} of keys and values"
                    self._say(f"drafting with {about.name}: {taken}")
                for name, value in vector_rows(engine.manifest):
                    self._say(f"{name}: {value}")
                if engine.prompts.chat_template is None and engine.manifest.embedding is None:
                    self._say(f"conversations: {conversations(False)}")
                if opened is not None:
                    opened(engine)

            def stop() -> None:
                serving.should_exit = True

            config = uvicorn_config(app, listener, self.tls, log_config(self.log_format))
            began: Future[asyncio.AbstractEventLoop] = Future()
            serving = server(config, lambda: opening.close_value(), self.grace_s, began=began.set_result)
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
def answered(listener: socket.socket, config: uvicorn.Config) -> Iterator[None]:
    """Answer requests in a thread, and leave `listener` open afterwards.

    Signals stay with the main thread. A client that connects between two servers waits for the second.
    """
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


def ready_lines(engine: Engine, model_ids: Sequence[str], url: str) -> Iterator[str]:
    """Return what a user needs to know of a server that is ready: where it is, and what clients send."""
    stats = engine.stats()
    names = listed_of(model_ids) or (engine.manifest.name,)
    any_name = ", or any other name" if ANY in model_ids else ""
    yield f"serving {names[0]} at {url}/v1"
    if url.startswith("http"):
        yield f"web UI: {url}/"
    yield f"model name: {' or '.join(names)}{any_name}; context: {stats.context_length:,} tokens"
    if stats.tier is not None:
        yield f"store: {stats.tier.num_pages * PAGE_SIZE:,} tokens of earlier prefixes"


class FindArtifact(Protocol):
    """Finds a model's artifact, or compiles it; see `cached_artifact.artifact_of`."""

    def __call__(
        self,
        meanwhile: AbstractContextManager[None],
        *,
        written: Callable[[Path], None] | None = None,
        progressed: Callable[[str, float], None] | None = None,
    ) -> Path: ...
