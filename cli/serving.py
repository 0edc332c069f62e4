"""Serve one model over HTTP: listen at once, open the engine, and let running replies end on shutdown.

Knows sockets, the server and the lifetime of an engine, not the options with which it is opened.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
import uvicorn
from radixlm.runtime.artifact import read_manifest
from radixlm.runtime.artifact.compiled_models import artifact_named
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.server import Loading, create_app
from radixlm.runtime.server.http.root_path import UnderRootPath
from radixlm.runtime.server.http.uvicorn_server import CLOSING_S, TLS, Address, server, uvicorn_config
from radixlm.runtime.server.served import ANY, listed_of

from .log_config import log_config
from .opening import Early, Opening
from .tables import size, vector_rows

if TYPE_CHECKING:
    from radixlm.runtime import Engine
    from radixlm.runtime.server.server_options import ServerOptions


@dataclass(frozen=True)
class Serving:
    """One model to serve over HTTP, with the server's options and the format of its log."""

    model: str  # an artifact, or a model to compile
    address: Address
    options: ServerOptions  # `hosts` and `tells_cached_text` are decided when it listens
    log_format: str
    grace_s: float  # for running replies on shutdown
    root_path: str = ""
    tls: TLS | None = None  # None: plain HTTP
    hides_cached_text: bool = False  # otherwise shown if there are keys, or only this machine can connect

    def run(
        self,
        find_artifact: FindArtifact,
        open_engine: Callable[[Path], Engine],
        opened: Callable[[Engine], None] | None = None,
    ) -> None:
        """Listen at once, compile the model if needed, open the engine, and serve it until a signal stops the server.

        Args:
            find_artifact: returns the artifact of the model. While it compiles, it enters `meanwhile`. The engine is
                opened with the path passed to `written`, but served only after this function has returned.
            opened: called once, when the engine is served. Its errors end the server.

        Raises:
            ArtifactError: there is no model. The server has not listened.
            ValueError: listening on the address failed. Nothing was compiled.
            Exception: raised by `find_artifact`, `open_engine` or `opened`.
        """
        if self.tls is not None:
            self.tls.check()
        if (named := artifact_named(self.model)) is not None:
            read_manifest(named)  # raises if it is not an artifact, before listening
        # First, so that an address in use is an error before the model is compiled, and no other process takes it.
        with self.address.listen() as listener:
            url = self.address.url(listener, self.tls)
            loading = Loading()
            app = UnderRootPath(loading, self.root_path) if self.root_path else loading
            early = Early(open_engine)
            try:
                meanwhile = serve_in_thread(listener, uvicorn_config(app, listener, self.tls, None))
                artifact = find_artifact(meanwhile, written=early.begin, progressed=loading.progressed)
                loading.progressed("load", None)
            except BaseException:
                early.close()
                raise

            options = self.address.decided(listener, self.options)  # now: the server closes the socket when it stops
            options = replace(options, tells_cached_text=options.tells_cached_text and not self.hides_cached_text)

            def serve(engine: Engine) -> None:
                if serving.should_exit:  # a signal came while the engine was opened
                    return
                served = create_app(engine, **vars(options))
                loading.app = served
                began.add_done_callback(lambda loop: _call_soon(loop.result(), served.state.resume))
                for line in ready_lines(engine, self.options.model_ids, url + self.root_path):
                    self._say(line)
                if (draft := engine.stats().draft) is not None and (about := draft.about) is not None:
                    taken = f"{size(about.weights_bytes)} of weights, {size(about.kv_bytes)} of KV cache"
                    self._say(f"draft model {about.name}: {taken}")
                for name, value in vector_rows(engine.manifest):
                    self._say(f"{name}: {value}")
                if engine.prompts.chat_template is None and engine.manifest.writes_text:
                    self._say(f"{engine.manifest.name} has no chat template: it answers completions only")
                if opened is not None:
                    opened(engine)

            def stop() -> None:
                serving.should_exit = True

            config = uvicorn_config(app, listener, self.tls, log_config(self.log_format))
            began: Future[asyncio.AbstractEventLoop] = Future()
            serving = server(config, lambda: opening.close_value(), self.grace_s, began=began.set_result)
            self._say(f"loading {self.model}; {url}/health shows when it is ready")
            with Opening(lambda: early.result(artifact), opened=serve, failed=stop) as opening:
                serving.run(sockets=[listener])

    def _say(self, text: str) -> None:
        """Print a line for the operator, or log it with `--log-format json`."""
        if self.log_format == "json":
            logging.getLogger("radixlm.serve").info(text)
        else:
            click.echo(text, err=True)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Call a function on the event loop of a server, unless the server has stopped."""
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(call)


@contextmanager
def serve_in_thread(listener: socket.socket, config: uvicorn.Config) -> Iterator[None]:
    """Serve HTTP in a thread while the block runs, such as a loading page; leave `listener` open afterwards.

    Signals stay with the main thread. A client that connects between two servers waits for the second.
    """
    config.timeout_graceful_shutdown = CLOSING_S
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listener.dup()]}, name="radixlm-loading", daemon=True
    )
    log = logging.getLogger("uvicorn.error")
    log.disabled = True  # otherwise it logs that the server has finished
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        log.disabled = False


def ready_lines(engine: Engine, model_ids: Sequence[str], url: str) -> Iterator[str]:
    """Yield the lines that a ready server prints: its URLs, the model's names, and the size of the store."""
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
    """Finds or compiles a model's artifact; see `cached_artifact.artifact_of`."""

    def __call__(
        self,
        meanwhile: AbstractContextManager[None],
        *,
        written: Callable[[Path], None] | None = None,
        progressed: Callable[[str, float], None] | None = None,
    ) -> Path: ...
