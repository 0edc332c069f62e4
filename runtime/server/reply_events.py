"""One reply as typed events, which each API encodes in its own format, whole or streamed.

A reply is a sequence of parts: runs of reasoning, runs of text, and tool calls. A part begins, gets text, and ends
before the next one begins. Knows the engine's deltas and the tool call parser, not the format of any API.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..chat.tools.tool_calls import Arguments, CallStart, Content, Piece, ToolCallReader
from ..engine.completion import Delta

PartKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class ReplyPart:
    """A run of reasoning or of text, or one tool call.

    Args:
        index: its index among the parts of the reply.
        call: id and name of the tool call; None if it is not a call.
    """

    index: int
    kind: PartKind
    call: CallStart | None = None
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text so far; of a tool call, its arguments as JSON."""
        return "".join(self._pieces)

    def add(self, text: str) -> PartText:
        """Append text to the part, and return the event for it."""
        self._pieces.append(text)
        return PartText(self, text)


class PartBegin(NamedTuple):
    """Event: a part begins."""

    part: ReplyPart


class PartText(NamedTuple):
    """Event: a part gets text; a tool call gets a piece of its arguments."""

    part: ReplyPart
    text: str


class PartEnd(NamedTuple):
    """Event: a part is complete."""

    part: ReplyPart


ReplyEvent = PartBegin | PartText | PartEnd


class ReplyEvents:
    """Converts the engine's deltas of one reply into events.

    Args:
        reader: finds tool calls in the text; None if the request has no tools.

    Attributes:
        parts: all parts so far.
    """

    def __init__(self, reader: ToolCallReader | None = None) -> None:
        self.parts: list[ReplyPart] = []
        self._reader = reader
        self._call: ReplyPart | None = None  # the last one
        self._open: ReplyPart | None = None  # the last part, until it ends
        self._is_flushed = False

    @property
    def has_calls(self) -> bool:
        """Return whether the reply calls tools, and its last call is complete."""
        return self._reader is not None and self._reader.has_whole_calls

    @property
    def has_cut_call(self) -> bool:
        """Return whether the reply begins a tool call whose arguments are incomplete."""
        return self._reader is not None and self._reader.num_calls > 0 and not self._reader.has_whole_calls

    def push(self, delta: Delta) -> list[ReplyEvent]:
        """Return the events of a delta; none while its text may still become a tool call."""
        events = self._add_text("reasoning", delta.thought) if delta.thought else []
        if self._reader is None:
            events += self._add_text("text", delta.text) if delta.text else ()
        else:
            events += self._make_events(self._reader.push(delta.text))
        if delta.finish_reason is not None:
            events += self.flush()
        return events

    def flush(self) -> list[ReplyEvent]:
        """Return the events of text that was held back. `push` calls this after the last delta."""
        if self._is_flushed or self._reader is None:
            return []
        self._is_flushed = True
        return self._make_events(self._reader.finish())

    def open(self, kind: PartKind, call: CallStart | None = None) -> list[ReplyEvent]:
        """Begin a part, after ending the open one; return the events.

        An open part of the same kind continues, unless a call begins.
        """
        if self._open is not None and call is None and self._open.kind == kind:
            return []
        ended = self.end()
        self._open = ReplyPart(len(self.parts), kind, call)
        self.parts.append(self._open)
        return [*ended, PartBegin(self._open)]

    def end(self) -> list[ReplyEvent]:
        """End the open part, and return its event; none if no part is open."""
        if self._open is None:
            return []
        ended, self._open = PartEnd(self._open), None
        return [ended]

    def _add_text(self, kind: PartKind, text: str) -> list[ReplyEvent]:
        """Return the events that add text to the open part, or to a new one if that is of another kind."""
        if self._open is not None and self._open.kind == kind:  # as nearly always
            return [self._open.add(text)]
        return [*self.open(kind), self.parts[-1].add(text)]

    def _make_events(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        """Return the events of what the tool call parser found: text, beginnings of calls, arguments."""
        events: list[ReplyEvent] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._add_text("text", text)
                case CallStart():
                    events += self.open("call", piece)
                    self._call = self.parts[-1]
                case Arguments(_, text) if self._call is not None:
                    events.append(self._call.add(text))
        return events
