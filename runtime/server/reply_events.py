"""One reply as typed events, made once: each API encodes them in its own shapes, whole and streamed.

A reply is a list of parts, one after the other: runs of reasoning, runs of text, and tool calls. A part begins, gets
text, and ends before the next one begins. Knows the engine's deltas and the reader of calls, not the shapes of any API.
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
        index: its place among the parts of the reply.
        call: id and name of the tool call; None: it is none.
    """

    index: int
    kind: PartKind
    call: CallStart | None = None
    _pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far; of a call, its arguments as JSON."""
        return "".join(self._pieces)

    def add(self, text: str) -> PartText:
        """Go on by a text."""
        self._pieces.append(text)
        return PartText(self, text)


class PartBegin(NamedTuple):
    """A part begins."""

    part: ReplyPart


class PartText(NamedTuple):
    """A part goes on; of a call, its arguments do."""

    part: ReplyPart
    text: str


class PartEnd(NamedTuple):
    """A part is complete."""

    part: ReplyPart


ReplyEvent = PartBegin | PartText | PartEnd


class ReplyEvents:
    """Makes the events of one reply.

    Args:
        reader: finds the tool calls; None: there are none.

    Attributes:
        parts: all so far.
    """

    def __init__(self, reader: ToolCallReader | None = None) -> None:
        self.parts: list[ReplyPart] = []
        self._reader = reader
        self._call: ReplyPart | None = None  # the last one
        self._open: ReplyPart | None = None  # the last part, until it ends
        self._is_flushed = False

    @property
    def has_calls(self) -> bool:
        """Whether it calls tools, and its last call is complete."""
        return self._reader is not None and self._reader.has_whole_calls

    @property
    def has_cut_call(self) -> bool:
        """Whether a tool call began, and its arguments are not complete."""
        return self._reader is not None and self._reader.num_calls > 0 and not self._reader.has_whole_calls

    def push(self, delta: Delta) -> list[ReplyEvent]:
        """The events of what a step adds. They are none while text may still become a call."""
        events = self._add("reasoning", delta.thought) if delta.thought else []
        if self._reader is None:
            events += self._add("text", delta.text) if delta.text else ()
        else:
            events += self._encoded(self._reader.push(delta.text))
        if delta.finish_reason is not None:
            events += self.flush()
        return events

    def flush(self) -> list[ReplyEvent]:
        """What was held back, as no more text comes. `push` does this with the last delta."""
        if self._is_flushed or self._reader is None:
            return []
        self._is_flushed = True
        return self._encoded(self._reader.finish())

    def open(self, kind: PartKind, call: CallStart | None = None) -> list[ReplyEvent]:
        """Go on with the last part if it is open and of this kind, and no call; else end it and begin another."""
        if self._open is not None and call is None and self._open.kind == kind:
            return []
        ended = self.end()
        self._open = ReplyPart(len(self.parts), kind, call)
        self.parts.append(self._open)
        return [*ended, PartBegin(self._open)]

    def end(self) -> list[ReplyEvent]:
        """End the last part, if it is open."""
        if self._open is None:
            return []
        ended, self._open = PartEnd(self._open), None
        return [ended]

    def _add(self, kind: PartKind, text: str) -> list[ReplyEvent]:
        if self._open is not None and self._open.kind == kind:  # as nearly always
            return [self._open.add(text)]
        return [*self.open(kind), self.parts[-1].add(text)]

    def _encoded(self, pieces: Sequence[Piece]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._add("text", text)
                case CallStart():
                    events += self.open("call", piece)
                    self._call = self.parts[-1]
                case Arguments(_, text) if self._call is not None:
                    events.append(self._call.add(text))
        return events
