"""The text of one reply as its tokens come: decoded, without its reasoning, and up to what ends it.

Knows what is held back, and why; it can be rewound. Does not know which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..reasoning_splitter import ReasoningSplitter
from ..scan import ReplyPiece, Rewindable, RewindableScan
from .text_search import Found, PatternScan, StringScan

TextDecoder = RewindableScan[int, str]
"""A decoder from ids to text, such as `tokenizer_fix.StreamDecoder`."""


class ReplyText:
    """Releases a reply's text, token by token.

    Args:
        splitter: a fresh splitter that separates reasoning. None: all of the reply is the answer.
        stops: the rules that end the answer.
        banned: strings that the released answer must not contain, in either case.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning, tags included.
        found_banned: the first of the banned strings that the last piece completed; the caller then rewinds.
    """

    def __init__(
        self, decoder: TextDecoder, splitter: ReasoningSplitter | None, stops: Stops, banned: Sequence[str] = ()
    ) -> None:
        self._decoder, self._splitter, self._stops = decoder, splitter, stops
        self._ban = StringScan(banned, ignores_case=True) if banned else None
        self._scans: list[Rewindable] = [each for each in (decoder, splitter, stops, self._ban) if each is not None]
        self._num_answer = 0  # characters from decoder and splitter so far
        self._num_undecided = 0  # tokens that may begin reasoning
        self.num_reasoning_tokens = 0
        self.found_banned: Found | None = None

    @property
    def has_banned(self) -> bool:
        """Return whether there are banned strings."""
        return self._ban is not None

    @property
    def stop(self) -> str | None:
        """The stop string or expression that ended it; None if none did."""
        return self._stops.matched

    def push(self, token_id: int | None, *, may_stop: bool) -> ReplyPiece:
        """Return the text that a token releases; None is a token without text."""
        said = ReplyPiece() if token_id is None else self._split(self._decoder.push(token_id))
        return self._pass_stops(said, may_stop=may_stop)

    def finish(self, *, may_stop: bool) -> ReplyPiece:
        """Return the text that decoder, splitter and stops still hold back; it can complete a stop."""
        said = self._pass_stops(self._flush(), may_stop=may_stop)
        rest = self._stops.finish()
        self._search_banned(rest)
        return ReplyPiece(said.reasoning, said.answer + rest)

    # Rewinding: positions are characters of the answer.

    @property
    def open_from(self) -> int:
        """The position from which the answer may still become a banned string."""
        assert self._ban is not None
        return self._ban.open_from

    def reach(self) -> int:
        """Return the length of the answer if it ended now; an unfinished character counts as one."""
        before = self.state()
        rest = self._decoder.finish()[:1]
        said = ReplyPiece(answer=rest)
        if self._splitter is not None:
            said = self._splitter.push(rest).followed_by(self._splitter.finish())
        self.restore(before)
        return self._num_answer + len(said.answer)

    def state(self) -> Any:
        """Return the value that `restore` needs to continue from here."""
        return [scan.state() for scan in self._scans], self._num_answer, self._num_undecided, self.num_reasoning_tokens

    def restore(self, state: Any) -> None:
        """Rewind to an earlier `state`."""
        states, self._num_answer, self._num_undecided, self.num_reasoning_tokens = state
        for scan, each in zip(self._scans, states, strict=True):
            scan.restore(each)
        self.found_banned = None

    def _flush(self) -> ReplyPiece:
        """Return the reasoning and the answer that decoder and splitter still hold back."""
        rest = self._decoder.finish()
        if self._splitter is None:
            return ReplyPiece(answer=rest)
        return self._splitter.push(rest).followed_by(self._splitter.finish())

    def _split(self, text: str) -> ReplyPiece:
        """Return the newest token's text, split into reasoning and answer; count a token of the reasoning."""
        splitter = self._splitter
        if splitter is None:
            return ReplyPiece(answer=text)
        was_thinking = splitter.is_thinking
        said = splitter.push(text)
        if was_thinking or splitter.is_thinking:
            self.num_reasoning_tokens += self._num_undecided + 1
            self._num_undecided = 0
        else:
            self._num_undecided = 0 if splitter.is_answering else self._num_undecided + 1
        return said

    def _pass_stops(self, said: ReplyPiece, *, may_stop: bool) -> ReplyPiece:
        """Return a piece with only the part of its answer that the stops release; search it for banned strings."""
        self._num_answer += len(said.answer)
        answer = self._stops.push(said.answer, may_stop=may_stop)
        self._search_banned(answer)
        return ReplyPiece(said.reasoning, answer)

    def _search_banned(self, answer: str) -> None:
        """Search for a banned string in text to be released."""
        if self._ban is not None and self.found_banned is None:
            self.found_banned = self._ban.push(answer)


class Search(Rewindable, Protocol):
    """Reads a text like a `Scan`, until one of its rules is matched; then returns the position."""

    @property
    def open_from(self) -> int:
        """The start of the text that may still become a match; the end of the text if there is none."""
        ...

    def push(self, text: str, *, may_stop: bool = True) -> Found | None:
        """Read the next piece of text; return the first match that it completes, None if it completes none."""
        ...


class Stops:
    """Passes text through until a stop string or expression is complete; neither it nor later text is ever released.

    The one that completes first wins, and of those completed by the same character the longest; so the result does not
    depend on how the text was cut into pieces.

    >>> stops = Stops(["\\nUser:"])
    >>> stops.push("Hello.\\nUs"), stops.push("er"), stops.push(": hi")
    ('Hello.', '', '')
    >>> stops.matched
    '\\nUser:'
    """

    def __init__(self, strings: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._scans: list[Search] = []
        if strings:
            self._scans.append(StringScan(strings))
        if patterns:
            self._scans.append(PatternScan(patterns))
        self._held, self._num_released = "", 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string or expression that was found, as requested; None if none was."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece and return the text that can be released.

        A match that completes while stops are off is text; a later piece can complete one that begins in this piece.
        """
        if self._matched is not None:
            return ""
        if not self._scans:
            return text
        self._held += text
        found = [each for scan in self._scans if (each := scan.push(text, may_stop=may_stop)) is not None]
        if found:
            first = min(found)
            self._matched = first.rule
            released, self._held = self._release(first.start), ""
            return released
        return self._release(min(scan.open_from for scan in self._scans))

    def finish(self) -> str:
        """Return the text that is still held back: no more text comes, so it is no stop."""
        return self._release(self._num_released + len(self._held))

    def state(self) -> Any:
        """Return the value that `restore` needs to continue from here."""
        return [scan.state() for scan in self._scans], self._held, self._num_released, self._matched

    def restore(self, state: Any) -> None:
        """Rewind to an earlier `state`."""
        states, self._held, self._num_released, self._matched = state
        for scan, each in zip(self._scans, states, strict=True):
            scan.restore(each)

    def _release(self, stop: int) -> str:
        """Return the held text up to the position `stop`, and hold it no longer."""
        released = self._held[: stop - self._num_released]
        self._held = self._held[len(released) :]
        self._num_released += len(released)
        return released
