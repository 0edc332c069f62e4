"""Remember the calls that clients received, and restore their original spelling in later prompts.

A client sends a call back by its own serializer: with other spaces and escapes, with its keys in another order. The
text of the next prompt would differ there from what was generated, and everything after it be computed again. So a call
is replaced by the original if all of this holds:

- this server gave its id in this namespace, for a function of this name;
- its arguments are equal in type and value: 1 is not 1.0 and not true, and neither side has a key twice;
- the same is true of all calls of its message.

Otherwise the message is rendered as it came. Nothing else is replaced: the text around the calls is matched as
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
_OVERHEAD = 512  # approximate bytes of an entry besides its texts


class GeneratedArguments(str):
    """The arguments of a call in the model's spelling, unchanged by a client."""

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
    """The calls that were received or sent back most recently, in all namespaces; for any thread.

    >>> given = CallHistory()
    >>> given.note(b"", ToolCall("call_1", "read", '{"path": "a", "line": 1}'))
    >>> function = {"name": "read", "arguments": '{"line":1,"path":"a"}'}
    >>> said = {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}
    >>> given.respelled(b"", [said])[0]["tool_calls"][0]["function"]["arguments"]
    '{"path": "a", "line": 1}'

    Args:
        max_bytes: the most memory, approximately.
        clock: seconds; only differences count.
    """

    def __init__(self, max_bytes: int = 1 << 25, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._num_bytes = 0
        self._given: OrderedDict[_Key, _Given] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._given)

    def note(self, namespace: bytes, call: ToolCall) -> None:
        """Remember a complete call that a namespace received, and drop the least recently used ones above `max_bytes`.

        Not if its arguments are no JSON object, have a key twice, or a number that is too large for a float.
        """
        if _canonical(call.arguments) is None:
            return
        with self._lock:
            self._remember((namespace, call.call_id), _Given(call.name, call.arguments, self._clock()))
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._given)))

    def respelled(self, namespace: bytes, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages, with the arguments of known calls in the model's spelling, as `GeneratedArguments`."""
        return [self._restore_message(namespace, message) for message in messages] if self._given else messages

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget a namespace's calls; those of all namespaces if it is None."""
        with self._lock:
            for key in [key for key in self._given if namespace in (None, key[0])]:
                self._drop(key)

    def forget_unused(self, since: float) -> None:
        """Forget calls that were neither received nor sent back since the time `since`, in seconds of the clock."""
        with self._lock:
            while self._given and next(iter(self._given.values())).used_at < since:
                self._drop(next(iter(self._given)))

    def _restore_message(self, namespace: bytes, message: Message) -> Message:
        """Return a message with its calls' arguments in the model's spelling; unchanged unless all are known."""
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if not isinstance(calls, list) or not calls:
            return message
        respelled = [self._restore_call(namespace, call) for call in calls]
        return message if None in respelled else {**message, "tool_calls": respelled}

    def _restore_call(self, namespace: bytes, call: object) -> Mapping[str, Any] | None:
        """Return a call with its arguments in the model's spelling, and count it as used now.

        None if its id is unknown in this namespace, its name or arguments differ, or it has another shape.
        """
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
            if key in self._given:  # it was not dropped meanwhile
                self._remember(key, _Given(given.name, given.arguments, self._clock()))
        return {**call, "function": {**function, "arguments": GeneratedArguments(given.arguments)}}

    def _remember(self, key: _Key, given: _Given) -> None:
        """Store a call as the one used last, in place of an earlier one with this key; the caller holds the lock."""
        if key in self._given:
            self._drop(key)
        self._given[key] = given
        self._num_bytes += given.num_bytes

    def _drop(self, key: _Key) -> None:
        self._num_bytes -= self._given.pop(key).num_bytes


def _are_equal(given: str, sent: str) -> bool:
    """Return whether arguments are equal in type and value; the given ones are JSON."""
    return given == sent or _canonical(given) == _canonical(sent or "{}")


def _canonical(arguments: str) -> str | None:
    """Return JSON arguments in one spelling, the same for all that are equal in type and value.

    None if they are no JSON object, have a key twice, or a number that is too large for a float.
    """
    try:
        value = json.loads(
            arguments, object_pairs_hook=_require_unique, parse_float=_parse_finite, parse_constant=_refuse_constant
        )
        return json.dumps(value, sort_keys=True) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _require_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the keys and values of a decoded JSON object as a dictionary.

    Raises:
        ValueError: two pairs have the same key.
    """
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _parse_finite(text: str) -> float:
    """Return the number that a text of JSON writes, as a float.

    Raises:
        ValueError: it is too large for a float.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.20} is no number here")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
