"""Parse the tool calls in a reply while it is generated.

Knows how a format writes a call, not what the tools do. Models write calls with other white space than templates do,
and without one of several tags: these are calls, too. Text that only looks like the beginning of a call becomes content
as soon as that is certain. Text after a call is dropped: the grammar ends a reply there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..scan import overlap
from .arguments import ArgumentsReader, Schema
from .bare_calls import calls_in, length_of_fence, may_be_calls
from .format_texts import WHITE, loose, loose_after_white, match_pieces
from .format_texts import Piece as TextPiece
from .tool_format import AnyTool, ToolFormat, tools_of
from .tool_grammar import MAX_CALLS


@dataclass(frozen=True)
class Content:
    """A piece of text outside calls."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The start of a call; its arguments follow."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the arguments of the last call, as JSON."""

    index: int
    text: str


Piece = Content | CallStart | Arguments


@dataclass
class ToolCall:
    """A complete call."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass
class ReadReply:
    """The content of a reply, and its tool calls."""

    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a piece to the content, to the list of calls, or to a call's arguments."""
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
        names: of the tools that can be called.
        schemas: of their arguments, if known, for formats that write values without their types.
        max_bare_calls: the most calls of a reply that is JSON without the format's texts.
        note: called with each complete call, before its last piece is returned.
    """

    def __init__(
        self,
        format: ToolFormat,
        names: Sequence[str],
        *,
        schemas: Mapping[str, Schema] | None = None,
        max_bare_calls: int = MAX_CALLS,
        note: Callable[[ToolCall], None] | None = None,
    ) -> None:
        self._format, self._note = format, note
        self._so_far = ReadReply()
        self._num_noted = 0
        self._names, self._schemas = names, schemas or {}
        self._max_bare_calls = max_bare_calls
        self._held = ""
        self._read: Callable[[], list[Piece] | None] = self._read_start
        self._triggers = _triggers(format) if format.is_tagged else ()
        self._behind_name = (
            TextPiece("end of name"),
            *loose(format.middle),
            TextPiece("blank"),
            TextPiece("text", format.arguments.opener),
        )
        self._num_calls = 0
        self._arguments: ArgumentsReader | None = None  # of the last call
        self._has_whole_calls = False

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return self._num_calls

    @property
    def has_whole_calls(self) -> bool:
        """Return whether there are calls, and the arguments of the last one are complete."""
        return self._has_whole_calls or (self._arguments is not None and self._arguments.is_whole)

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the reply, and return the pieces of content and calls that are certain now."""
        self._held += text
        pieces: list[Piece] = []
        while (found := self._read()) is not None:
            pieces += found
        return self._note_calls(pieces)

    def finish(self) -> list[Piece]:
        """Return the last pieces, because the reply ends: content, calls without tags, or the rest of arguments.

        A call cut off before its arguments is content.
        """
        if self._read == self._read_start:
            calls = calls_in(self._held, self._names)
            if calls and len(calls) <= self._max_bare_calls:
                self._held = ""
                return self._note_calls(
                    [piece for name, arguments in calls for piece in self._bare_call(name, arguments)]
                )
            self._read = self._read_content
            return [*self.push(""), *self.finish()]
        held, self._held = self._held, ""
        if self._read == self._read_arguments and self._arguments is not None:
            rest = self._arguments.finish()
            return self._note_calls([Arguments(self._num_calls - 1, rest)] if rest else [])
        is_begun = self._read == self._read_after_call and any(
            found is not None and found.is_whole
            for found in (match_pieces(held, loose(opening)) for opening in self._format.later_openings if opening)
        )
        return [Content(held)] if held and (is_begun or self._read == self._read_content) else []

    def _note_calls(self, pieces: list[Piece]) -> list[Piece]:
        """Report the calls that are complete with `pieces` to `note`, and return `pieces`."""
        if self._note is not None:
            for piece in pieces:
                self._so_far.add(piece)
            num_whole = self._num_calls - (not self.has_whole_calls)
            for call in self._so_far.calls[self._num_noted : num_whole]:
                self._note(call)
                self._num_noted += 1
        return pieces

    # Each reads as much of the held text as it can, and returns its pieces; None if it needs more.

    def _read_start(self) -> list[Piece] | None:
        """Read a call at the very beginning of a reply, and return its `CallStart`; no piece if text begins there.

        None if more text is needed, or all text so far may be JSON that `finish` reads as calls.
        """
        is_tagged = self._format.is_tagged
        start = length_of_fence(self._held) if is_tagged else len(self._held) - len(self._held.lstrip(WHITE))
        begun = self._match_call(start, self._format.openings)
        if begun is not None:
            return self._begin_call(begun) if begun.is_whole else None
        if self._max_bare_calls and may_be_calls(self._held, self._names):
            return None
        self._read = self._read_content
        return []

    def _read_content(self) -> list[Piece] | None:
        """Read text up to a call, and return it as `Content`, and the `CallStart` if the call has begun.

        None if no text is certain. Text from where a call may begin is held back.
        """
        at = 0
        while (at := self._find_candidate(at)) < len(self._held):
            begun = self._match_call(at, self._format.openings)
            if begun is not None:
                before = self._held[:at].rstrip()
                said: list[Piece] = [Content(before)] if before else []
                if begun.is_whole:
                    return [*said, *self._begin_call(begun)]
                self._held = self._held[len(before) :]
                return said or None
            at += 1
        num_safe = len(self._held) if not self._triggers else len(self._held.rstrip())
        said = [Content(self._held[:num_safe])] if num_safe else []
        self._held = self._held[num_safe:]
        return said or None

    def _find_candidate(self, start: int) -> int:
        """Return the first index from `start` on at which a call may begin; the length of the held text if none."""
        ends = (len(self._held) - overlap(self._held[start:], trigger) for trigger in self._triggers)
        found = (self._held.find(trigger, start) for trigger in self._triggers)
        return min((at for at in (*found, *ends) if at >= 0), default=len(self._held))

    def _match_call(self, at: int, openings: Sequence[str]) -> _Begun | None:
        """Return the call of a known tool that begins at index `at` of the held text; None if none does.

        If more text is needed to tell, return a call without a name.

        Args:
            openings: the texts before its name, of which it has one.
        """
        may_be: _Begun | None = None
        for opening in openings:
            first = match_pieces(self._held, loose(opening), at)
            if first is not None and not first.is_whole:
                may_be = _Begun("", 0)
            if first is None or not first.is_whole:
                continue
            rest = self._held[at + first.length :]
            if self._format.has_blank_before_name:
                rest = rest.lstrip(WHITE)
            for name in self._names:
                if not (rest.startswith(name) or name.startswith(rest)):
                    continue
                found = match_pieces(rest, (TextPiece("text", name), *self._behind_name))
                if found is not None and found.is_whole:
                    length = len(self._held) - len(rest) + found.length - len(self._format.arguments.opener)
                    return _Begun(name, length, found.call_id)
                if found is not None:
                    may_be = _Begun("", 0)
        return may_be

    def _begin_call(self, begun: _Begun) -> list[Piece]:
        """Drop the text before a call's arguments, begin to read these, and return the `CallStart`, in a list."""
        self._held = self._held[begun.length :]
        schema, ends = self._schemas.get(begun.name, {}), self._format.end_tags
        self._arguments = self._format.arguments.reader(schema, ends)
        self._read = self._read_arguments
        return [self._call_start(begun.name, begun.call_id)]

    def _call_start(self, name: str, call_id: str = "") -> CallStart:
        self._num_calls += 1
        digits = uuid.uuid4().hex[: 24 - len(call_id)] + call_id
        return CallStart(self._num_calls - 1, f"call_{digits}", name)

    def _read_arguments(self) -> list[Piece] | None:
        """Read arguments up to their end, and return `Arguments`, if any JSON is certain; None if no text is held."""
        if not self._held or self._arguments is None:
            return None
        text, self._held = self._arguments.push(self._held), ""
        if self._arguments.is_whole:
            self._held, self._read = self._arguments.rest, self._drop_call_end
        return [Arguments(self._num_calls - 1, text)] if text else []

    def _drop_call_end(self) -> list[Piece] | None:
        """Drop what is there of a call's end: its end tags, or the whole text. No piece; None if it needs more text."""
        for text in self._format.end_tags or [self._format.end]:
            found = match_pieces(self._held, loose_after_white(text))
            if found is not None and not found.is_whole:
                return None
            self._held = self._held[0 if found is None else found.length :]
        self._read = self._read_after_call
        return []

    def _read_after_call(self) -> list[Piece] | None:
        """Drop the end of all calls, or read another call's opening: a `CallStart`. None if more text is needed.

        Anything else is dropped, with the rest of the reply.
        """
        self._held = self._held.lstrip(WHITE)
        close, separator = loose(self._format.close.strip()), (self._format.separator or "").strip()
        closed = match_pieces(self._held, close) if close else None
        if closed is not None and closed.is_whole:
            self._held = self._held[closed.length :]
            return []
        rest = self._held.removeprefix(separator).lstrip(WHITE) if separator else self._held
        begun = self._match_call(len(self._held) - len(rest), self._format.later_openings) if rest else None
        if begun is not None and begun.is_whole and self._format.separator is not None:
            return self._begin_call(begun)
        if not rest or begun is not None or closed is not None or separator.startswith(self._held):
            return None
        self._read = self._read_nothing
        return []

    def _read_nothing(self) -> list[Piece] | None:
        self._held = ""
        return None

    def _bare_call(self, name: str, arguments: str) -> list[Piece]:
        start = self._call_start(name)
        self._has_whole_calls = True
        return [start, Arguments(start.index, arguments)]


@dataclass(frozen=True)
class _Begun:
    """A call whose arguments begin after `length` characters; without a name, one that may begin."""

    name: str
    length: int
    call_id: str = ""

    @property
    def is_whole(self) -> bool:
        return bool(self.name)


def _triggers(format: ToolFormat) -> tuple[str, ...]:
    """Return the first literal of each text that a reply's first call can begin with, without repetitions."""
    return tuple(dict.fromkeys(loose(opening)[0].text for opening in format.openings))


def read_whole(text: str, reader: ToolCallReader) -> ReadReply:
    """Return the content and the tool calls of a whole reply, read at once by a new reader."""
    reply = ReadReply()
    for piece in [*reader.push(text), *reader.finish()]:
        reply.add(piece)
    return reply


def read_reply(text: str, format: ToolFormat, tools: Sequence[AnyTool]) -> ReadReply:
    """Return the content of a whole reply, and its calls of these tools."""
    schemas = {tool.name: tool.parameters for tool in tools_of(tools)}
    return read_whole(text, ToolCallReader(format, list(schemas), schemas=schemas))
