"""Remember the calls that clients were given, and have them stand in later prompts as the model wrote them.

A client sends a call back by its own serializer: with other spaces and escapes, with its keys in another order. The
text of the next prompt would part there from what was generated, and all behind it be computed again. So a call is
taken for the one that was given, and is rendered as that was generated, if all of this holds:

- this server gave its id in this namespace, for a function of this name;
- its arguments are equal in type and value: 1 is not 1.0 and not true, and neither side has a key twice;
- the same is true of all calls of its message.

Otherwise the message is rendered as it came. Nothing else is taken for equal: the words around the calls are matched as
all text is. Knows calls, not prompts or pages.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from .tool_calls import ToolCall

Message = Mapping[str, object]

_Key = tuple[bytes, str]  # a namespace, and the id of a call
_OVERHEAD = 512  # bytes of an entry beside its texts, about


class GeneratedArguments(str):
    """The arguments of a call as the model wrote them: no client changed a letter."""

    __slots__ = ()


@dataclass(frozen=True)
class _Given:
    name: str
    arguments: str
    used_at: float

    @property
    def num_bytes(self) -> int:
        return sys.getsizeof(self.name) + sys.getsizeof(self.arguments) + _OVERHEAD


class CallHistory:
    """The calls that were given or came back last, of all namespaces; any thread may ask.

    >>> given = CallHistory()
    >>> given.note(b"", ToolCall("call_1", "read", '{"path": "a", "line": 1}'))
    >>> function = {"name": "read", "arguments": '{"line":1,"path":"a"}'}
    >>> said = {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}
    >>> given.respelled(b"", [said])[0]["tool_calls"][0]["function"]["arguments"]
    '{"path": "a", "line": 1}'

    Args:
        max_bytes: of what is remembered, about.
        clock: seconds; only differences count.
    """

    def __init__(self, max_bytes: int = 1 << 25, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._num_bytes = 0
        self._given: OrderedDict[_Key, _Given] = OrderedDict()  # the one used longest ago first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._given)

    def note(self, namespace: bytes, call: ToolCall) -> None:
        """A namespace was given a whole call; those used longest ago are forgotten. One that could be read in two ways
        is not noted.
        """
        if _canonical(call.arguments) is None:
            return
        with self._lock:
            self._put((namespace, call.call_id), _Given(call.name, call.arguments, self._clock()))
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._given)))

    def respelled(self, namespace: bytes, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, in which the arguments of calls that were given are `GeneratedArguments`."""
        return [self._respelled(namespace, message) for message in messages] if self._given else messages

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget a namespace's calls, or all."""
        with self._lock:
            for key in [key for key in self._given if namespace in (None, key[0])]:
                self._drop(key)

    def forget_unused(self, since: float) -> None:
        """Forget what was neither given nor sent back since then, on the clock."""
        with self._lock:
            while self._given and next(iter(self._given.values())).used_at < since:
                self._drop(next(iter(self._given)))

    def _respelled(self, namespace: bytes, message: Message) -> Message:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list) or not calls:
            return message
        respelled = [self._found(namespace, call) for call in calls]
        return message if None in respelled else {**message, "tool_calls": respelled}

    def _found(self, namespace: bytes, call: object) -> Mapping[str, Any] | None:
        """A call as it was given; None if it was not, or is of another shape."""
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            return None
        key, sent = (namespace, str(call.get("id"))), function.get("arguments")
        with self._lock:
            given = self._given.get(key)
        if given is None or given.name != function.get("name") or not isinstance(sent, str):
            return None
        if not _are_equal(given.arguments, sent):
            return None
        with self._lock:
            if key in self._given:  # nobody has forgotten it meanwhile
                self._put(key, _Given(given.name, given.arguments, self._clock()))
        return {**call, "function": {**function, "arguments": GeneratedArguments(given.arguments)}}

    def _put(self, key: _Key, given: _Given) -> None:
        if key in self._given:
            self._drop(key)
        self._given[key] = given
        self._num_bytes += given.num_bytes

    def _drop(self, key: _Key) -> None:
        self._num_bytes -= self._given.pop(key).num_bytes


def _are_equal(given: str, sent: str) -> bool:
    """Whether arguments are equal in type and value; those that were given are JSON."""
    return given == sent or _canonical(given) == _canonical(sent or "{}")


def _canonical(arguments: str) -> str | None:
    """One text for all that are equal in type and value; None: no JSON object, or one that may be read in two ways."""
    try:
        value = json.loads(
            arguments, object_pairs_hook=_without_doubles, parse_float=_finite, parse_constant=_refuse_constant
        )
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is no number here")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
