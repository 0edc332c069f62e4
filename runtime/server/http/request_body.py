"""A request's body. One that is too long, too slow, too deep or no JSON is refused.

The bodies that are read at a time have room together; the client that has most of it makes room for others. Knows bytes
and headers, not what is asked.
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
MAX_BODIES = 16  # of the largest size that a server reads at a time
DEADLINE_S = 60.0  # for a whole body: a client that sends a byte now and then cannot hold a connection longer
# curl sends JSON as a form unless told otherwise. A body of any other type is not meant as JSON.
_TYPES = ("", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded")

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALVES = re.compile(rb"(\\\\|" + _HIGH + _LOW + rb")|" + _HIGH + rb"|" + _LOW)  # an escaped backslash begins none
_ENCODED_HALF = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_BORDERS = b",[{"  # a value that is not the first of an array or an object stands behind one of these


async def read_json(
    request: Request, *, max_bytes: int, deadline_s: float = DEADLINE_S, room: BodyReading | None = None
) -> bytes:
    """The body of `request`, which is meant as JSON; `decode_json` and `unknown_fields.decode_body` read it.

    Raises:
        HTTPError: 413, it is longer than `max_bytes`, or has more than `MAX_VALUES` values; 408, it has not arrived
            after `deadline_s` seconds; 503, `room` has none for it. The rest is not read then. 400, a header says that
            it is compressed, or no JSON.
        ClientGone: the client left before it had sent it.
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
    """The bytes of a request's body.

    Args:
        room: where they are counted beside those of other bodies.
        is_one_value: whether they are decoded as one JSON value, which may not be too large.

    Raises:
        HTTPError: 413, 408, 503, as `read_json`.
        ClientGone: the client left before it had sent them.
    """
    declared = header_of(request.scope, b"content-length") or ""
    if declared.isdecimal() and declared.isascii():
        _check_length(int(declared[:20]), max_bytes)  # a number of more digits is too long as well
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            if room is not None:
                room.deadline = deadline
            body = await _read(request, max_bytes, room, is_one_value)
    except TimeoutError as error:
        if room is not None:
            room.require_room()
        message = f"the body was not there after {deadline_s:g} s; send it faster"
        raise HTTPError(408, message, code="request_timeout", headers={"connection": "close"}) from error
    if room is not None:
        room.deadline = None
    request.state.num_body_bytes = len(body)
    return body


def num_body_bytes_of(request: Request) -> int:
    """The length of the body that was read; 0 if none was."""
    num_bytes: int = getattr(request.state, "num_body_bytes", 0)
    return num_bytes


def decode_json(body: bytes, type: type[T]) -> T:
    """JSON as a type.

    Raises:
        msgspec.DecodeError: it is not JSON, too deep, or not of this type.
    """
    try:
        return msgspec.json.decode(body, type=type)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"it is not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("its arrays and objects are nested too deep") from error


def without_lone_surrogates(body: bytes) -> bytes:
    """JSON with U+FFFD in place of halves of characters, which clients make that cut texts between them; itself if it
    has none.

    >>> without_lone_surrogates(rb'"a \\ud83d b \\ud83d\\ude00 \\\\ud83d"')
    b'"a \\\\ufffd b \\\\ud83d\\\\ude00 \\\\\\\\ud83d"'
    """
    body = _HALVES.sub(lambda found: found[1] or rb"\ufffd", body)
    return _ENCODED_HALF.sub("\ufffd".encode(), body)


async def _read(request: Request, max_bytes: int, room: BodyReading | None, is_one_value: bool) -> bytes:
    chunks: list[bytes] = []  # joined once: a long array that grows is moved, which holds the event loop
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
    media_type = (header_of(request.scope, b"content-type") or "").partition(";")[0].strip().lower()
    if media_type not in _TYPES and not media_type.endswith("+json"):
        message = f"the body is {media_type!r:.80}; send it as application/json"
        raise HTTPError(400, message, code="unsupported_content_type")
    encoding = header_of(request.scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        message = f"the body is compressed with {encoding!r:.80}; send it as it is"
        raise HTTPError(400, message, code="unsupported_content_encoding")


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        message = f"the body has {num_bytes} bytes or more, at most {max_bytes} are allowed"
        raise HTTPError(413, message, code="body_too_large")


def _check_values(num_values: int) -> None:
    if num_values > MAX_VALUES:
        message = f"the body has {num_values} values or more, token ids among them, at most {MAX_VALUES} are allowed"
        raise HTTPError(413, message, code="too_many_values")


class JSONSize:
    """How many values a JSON text has, counted while its bytes come: decoding holds the interpreter longer for more.

    Knows quotes, commas and brackets, not whether they are JSON.

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
    """One body that is read, or was read and is not decoded yet."""

    client: str
    room: BodyRoom
    num_bytes: int = 0
    is_refused: bool = False
    deadline: asyncio.Timeout | None = None  # of its reading: brought forward where the body is refused

    def add(self, num_bytes: int) -> None:
        """Take room for more bytes.

        Raises:
            HTTPError: 503, there is none, and no client has more of it.
        """
        self.room.take(self, num_bytes)
        self.require_room()

    def require_room(self) -> None:
        """Raise HTTPError, 503, if the body's room was given to another client."""
        if self.is_refused:
            raise HTTPError(
                503,
                f"the bodies of requests that arrive now have more than {self.room.max_bytes} bytes together, and most "
                "of them are yours; send fewer large ones at a time",
                code="too_many_bytes",
                headers={"connection": "close", "Retry-After": str(RETRY_AFTER_S)},
            )


class BodyRoom:
    """Room for `max_bytes` of bodies. Where it is full, the client with most bytes loses its largest body.

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
        """Have room for one body of a client until the block ends."""
        reading = BodyReading(client, self)
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.discard(reading)
            self._count(reading, -reading.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all bodies."""
        return self._by_client.total()

    def take(self, reading: BodyReading, num_bytes: int) -> None:
        """Count more bytes of a body, and refuse bodies until the others fit: its own, if no client has more."""
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
        reading.num_bytes += num_bytes
        self._by_client[reading.client] += num_bytes
        if not self._by_client[reading.client]:
            del self._by_client[reading.client]
