"""The server's address and TLS files, and its uvicorn configuration and shutdown.

Knows addresses, certificates and how serving ends, not what is served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ...errors import InvalidParameter
from ..server_options import ServerOptions
from .access import local_hosts
from .http_protocol import HTTPProtocol
from .listener import BACKLOG, MAX_ACCEPTED, is_local, listen, listen_on_unix_socket

_log = logging.getLogger("radixlm.serve")
CLOSING_S = 5  # for the last step, and for sending errors to clients


@dataclass(frozen=True)
class TLS:
    """TLS files in PEM: a certificate chain, and the private key unless the first file has it."""

    certfile: Path
    keyfile: Path | None

    def check(self) -> None:
        """Raise InvalidParameter if the files cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except (ssl.SSLError, OSError) as error:
            files = self.certfile if self.keyfile is None else f"{self.certfile} with {self.keyfile}"
            raise InvalidParameter(f"--ssl-certfile {files} cannot be used: {error}") from error


@dataclass(frozen=True)
class Address:
    """The address to listen on: a host and a port, 0 for any free one, or a Unix socket instead."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None

    def listen(self) -> socket.socket:
        """Return a socket that listens on the address.

        Raises:
            InvalidParameter: the address is in use, or listening on it failed.
        """
        try:
            if self.unix_socket is not None:
                return listen_on_unix_socket(self.unix_socket)
            return listen(self.host, self.port)
        except OSError as error:
            where = self.unix_socket or f"{self.host} port {self.port}"
            if error.errno == errno.EADDRINUSE and self.unix_socket is None:
                raise InvalidParameter(
                    f"port {self.port} of {self.host} is in use by another process; stop it, or choose another "
                    "--port, such as 0 for any free one"
                ) from error
            raise InvalidParameter(
                f"cannot listen on {where}: {error.strerror or error}; choose another address"
            ) from error

    def url(self, listener: socket.socket, tls: TLS | None) -> str:
        """Return the URL at which clients reach a listening socket, without a path."""
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}"

    def decided(self, listener: socket.socket, options: ServerOptions) -> ServerOptions:
        """Return the options with defaults for who can connect: allowed hosts, and whether to show cached text."""
        is_open = is_local(listener) and not options.api_keys
        hosts = local_hosts(self.host) if is_open else ()
        if options.hosts:
            hosts = (*local_hosts(self.host), *options.hosts)
        return replace(options, hosts=hosts, tells_cached_text=bool(options.api_keys) or is_local(listener))


def uvicorn_config(
    app: ASGIApp,
    listener: socket.socket,
    tls: TLS | None,
    logging: dict[str, Any] | None,
    *,
    has_lifespan: bool = False,
) -> uvicorn.Config:
    """Return uvicorn's configuration for an application. On a Unix socket, a proxy's header has the client address."""
    return uvicorn.Config(
        app,
        log_config=logging,
        access_log=False,
        lifespan="on" if has_lifespan else "off",
        http=HTTPProtocol,
        backlog=MAX_ACCEPTED,
        forwarded_allow_ips="*" if listener.family == socket.AF_UNIX else None,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
    )


def server(
    config: uvicorn.Config,
    close_engine: Callable[[], None],
    grace_s: float,
    *,
    began: Callable[[asyncio.AbstractEventLoop], object] = lambda loop: None,
) -> uvicorn.Server:
    """Return a server that on shutdown gives running replies `grace_s` seconds to end, then closes the engine.

    Clients then get an error in their API's format. uvicorn alone would cancel the tasks, and clients would get an
    "Internal Server Error" or a stream that breaks off. SIGHUP, sent when a terminal closes, stops the server
    as SIGTERM does, unless it is ignored, as by nohup.

    Args:
        began: called on the event loop, with the loop, once requests are accepted.
    """

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            with super().capture_signals():
                is_main = threading.current_thread() is threading.main_thread()
                if not is_main or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
                    yield
                    return
                before = signal.signal(signal.SIGHUP, self.handle_exit)
                try:
                    yield
                finally:
                    signal.signal(signal.SIGHUP, before)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or ():  # asyncio uses one number for the backlog and for connections accepted in a row
                each.listen(BACKLOG)
            began(asyncio.get_running_loop())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for number in self._captured_signals:
                _log.info("received %s: the server stops", signal.Signals(number).name)
            loop = asyncio.get_running_loop()
            closing = loop.call_later(grace_s, lambda: loop.run_in_executor(None, close_engine))
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

    config.timeout_graceful_shutdown = math.ceil(grace_s) + CLOSING_S
    return Server(config)
