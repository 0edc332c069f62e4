"""Split a reply into its reasoning and its answer while it is generated.

Knows how a format writes reasoning, not tokens. Pieces can cut a tag anywhere: a possible tag is held back until it is
certain. However a reply is cut into pieces, the joined pieces of its reasoning are the same, and so are those of its
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from .reasoning_format import ReasoningFormat
from .scan import ReplyPiece, RewindableScan, overlap

_RECIPIENT = " to="  # begins the first header if a reply is one call
MAX_HEADER = 256  # characters; anything longer is no header


class ReasoningSplitter(RewindableScan[str, ReplyPiece], Protocol):
    """Splits the text of one reply. At its end, an incomplete tag is text."""

    @property
    def is_thinking(self) -> bool:
        """Return whether the next text belongs to reasoning, as far as is known."""
        ...

    @property
    def is_answering(self) -> bool:
        """Return whether the next text belongs to the answer, for certain."""
        ...

    @property
    def may_think(self) -> bool:
        """Return whether reasoning continues, or a header, which can begin it."""
        ...


HeadIn = Callable[[str], str | None]


def no_head(header: str) -> str | None:
    """Return None: headers of parts are not shown."""
    return None


def splitter_of(format: ReasoningFormat, prompt: str, head_in: HeadIn = no_head) -> ReasoningSplitter:
    """Return a splitter of a reply into reasoning and answer; the prompt may have opened the reasoning already.

    Args:
        head_in: returns the text that replaces a part's header in the answer; None: nothing does.

    >>> splitter = splitter_of(ReasoningFormat("<think>\\n", "\\n</think>\\n\\n"), "<|assistant|>")
    >>> [tuple(splitter.push(text)) for text in ("<th", "ink>\\nHm", ".\\n</think>\\n", "\\nYes.")]
    [('', ''), ('Hm', ''), ('.', ''), ('', 'Yes.')]
    """
    if format.header_end is not None:
        return _HeadedParts(format, format.header_end, head_in)
    return _TaggedReasoning(format, prompt)


class _TaggedReasoning:
    """A reply that may begin with one run of reasoning; a later tag is text."""

    def __init__(self, format: ReasoningFormat, prompt: str) -> None:
        self._begin, self._end = _Tag.of(format.begin), _Tag.of(format.end)
        self._bare, self._is_loose = format.bare, format.is_loose
        self._held = ""
        self.is_thinking = format.is_opened_by(prompt)
        is_whole = prompt.endswith(format.begin) and not format.is_loose
        self._lead = "" if is_whole else self._begin.after  # white space after a tag in the prompt
        self._read: _Read = _TaggedReasoning._skip_repeated_tag if self.is_thinking else _TaggedReasoning._read_begin

    @property
    def is_answering(self) -> bool:
        return self._read is _TaggedReasoning._read_answer

    @property
    def may_think(self) -> bool:
        return self.is_thinking

    def push(self, text: str) -> ReplyPiece:
        """Add text of the reply; return the reasoning and the answer that are certain now."""
        self._held += text
        reasoning = answer = ""
        while (said := self._read(self)) is not None:
            reasoning += said.reasoning
            answer += said.answer
        return ReplyPiece(reasoning, answer)

    def finish(self) -> ReplyPiece:
        """Return the held text, because the reply has ended; a tag that was not completed counts as text."""
        held, self._held = self._held, ""
        read, own = self._read, _TaggedReasoning
        if read is own._read_reasoning or (read is own._skip_repeated_tag and held.strip()):
            return ReplyPiece(reasoning=held)
        return ReplyPiece(answer=held) if read is own._read_begin or read is own._read_answer else ReplyPiece()

    def state(self) -> tuple[str, bool, _Read]:
        return self._held, self.is_thinking, self._read

    def restore(self, state: tuple[str, bool, _Read]) -> None:
        self._held, self.is_thinking, self._read = state

    # Each reads as much of the held text as it can, and returns None if it needs more.

    def _read_begin(self) -> ReplyPiece | None:
        """Read the tag that begins reasoning, or find that the reply is an answer."""
        rest = self._held.lstrip()
        if rest.startswith(self._begin.core):
            self._held = rest.removeprefix(self._begin.core)
            self.is_thinking, self._read = True, _TaggedReasoning._read_lead
        elif self._bare and self._held.startswith(self._bare):
            self._held, self._read = self._held.removeprefix(self._bare), _TaggedReasoning._read_answer
        elif self._begin.core.startswith(rest) or (self._bare and self._bare.startswith(self._held)):
            return None
        else:
            self._read = _TaggedReasoning._read_answer
        return ReplyPiece()

    def _skip_repeated_tag(self) -> ReplyPiece | None:
        """Drop the opening tag if the reply repeats the prompt's; return None if more text is needed to tell.

        Otherwise the piece is empty.
        """
        rest = self._held.lstrip()
        if rest.startswith(self._begin.core):
            self._held, self._read = rest.removeprefix(self._begin.core), _TaggedReasoning._read_lead
        elif self._begin.core.startswith(rest):
            return None
        else:
            has_lead = bool(self._lead) or self._is_loose
            self._read = _TaggedReasoning._read_lead if has_lead else _TaggedReasoning._read_reasoning
        return ReplyPiece()

    def _read_lead(self) -> ReplyPiece | None:
        return self._drop_white(self._begin.after, _TaggedReasoning._read_reasoning)

    def _read_reasoning(self) -> ReplyPiece | None:
        """Read reasoning up to the tag that ends it, as far as the held text cannot be a part of that."""
        before, at = self._end.before, self._held.find(self._end.core)
        if at >= 0:
            reasoning, self._held = self._held[:at], self._held[at + len(self._end.core) :]
            self.is_thinking, self._read = False, _TaggedReasoning._read_gap
            return ReplyPiece(reasoning.rstrip() if self._is_loose else reasoning.removesuffix(before))
        num_held = overlap(self._held, self._end.core)
        safe = self._held[: len(self._held) - num_held]
        if self._is_loose:
            safe = safe.rstrip()
        elif num_held:
            safe = safe.removesuffix(before)
        else:
            safe = safe[: len(safe) - overlap(safe, before)]
        self._held = self._held[len(safe) :]
        return ReplyPiece(safe) if safe else None

    def _read_gap(self) -> ReplyPiece | None:
        return self._drop_white(self._end.after, _TaggedReasoning._read_answer)

    def _read_answer(self) -> ReplyPiece | None:
        answer, self._held = self._held, ""
        return ReplyPiece(answer=answer) if answer else None

    def _drop_white(self, white: str, then: _Read) -> ReplyPiece | None:
        """Drop the white space after a tag, as far as it belongs to the format."""
        rest = self._held.lstrip() if self._is_loose else self._held[_num_common(self._held, white) :]
        if not rest and (self._is_loose or len(self._held) < len(white)):
            return None
        self._held, self._read = rest, then
        return ReplyPiece()


_Read = Callable[[_TaggedReasoning], ReplyPiece | None]


class _HeadedParts:
    """A reply in parts with headers: `header header_end text`, and `end_tag` between two parts, as in gpt-oss.

    The parts that begin like the format's reasoning are reasoning, and all others are the answer.
    """

    def __init__(self, format: ReasoningFormat, header_end: str, head_in: HeadIn) -> None:
        self._header_end, self._head_in = header_end, head_in
        self._end_tag = format.end_tag
        self._reasoning_header = format.begin.removesuffix(header_end)
        self._first_headers = (format.begin, format.bare)
        self._held = ""
        self._is_first, self._is_in_header, self._is_bare = True, True, False
        self.is_thinking = False

    @property
    def is_answering(self) -> bool:
        return not self._is_in_header and not self.is_thinking

    @property
    def may_think(self) -> bool:
        return not self.is_answering

    def push(self, text: str) -> ReplyPiece:
        """Add text of the reply; return the reasoning and the answer that are certain now."""
        self._held += text
        reasoning = answer = ""
        while (piece := self._read()) is not None:
            if self.is_thinking:
                reasoning += piece
            else:
                answer += piece
        return ReplyPiece(reasoning, answer)

    def finish(self) -> ReplyPiece:
        """Return the held text, because the reply has ended; an unfinished header of a later part is dropped."""
        held, self._held = self._held, ""
        if self._is_in_header:
            return ReplyPiece(answer=held) if self._is_first or self._head_in(held) is not None else ReplyPiece()
        return ReplyPiece(reasoning=held) if self.is_thinking else ReplyPiece(answer=held)

    def state(self) -> tuple[str, bool, bool, bool, bool]:
        return self._held, self._is_first, self._is_in_header, self._is_bare, self.is_thinking

    def restore(self, state: tuple[str, bool, bool, bool, bool]) -> None:
        self._held, self._is_first, self._is_in_header, self._is_bare, self.is_thinking = state

    def _read(self) -> str | None:
        """Return the next text of the current part; None if more is needed."""
        return self._read_header() if self._is_in_header else self._next_text()

    def _read_header(self) -> str | None:
        """Read a part's header, which says whether the part is reasoning.

        Returns the text that replaces the header in the answer, often none; None if more text is needed.
        """
        header, found, rest = self._held.partition(self._header_end)
        if found and len(header) <= MAX_HEADER and (not self._is_first or self._may_be_header()):
            head = self._head_in(header)
            self.is_thinking = head is None and header.endswith(self._reasoning_header)
            self._held, self._is_first, self._is_in_header = rest, False, False
            return head or ""
        elif not found and len(self._held) <= MAX_HEADER and (not self._is_first or self._may_be_header()):
            return None
        else:  # a reply without headers
            self._is_bare, self.is_thinking = self._is_first, False
        self._is_first = self._is_in_header = False
        return ""

    def _may_be_header(self) -> bool:
        """Return whether the held text begins like one of the format's headers, up to their first difference."""
        if self._head_in is not no_head and self._held[: len(_RECIPIENT)] == _RECIPIENT[: len(self._held)]:
            return True
        common = _num_common(*self._first_headers) or 1
        return any(_num_common(self._held, header) >= min(len(self._held), common) for header in self._first_headers)

    def _next_text(self) -> str | None:
        """Return the next piece of the part's text, empty where its end tag is dropped; None if more text is needed."""
        at = -1 if self._is_bare else self._held.find(self._end_tag)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(self._end_tag) :]
            if text:
                self._held = self._end_tag + self._held  # the text first, because it belongs to this part
                return text
            self._is_in_header = True
            return ""
        num_held = 0 if self._is_bare else overlap(self._held, self._end_tag)
        text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
        return text or None


class _Tag(NamedTuple):
    """A tag, and the white space around it."""

    before: str
    core: str
    after: str

    @classmethod
    def of(cls, text: str) -> _Tag:
        """Split a tag into the white space before it, its text, and the white space after it."""
        core = text.strip()
        before, _, after = text.partition(core)
        return cls(before, core, after)


def _num_common(text: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    return next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
