"""Read the calls of tools out of a reply while it is generated.

Knows how a format writes a call, not what the tools do. Text that only looks like the beginning of a call becomes
content as soon as that is certain.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .tool_format import ToolFormat


@dataclass(frozen=True)
class Content:
    """A piece of text that is no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the call that began last, as JSON."""

    index: int
    text: str


Piece = Content | CallStart | Arguments


@dataclass
class ToolCall:
    """A whole call."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class ReadReply:
    """What a reply says, and which tools it calls."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Go on by a piece."""
        match piece:
            case Content(text):
                self.content += text
            case CallStart(_, call_id, name):
                self.calls.append(ToolCall(call_id, name))
            case Arguments(index, text):
                self.calls[index].arguments += text


class ToolCallReader:
    """Splits a reply into content and calls.

    >>> reader = ToolCallReader(PLAIN, ["now"])                                        # doctest: +SKIP
    >>> reader.push('{"name": "now", "argu'), reader.push('ments": {}}')               # doctest: +SKIP
    ([], [CallStart(0, 'call_...', 'now'), Arguments(0, '{}')])

    Args:
        names: of the tools that may be called.
        is_content: whether all of the reply is content, whatever it looks like.
    """

    def __init__(self, format: ToolFormat, names: Sequence[str], *, is_content: bool = False) -> None:
        self._format = format
        self._heads = {name: format.head(name) + "{" for name in names}  # arguments are an object
        self._held = ""
        self._blanks = ""  # before what may be a call: the format's if it is, else the reply's
        self._read: Callable[[], list[Piece] | None] = self._read_rest if is_content else self._read_content
        self._num_calls = 0
        self._value = _JsonValue()

    @property
    def num_calls(self) -> int:
        """Calls that began."""
        return self._num_calls

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the arguments of the last one are complete."""
        return self._num_calls > 0 and self._value.is_whole

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the reply, and return the pieces that are certain."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._read()) is not None:
            pieces += found
        return pieces

    def finish(self) -> list[Piece]:
        """The text that was held back, at the end of the reply. A call that was cut before its arguments is no call."""
        held, self._held = self._held, ""
        is_said = self._read in (self._read_content, self._read_rest)
        return [Content(held)] if held and is_said else []

    # Each reads what it can of what is held; None: it needs more.

    def _read_content(self) -> list[Piece] | None:
        trigger = self._format.trigger
        if not self._format.is_tagged:
            if not self._held:
                return None
            self._read = self._read_head if self._held.startswith(trigger) else self._read_rest
            return []
        at = self._held.find(trigger)
        if at >= 0:
            return self._release(at, self._read_head, is_before_call=True)
        num_safe = len(self._held[: len(self._held) - _overlap(self._held, trigger)].rstrip())
        return self._release(num_safe, self._read_content) if num_safe else None

    def _read_head(self) -> list[Piece] | None:
        for name, head in self._heads.items():
            if self._held.startswith(head):
                self._held, self._blanks = self._held[len(head) - 1 :], ""
                self._read, self._value = self._read_arguments, _JsonValue()
                self._num_calls += 1
                return [CallStart(self._num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)]
        if any(head.startswith(self._held) for head in self._heads.values()):
            return None
        self._held, self._blanks = self._blanks + self._held, ""
        self._read = self._read_rest  # it only looked like a call
        return []

    def _read_arguments(self) -> list[Piece] | None:
        if not self._held:
            return None
        num_characters = self._value.push(self._held)
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        if self._value.is_whole:
            self._read = self._read_tail
        return [Arguments(self._num_calls - 1, text)] if text else []

    def _read_tail(self) -> list[Piece] | None:
        tail = self._format.tail
        if len(self._held) < len(tail) and tail.startswith(self._held):
            return None
        self._held = self._held.removeprefix(tail)
        self._read = self._read_next
        return []

    def _read_next(self) -> list[Piece] | None:
        rest = self._held.lstrip()
        if rest.startswith(self._format.trigger):
            self._held, self._read = rest, self._read_head
            return []
        if self._format.trigger.startswith(rest):
            return None
        self._held, self._read = rest, self._read_rest
        return []

    def _read_rest(self) -> list[Piece] | None:
        return self._release(len(self._held), self._read_rest) if self._held else None

    def _release(
        self, num_characters: int, then: Callable[[], list[Piece] | None], *, is_before_call: bool = False
    ) -> list[Piece]:
        text, self._held = self._held[:num_characters], self._held[num_characters:]
        if is_before_call:
            text, self._blanks = text.rstrip(), text[len(text.rstrip()) :]
        self._read = then
        return [Content(text)] if text else []


def read_whole(text: str, reader: ToolCallReader) -> ReadReply:
    """All of a reply."""
    reply = ReadReply()
    for piece in [*reader.push(text), *reader.finish()]:
        reply.add(piece)
    return reply


class _JsonValue:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_whole = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to it."""
        for at, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_whole = True
                    return at + 1
        return len(text)


def _overlap(text: str, trigger: str) -> int:
    """The length of the longest end of `text` that `trigger` begins with."""
    return next((n for n in range(min(len(text), len(trigger)), 0, -1) if text.endswith(trigger[:n])), 0)
