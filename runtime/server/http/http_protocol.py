"""HTTP/1.1 over one connection, for uvicorn's server, with limits on a client's time and bytes.

Knows connections, and how llhttp parses requests. `exchange.py` writes the responses; errors are in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from ..errors import ErrorBody, ErrorReply
from .client_bounds import GuardedWriter, StepReader, connection_to_close
from .exchange import Exchange, Headers
from .listener import max_connections

MAX_HEADER_BYTES = 32 << 10  # of a request's first line and all headers
STEP_BYTES = 4 << 10
MAX_FRAMING_BYTES = 64 << 10  # of a chunked body, in addition to as many bytes as the chunks contain
_NO_HTTP = f"the request is not HTTP/1.1, or its headers have more than {MAX_HEADER_BYTES} bytes"
_FRAMING = "the body's chunks are too small; send larger ones, or a Content-Length"
_VERSIONS = ("1.0", "1.1")
_ABSOLUTE = re.compile(rb"(?i:https?)://(?:[^/?@]*@)?(?P<host>[^/?@]+)(?P<rest>.*)")


class HTTPProtocol(asyncio.Protocol):
    """One connection. Its client has `headers_s` seconds to send the headers of each request.

    A response that is sent before the end of its request's body is the last one of the connection. The rest of the body
    is read and dropped, and the connection is closed after `linger_s`. Closing it at once would send a reset, on which
    the client's system would drop the response.

    Pass this class to `uvicorn.Config(http=...)`.
    """

    headers_s: ClassVar[float] = 10.0
    linger_s: ClassVar[float] = 1.0
    write_s: ClassVar[float] = 60.0  # in which a client must read some of the buffered bytes
    max_connections: ClassVar[Callable[[], int]] = max_connections

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app, self._keep_alive_s = config.loaded_app, config.timeout_keep_alive
        self._server, self._app_state = server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._target, self._headers = b"", Headers()
        self._exchanges: deque[Exchange] = deque()  # the first is being answered
        self._reading: Exchange | None = None  # whose body is read; None while headers are read
        self._num_missing_bytes: int | None = None  # rest of a body with a declared length; None if chunked
        self._num_fed_bytes = 0  # since the headers or the body began
        self._is_idle = False  # nothing was received since the last response
        self._closes_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    # Called by uvicorn and asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, for asyncio, with a deadline for the first headers.

        If there are too many connections, one that waits for its client is closed.
        """
        self._transport, self.idle_since = transport, self._loop.time()
        self._client, self._listener = get_remote_addr(transport), get_local_addr(transport)
        self._make_room()
        self._server.connections.add(self)  # type: ignore[arg-type]
        self._writer = GuardedWriter(transport, self._loop, self.write_s)
        self._reader = StepReader(transport, self._loop, self._feed, self._step_bytes)
        self._flow = FlowControl(self._reader)  # type: ignore[arg-type]
        self._close_after(self.headers_s)

    def data_received(self, data: bytes) -> None:
        """Feed received bytes to the parser, for asyncio. After idle time a deadline for the headers begins."""
        if self._is_idle:
            self._is_idle = False
            self._close_after(self.headers_s)
        self._reader.received(data)

    def eof_received(self) -> bool:
        """Handle a client that sends nothing more, or has gone: a response that does not begin soon is not sent.

        On a Unix socket the client has gone, because proxies close the whole connection.
        """
        if not (self._exchanges and self._exchanges[-1].is_whole):
            return False
        self._exchanges[-1].keep_alive = False
        self._close_after(self.linger_s if self._client is not None else 0.0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchanges that their client has gone, for asyncio."""
        self._server.connections.discard(self)
        self._writer.stop()
        if self._timer is not None:
            self._timer.cancel()
        for exchange in self._exchanges:
            exchange.leave()
        self._flow.resume_writing()

    def pause_writing(self) -> None:
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def shutdown(self) -> None:
        """Close the connection after the response that is being sent."""
        if self._exchanges:
            self._exchanges[0].keep_alive = False
        else:
            self._transport.close()

    # Read by `connection_to_close`

    @property
    def host(self) -> str | None:
        return None if self._client is None else self._client[0]

    @property
    def has_request(self) -> bool:
        return bool(self._exchanges)

    # Called by the parser

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:  # otherwise it is a trailer of a chunked body
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Make an exchange for the request whose headers are complete, for the parser; answer it if it is first.

        Raises:
            ValueError: the request is not accepted, such as another HTTP version or two Host headers.
        """
        headers, version = dict(self._headers), self._parser.get_http_version()
        num_hosts = [name for name, _ in self._headers].count(b"host")
        method = self._parser.get_method().decode()
        is_taken = version in _VERSIONS and (version == "1.1") <= num_hosts <= 1 and method != "CONNECT"
        if not is_taken or self._reader.drops:
            raise ValueError("not accepted")  # the parser turns it into an error of its own
        if self._parser.should_upgrade():
            return  # `_parse` parses it again
        if not self._target.startswith(b"/") and (absolute := _ABSOLUTE.fullmatch(self._target)):
            # proxies send absolute targets, which override the Host header
            self._headers = [(name, absolute["host"] if name == b"host" else value) for name, value in self._headers]
            self._target = b"/" + absolute["rest"].removeprefix(b"/")
        path, _, query = self._target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method,
            "scheme": "http" if self._transport.get_extra_info("sslcontext") is None else "https",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "state": self._app_state.copy(),
            "client": self._client,
            "server": self._listener,
        }
        self._num_fed_bytes = 0
        self._num_missing_bytes = None if b"transfer-encoding" in headers else int(headers.get(b"content-length", 0))
        self._reading = Exchange(
            scope,
            self._writer,
            self._flow,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
            awaits_continue=headers.get(b"expect", b"").lower() == b"100-continue",
            read_on=self._read_on,
            begins=self._answer_begins,
            ends=self._answer_ends,
        )
        self._exchanges.append(self._reading)
        self._close_after(None)
        if len(self._exchanges) == 1:
            self._answer_first()
        else:
            self._flow.pause_reading()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body to the exchange, for the parser; stop reading if too much of it waits."""
        if self._reading is not None:
            self._reading.add(body)
            if self._num_missing_bytes is not None:
                self._num_missing_bytes -= len(body)
            if self._reading.num_waiting_bytes > HIGH_WATER_LIMIT:
                self._flow.pause_reading()

    def on_message_complete(self) -> None:
        """End the body of the request, for the parser; if the connection is then closed, drop all that follows."""
        if self._reading is not None:
            self._reading.end()
            if not self._reading.keep_alive:
                self._reader.drop()
            self._reading, self._num_fed_bytes = None, 0

    # Called by an exchange

    def _read_on(self) -> None:
        """Read more, unless further requests already wait: a client may pipeline any number."""
        if len(self._exchanges) < 2:
            self._flow.resume_reading()

    def _answer_begins(self, exchange: Exchange) -> Headers:
        """Return the headers of every response. A response before the end of the request is the connection's last."""
        self._close_after(None)
        if not exchange.is_whole:
            exchange.keep_alive = False
            self._reader.drop()
        return self._server.default_headers

    def _answer_ends(self, exchange: Exchange) -> None:
        """Close the connection after a response, answer the next request that waits, or wait for one."""
        self._server.total_requests += 1
        self._exchanges.popleft()
        if not exchange.is_whole:
            self._close_soon()
            return
        if not exchange.keep_alive:
            self._transport.close()
            return
        self._read_on()
        if self._exchanges:
            self._answer_first()
        else:
            self._is_idle, self.idle_since = True, self._loop.time()
            self._close_after(self._keep_alive_s)

    # Internals

    def _make_room(self) -> None:
        """Close a connection that waits for its client if there are too many; this one if none waits."""
        others: set[Any] = self._server.connections
        if len(others) < type(self).max_connections():
            return
        waiting = [each for each in others if isinstance(each, HTTPProtocol) and each._waits_for_client]
        closed = connection_to_close(waiting, self, now=self._loop.time())
        others.discard(closed)
        closed._transport.close()

    @property
    def _waits_for_client(self) -> bool:
        """Return whether the connection waits for a request, or for the rest of its body."""
        return not self._exchanges or (self._exchanges[0] is self._reading and not self._exchanges[0].has_started)

    def _answer_first(self) -> None:
        """Start a task that runs the application for the first exchange that waits."""
        task = self._loop.create_task(self._exchanges[0].run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def _step_bytes(self) -> int:
        """Return how many bytes the parser gets at a time: the rest of a body, or a step of headers or chunks.

        Each header and chunk costs work, however short it is.
        """
        return STEP_BYTES if self._reading is None or self._num_missing_bytes is None else self._num_missing_bytes

    def _feed(self, data: bytes) -> None:
        """Give the parser bytes; refuse what is no HTTP, too many headers, and bodies that are mostly framing."""
        self._num_fed_bytes += len(data)
        if self._reading is None and self._num_fed_bytes > MAX_HEADER_BYTES:
            return self._refuse(_NO_HTTP)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            if not self._reader.drops:
                self._refuse(_NO_HTTP)
            return
        reading = self._reading
        if reading is not None and self._num_fed_bytes > 2 * reading.num_body_bytes + MAX_FRAMING_BYTES:
            self._refuse(_FRAMING)

    def _parse(self, data: bytes) -> None:
        """Parse bytes; a request that offers another protocol is parsed again without the offer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Clients that offer another protocol never insist on it. The parser would take the body for that protocol,
            # so it gets the request again, without the offer.
            first = b"%b %b HTTP/%b" % (
                self._parser.get_method(),
                self._target,
                self._parser.get_http_version().encode(),
            )
            headers = [b"%b: %b" % header for header in self._headers if header[0] != b"upgrade"]
            self._parser = httptools.HttpRequestParser(self)
            self._parse(b"\r\n".join([first, *headers, b"", data[upgrade.args[0] :]]))

    def _refuse(self, message: str) -> None:
        """Send 400 to a client that does not speak HTTP, after answering earlier requests, and close the connection."""
        self._reader.drop()
        broken, self._reading = self._reading, None
        if broken is not None:
            self._exchanges.remove(broken)
            broken.leave()
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
            return
        body = msgspec.json.encode(ErrorReply(ErrorBody(message, "invalid_request_error", code="invalid_http")))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        self._writer.write(head + b"connection: close\r\n\r\n" + body)
        self._close_soon()

    def _close_soon(self) -> None:
        """Stop sending, and close the connection when the client has had time to read what was sent."""
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._close_after(self.linger_s)

    def _close_after(self, seconds: float | None) -> None:
        """Close the connection after this time, unless this is called again before; None leaves it open.

        A timer is only made if none ends earlier: most requests make none.
        """
        self._closes_at = None if seconds is None else self._loop.time() + seconds
        if self._closes_at is not None and (self._timer is None or self._closes_at < self._timer.when()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._closes_at, self._close_if_due)

    def _close_if_due(self) -> None:
        """Close the connection if its deadline has passed; else wait for the deadline, if there is one."""
        self._timer = None
        if self._closes_at is None:
            return
        if self._loop.time() >= self._closes_at:
            self._transport.close()
        else:
            self._timer = self._loop.call_at(self._closes_at, self._close_if_due)
