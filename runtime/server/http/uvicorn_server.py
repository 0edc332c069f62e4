"""Where a server listens, and how uvicorn runs it.

Knows addresses, certificates and how serving ends; not what is served.
"""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ...errors import InvalidParameter
from ..server_options import ServerOptions
from .door import local_hosts
from .http_protocol import HTTPProtocol
from .listener import BACKLOG, MAX_ACCEPTED, is_local, listen, listen_on_unix_socket

CLOSING_S = 5  # for the last step, and for what clients are told then


@dataclass(frozen=True)
class TLS:
    """Files in PEM: a chain of certificates, and the private key unless the first holds it."""

    certfile: Path
    keyfile: Path | None

    def check(self) -> None:
        """Raise InvalidParameter if they cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except (ssl.SSLError, OSError) as error:
            files = self.certfile if self.keyfile is None else f"{self.certfile} with {self.keyfile}"
            raise InvalidParameter(f"--ssl-certfile {files} cannot be used: {error}") from error


@dataclass(frozen=True)
class Address:
    """A host and a port, 0 for any that is free; or a Unix socket in place of both."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None

    def listen(self) -> socket.socket:
        """Listen there.

        Raises:
            InvalidParameter: it is in use, or cannot be listened on.
        """
        try:
            if self.unix_socket is not None:
                return listen_on_unix_socket(self.unix_socket)
            return listen(self.host, self.port)
        except OSError as error:
            where = self.unix_socket or f"{self.host} port {self.port}"
            if error.errno == errno.EADDRINUSE and self.unix_socket is None:
                raise InvalidParameter(
                    f"port {self.port} of {self.host} is in use by another process; stop that one, or choose another "
                    "--port, such as 0 for any free one"
                ) from error
            raise InvalidParameter(f"cannot listen on {where}: {error.strerror or error}; choose another") from error

    def url(self, listener: socket.socket, tls: TLS | None) -> str:
        """Return where clients reach what listens there, without a path."""
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if tls is None else 'https'}://{host}:{listener.getsockname()[1]}"

    def decided(self, listener: socket.socket, options: ServerOptions) -> ServerOptions:
        """Return the options with what depends on who can connect: the names that requests may be sent to, and whether
        cached text is told.
        """
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
    """Return how uvicorn serves an application. What connects to a Unix socket is a proxy, and tells the client's
    address.
    """
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
    """Return a server that gives running replies `grace_s` to end when it is told to stop, and then closes the engine.

    Clients get an error in OpenAI's shape then. uvicorn alone would cancel the tasks, and clients would get an
    "Internal Server Error" or a stream that breaks off.

    Args:
        began: called on the event loop, with it, once requests are answered.
    """

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for each in sockets or ():  # asyncio accepts as many in a row as it lets wait, and is to accept fewer
                each.listen(BACKLOG)
            began(asyncio.get_running_loop())

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            loop = asyncio.get_running_loop()
            closing = loop.call_later(grace_s, lambda: loop.run_in_executor(None, close_engine))
            try:
                await super().shutdown(sockets)
            finally:
                closing.cancel()

    config.timeout_graceful_shutdown = math.ceil(grace_s) + CLOSING_S
    return Server(config)
