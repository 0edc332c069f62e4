"""Read a request's body. Bodies that are too long, too slow, too deep or not JSON are refused.

All bodies that are read at a time share a memory limit. Above it, the client with the most bytes loses its largest
body. Knows bytes and headers, not what is requested.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ..errors import HTTPError
from ..request_fields import MAX_VALUES
from .connection import ClientGone, header_of

T = TypeVar("T")
RETRY_AFTER_S = 1
MAX_BODIES = 16  # of maximum size, read at a time
DEADLINE_S = 60.0  # for a whole body, so that a client that sends a byte now and then cannot hold a connection
# curl declares JSON as a form unless told otherwise. Bodies of other types are not meant as JSON.
_TYPES = ("", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded")

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALVES = re.compile(rb"(\\\\|" + _HIGH + _LOW + rb")|" + _HIGH + rb"|" + _LOW)  # the first group skips `\\`
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_BORDERS = b",[{"  # every value in an array or object follows one of these, or a colon


async def read_json(
    request: Request, *, max_bytes: int, deadline_s: float = DEADLINE_S, room: BodyReading | None = None
) -> bytes:
    """Read the body of a request in JSON. `decode_json` and `unknown_fields.decode_body` decode it.

    Raises:
        HTTPError: 413 if it is longer than `max_bytes` or has more than `MAX_VALUES` values, 408 if it has not arrived
            after `deadline_s` seconds, 503 if there is no room for it; the rest is not read. 400 if a header declares
            it as compressed, or as something other than JSON.
        ClientGone: the client disconnected before the end.
    """
    _check_headers(request)
    return await read_body(request, max_bytes=max_bytes, deadline_s=deadline_s, room=room)


async def read_body(
    request: Request,
    *,
    max_bytes: int,
    deadline_s: float = DEADLINE_S,
    room: BodyReading | None = None,
    is_one_value: bool = True,
) -> bytes:
    """Read the bytes of a request's body.

    Args:
        room: counts the bytes together with those of other bodies.
        is_one_value: the body is one JSON value, whose size is limited.

    Raises:
        HTTPError: 413, 408 or 503, as in `read_json`.
        ClientGone: the client disconnected before the end.
    """
    declared = header_of(request.scope, b"content-length") or ""
    if declared.isdecimal() and declared.isascii():
        _check_length(int(declared[:20]), max_bytes)  # a number with more digits exceeds the limit, too
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            if room is not None:
                room.deadline = deadline
            body = await _read(request, max_bytes, room, is_one_value)
    except TimeoutError as error:
        if room is not None:
            room.require_room()
        message = f"the body did not arrive within {deadline_s:g} s; send it faster"
        raise HTTPError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    if room is not None:
        room.deadline = None
    request.state.num_body_bytes = len(body)
    return body


def num_body_bytes_of(request: Request) -> int:
    """Return the length of the body that was read; 0 if none was."""
    num_bytes: int = getattr(request.state, "num_body_bytes", 0)
    return num_bytes


def decode_json(body: bytes, type: type[T]) -> T:
    """Decode JSON as a type.

    Raises:
        msgspec.DecodeError: it is not JSON, is nested too deep, or does not match the type.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error


def without_lone_surrogates(body: bytes) -> bytes:
    """Replace lone surrogates in JSON by U+FFFD. Clients that cut texts inside a character produce them.

    >>> without_lone_surrogates(rb'"a \\ud83d b \\ud83d\\ude00 \\\\ud83d"')
    b'"a \\\\ufffd b \\\\ud83d\\\\ude00 \\\\\\\\ud83d"'
    """
    body = _HALVES.sub(lambda found: found[1] or rb"\ufffd", body)
    return _ENCODED_HALF.sub("\ufffd".encode(), body)


async def _read(request: Request, max_bytes: int, room: BodyReading | None, is_one_value: bool) -> bytes:
    """Read the whole body.

    Args:
        room: counts the bytes of all bodies that are being received; None: they are not counted.
        is_one_value: the body is one JSON value, whose parts are counted.

    Raises:
        ClientGone: the client went away.
        HTTPError: the body is too large, or has too many values.
    """
    chunks: list[bytes] = []  # joined once: growing a long array copies it, which blocks the event loop
    num_bytes, size = 0, JSONSize()
    is_whole = False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, is_whole = message.get("body", b""), not message.get("more_body", False)
        chunks.append(chunk)
        num_bytes += len(chunk)
        _check_length(num_bytes, max_bytes)
        if room is not None:
            room.add(len(chunk))
        if is_one_value:
            size.add(chunk)
            _check_values(size.num_values)
    return b"".join(chunks)


def _check_headers(request: Request) -> None:
    """Raise HTTPError unless the headers say that the body is uncompressed JSON."""
    media_type = (header_of(request.scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type not in _TYPES and not media_type.endswith("+json"):
        message = f"the body is {media_type!r:.80}; send it as application/json"
        raise HTTPError(400, message, code="unsupported_content_type")
    encoding = header_of(request.scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        message = f"the body is compressed with {encoding!r:.80}; send it uncompressed"
        raise HTTPError(400, message, code="unsupported_content_encoding")


def _check_length(num_bytes: int, max_bytes: int) -> None:
    """Raise HTTPError, 413, if the body has more than `max_bytes`."""
    if num_bytes > max_bytes:
        message = f"the body has {num_bytes} bytes or more, at most {max_bytes} are allowed"
        raise HTTPError(413, message, code="body_too_large")


def _check_values(num_values: int) -> None:
    """Raise HTTPError, 413, if the body has too many JSON values."""
    if num_values > MAX_VALUES:
        message = f"the body has {num_values} values or more, token ids among them, at most {MAX_VALUES} are allowed"
        raise HTTPError(413, message, code="too_many_values")


class JSONSize:
    """Counts the values of a JSON text while its bytes arrive, because decoding more values holds the GIL longer.

    Knows quotes, commas and brackets, not whether the text is valid.

    >>> size = JSONSize()
    >>> for piece in (b'{"a,b": [1, 2', b', "[,]"]}'):
    ...     size.add(piece)
    >>> size.num_values  # the object, the array, 2 and the text
    4
    """

    def __init__(self) -> None:
        self.num_values = 0
        self._is_in_text = False
        self._is_escaped = False  # a backslash ended the last piece

    def add(self, piece: bytes) -> None:
        """Count the values that begin in the next piece."""
        if self._is_escaped and piece:
            piece, self._is_escaped = piece[1:], False
        if b"\\" in piece:  # `\\"` ends a text, `\"` does not
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
            self._is_escaped = piece.endswith(b"\\")
        parts = piece.split(b'"')
        outside = b" ".join(parts[self._is_in_text :: 2])
        self.num_values += len(outside) - len(outside.translate(None, _BORDERS))
        self._is_in_text ^= len(parts) % 2 == 0


@dataclass(eq=False)
class BodyReading:
    """One body that is being read, or has been read and is not decoded yet."""

    client: str
    room: BodyRoom
    num_bytes: int = 0
    is_refused: bool = False
    deadline: asyncio.Timeout | None = None  # of reading it; set to now if the body is refused

    def add(self, num_bytes: int) -> None:
        """Reserve room for more bytes.

        Raises:
            HTTPError: 503 if there is no room, and no client uses more.
        """
        self.room.take(self, num_bytes)
        self.require_room()

    def require_room(self) -> None:
        """Raise HTTPError, 503, if the body's room was given to another client."""
        if self.is_refused:
            raise HTTPError(
                503,
                f"the request bodies being received exceed {self.room.max_bytes} bytes together, and most of them are "
                "yours; send fewer large ones at a time",
                code="too_many_bytes",
                headers={"connection": "close", "Retry-After": str(RETRY_AFTER_S)},
            )


class BodyRoom:
    """A memory limit for all bodies being read. Above it, the client with the most bytes loses its largest body.

    >>> room = BodyRoom(max_bytes=10)
    >>> with room.reading("a client") as reading:
    ...     reading.add(4)
    ...     room.num_bytes
    4
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._readings: set[BodyReading] = set()
        self._by_client = Counter[str]()

    @contextmanager
    def reading(self, client: str) -> Iterator[BodyReading]:
        """Reserve room for one body of a client until the block ends."""
        reading = BodyReading(client, self)
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.discard(reading)
            self._count(reading, -reading.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all bodies."""
        return self._by_client.total()

    def take(self, reading: BodyReading, num_bytes: int) -> None:
        """Count more bytes of a body. Refuse bodies until the rest fits: this one, unless another client has more."""
        self._count(reading, num_bytes)
        while self.num_bytes > self.max_bytes:
            greediest = max(self._by_client, key=self._by_client.__getitem__)
            refused = reading
            if self._by_client[greediest] > self._by_client[reading.client]:
                own = (each for each in self._readings if each.client == greediest)
                refused = max(own, key=lambda each: each.num_bytes)
            refused.is_refused = True
            self._count(refused, -refused.num_bytes)
            if refused.deadline is not None and refused is not reading:
                refused.deadline.reschedule(asyncio.get_running_loop().time())

    def _count(self, reading: BodyReading, num_bytes: int) -> None:
        """Add bytes to those of a body and of its client."""
        reading.num_bytes += num_bytes
        self._by_client[reading.client] += num_bytes
        if not self._by_client[reading.client]:
            del self._by_client[reading.client]
