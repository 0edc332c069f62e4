"""HTTP over one connection: uvicorn's protocol, with bounds on a client's time and bytes, and errors in OpenAI's shape.

uvicorn alone waits for the rest of a header, and after an answer for the rest of a body, as long as the connection
lasts. Knows connections, not the application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, ClassVar

import h11
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ..errors import ErrorBody, ErrorReply
from .corked_transport import CorkedTransport
from .step_reader import StepReader

MAX_HEADER_BYTES = 32 << 10  # of all headers of a request and its first line
STEP_BYTES = 4 << 10
MAX_FRAMING_BYTES = 64 << 10  # of a body's chunks, beside as many bytes as they hold
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class HTTPProtocol(H11Protocol):
    """A connection whose client has `headers_s` seconds to send the headers of each request.

    An answer that is sent before the end of its request's body is the last one of the connection. The rest of the body
    is read and dropped, and after `linger_s` the connection is closed. If it were closed at once, the client's system
    would get a reset, and drop the answer.

    Give it to `uvicorn.Config(http=...)`, with `h11_max_incomplete_event_size=MAX_HEADER_BYTES`.
    """

    headers_s: ClassVar[float] = 10.0
    linger_s: ClassVar[float] = 1.0
    _deadline: asyncio.TimerHandle | None = None

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _Connection(h11.SERVER, config.h11_max_incomplete_event_size or MAX_HEADER_BYTES)
        self._served, self.app = self.app, self._answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(CorkedTransport(transport, self.loop))  # type: ignore[arg-type]
        self._reader = StepReader(transport, self.loop, self._feed, self._step_bytes)
        self.flow = FlowControl(self._reader)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._reader.received(data)

    def on_response_complete(self) -> None:
        """Send the answer's last packet before anything else is done, such as to log the request."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer 400 to what is not HTTP, and close the connection."""
        message = f"this is not HTTP/1.1, or its headers have more than {MAX_HEADER_BYTES} bytes"
        if isinstance(self.conn, _Connection) and self.conn.is_mostly_framing:
            message = "the body's chunks hold less than their borders take; send it in larger ones, or with its length"
        body = msgspec.json.encode(ErrorReply(ErrorBody(message, "invalid_request_error", code="invalid_http")))
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # not in the middle of another answer
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application's answer can no longer be sent
            self.cycle.message_event.set()
        self._reader.drop()
        self._stop_watching()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self.linger_s, self.transport.close)

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _step_bytes(self) -> int:
        """How many bytes h11 gets at a time; it gets more only of a body that is not chunked.

        h11 checks the length of incomplete headers only: headers that arrive whole would pass however long they are.
        And each chunk of a body costs work, however short it is.
        """
        is_whole = self.conn.their_state is h11.SEND_BODY and not any(
            name == b"transfer-encoding" for name, _ in self.headers
        )
        return max(self._reader.num_waiting_bytes, 1) if is_whole else STEP_BYTES

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        """Run the application. If it answers before the end of the body, make this the connection's last answer."""
        end: Any = None

        async def sending(message: Any) -> None:
            nonlocal end
            if message["type"] == "http.response.start" and self.conn.their_state is h11.SEND_BODY:
                self._reader.drop()
                others = [header for header in message.get("headers", ()) if header != CLOSE_HEADER]
                message = {**message, "headers": [*others, CLOSE_HEADER]}
            elif self._reader.drops and not message.get("more_body", False):
                end = {"type": message["type"], "body": b""}  # after which uvicorn closes the connection
                message = {**message, "more_body": True}
            await send(message)

        await self._served(scope, receive, sending)
        if end is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.linger_s):
                    while (await receive())["type"] != "http.disconnect":
                        pass
            await send(end)

    def _watch(self) -> None:
        """Run the deadline exactly while headers are awaited."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing() or self._reader.drops:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.headers_s, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Connection(h11.Connection):
    """An h11 connection that refuses chunked bodies which consist mostly of the borders of their chunks."""

    _num_wire_bytes = 0  # since the request's headers began
    _num_body_bytes = 0

    @property
    def is_mostly_framing(self) -> bool:
        return self._num_wire_bytes > 2 * self._num_body_bytes + MAX_FRAMING_BYTES

    def receive_data(self, data: bytes) -> None:
        """As h11's."""
        self._num_wire_bytes += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """As h11's; raises RemoteProtocolError for such a body."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_body_bytes += len(event.data)
        if event is h11.NEED_DATA and self.their_state is h11.SEND_BODY and self.is_mostly_framing:
            raise h11.RemoteProtocolError("the body is mostly the borders of its chunks")
        return event

    def start_next_cycle(self) -> None:
        """As h11's."""
        super().start_next_cycle()
        self._num_wire_bytes = self._num_body_bytes = 0
