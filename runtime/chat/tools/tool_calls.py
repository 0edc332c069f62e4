"""Read the calls of tools out of a reply while it is generated.

Knows how a format writes a call, not what the tools do. Text that only looks like the beginning of a call becomes
content as soon as that is certain.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from .arguments import ArgumentsReader, Schema
from .slots import fit, overlap
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
        schemas: of their arguments, where they are known, for formats that write values without their types.
        is_content: whether all of the reply is content, whatever it looks like.
        note: told of each whole call, before its last piece is returned.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: Sequence[str],
        *,
        schemas: Mapping[str, Schema] | None = None,
        is_content: bool = False,
        note: Callable[[ToolCall], None] | None = None,
    ) -> None:
        self._format, self._note = format, note
        self._so_far = ReadReply()
        self._num_noted = 0
        self._names, self._schemas = names, schemas or {}
        self._held = ""
        self._blanks = ""  # before what may be a call: the format's if it is, else the reply's
        self._read: Callable[[], list[Piece] | None] = self._read_rest if is_content else self._read_content
        self._num_calls = 0
        self._call_id = ""
        self._arguments: ArgumentsReader | None = None  # of the last call

    @property
    def num_calls(self) -> int:
        """Calls that began."""
        return self._num_calls

    @property
    def has_whole_calls(self) -> bool:
        """True if there are calls, and the arguments of the last one are complete."""
        return self._arguments is not None and self._arguments.is_whole

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the reply, and return the pieces that are certain."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._read()) is not None:
            pieces += found
        return self._noted(pieces)

    def finish(self) -> list[Piece]:
        """The text that was held back, at the end of the reply. A call that was cut before its arguments is content."""
        held, self._held = self._held, ""
        if self._read == self._read_arguments and self._arguments is not None:
            rest = self._arguments.finish(held)
            return self._noted([Arguments(self._num_calls - 1, rest)] if rest else [])
        is_closing = self._read == self._read_close and self._format.close.lstrip().startswith(held.lstrip())
        if is_closing or self._read == self._read_tail:  # all of the call is said
            return []
        if self._read == self._read_head:
            held = self._blanks + held
        is_said = bool(held) if self._num_calls == 0 else bool(held.strip())
        return [Content(held)] if is_said else []

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        if self._note is not None:
            for piece in pieces:
                self._so_far.add(piece)
            num_whole = self._num_calls - (not self.has_whole_calls)
            for call in self._so_far.calls[self._num_noted : num_whole]:
                self._note(call)
                self._num_noted += 1
        return pieces

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
        num_safe = len(self._held[: len(self._held) - overlap(self._held, trigger)].rstrip())
        return self._release(num_safe, self._read_content) if num_safe else None

    def _read_head(self) -> list[Piece] | None:
        may_be = False
        lead = self._format.open if self._num_calls == 0 else ""
        for name in self._names:
            head = lead + self._format.begin + name + self._format.middle
            found = fit(self._held, head + self._format.arguments.opener)
            if found is not None and found.is_whole and self._is_name_over(found.length):
                return self._begin_call(name, found.length - len(self._format.arguments.opener), found.call_id)
            may_be = may_be or found is not None
        if may_be:
            return None
        self._held, self._blanks = self._blanks + self._held, ""
        self._read = self._read_rest  # it only looked like a call
        return []

    def _is_name_over(self, at: int) -> bool:
        """Whether what is held from `at` on does not go on with a name, where nothing stands behind names."""
        if self._format.middle or self._format.arguments.opener:
            return True
        return len(self._held) > at and not (self._held[at].isalnum() or self._held[at] in "_-.")

    def _begin_call(self, name: str, head_length: int, call_id: str) -> list[Piece]:
        self._held, self._blanks = self._held[head_length:], ""
        self._arguments = self._format.arguments.reader(self._schemas.get(name, {}))
        self._read = self._read_arguments
        self._num_calls += 1
        digits = uuid.uuid4().hex[: 24 - len(call_id)] + call_id
        return [CallStart(self._num_calls - 1, f"call_{digits}", name)]

    def _read_arguments(self) -> list[Piece] | None:
        if not self._held or self._arguments is None:
            return None
        text, num_characters = self._arguments.push(self._held)
        self._held = self._held[num_characters:]
        if self._arguments.is_whole:
            self._read = self._read_tail
        elif not num_characters:
            return None
        return [Arguments(self._num_calls - 1, text)] if text else []

    def _read_tail(self) -> list[Piece] | None:
        found = fit(self._held, self._format.end)
        if found is not None and not found.is_whole:
            return None
        self._held = self._held[0 if found is None else found.length :]
        self._read = self._read_close if self._format.close else self._read_next
        return []

    def _read_next(self) -> list[Piece] | None:
        """What follows a call that nothing closes."""
        rest = self._held.lstrip()
        if rest.startswith(self._format.trigger):
            self._held, self._read = rest, self._read_head
            return []
        if self._format.trigger.startswith(rest):
            return None
        self._held, self._read = rest, self._read_rest
        return []

    def _read_close(self) -> list[Piece] | None:
        """What follows a call of those that are closed together."""
        rest, close = self._held.lstrip(), self._format.close.strip()
        separator = (self._format.separator or "").lstrip()
        again = separator + self._format.begin if separator else self._format.begin.lstrip()
        found = fit(rest, again) if again else None
        if rest.startswith(close):
            self._held, self._read = rest.removeprefix(close).lstrip(), self._read_rest
        elif found is not None and found.is_whole:
            begin = rest[len(separator) :]
            blanks = self._format.begin[: len(self._format.begin) - len(self._format.begin.lstrip())]
            self._held, self._read = begin if separator else blanks + begin, self._read_head
        elif close.startswith(rest) or found is not None:
            return None
        elif not again:
            self._held, self._read = rest, self._read_head
        else:
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
