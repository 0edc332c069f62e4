"""The text of one reply as its tokens come: decoded, without its reasoning, and up to what ends it.

Knows what is held back, and why; it can go back to where it was. Not which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..reasoning_splitter import ReasoningSplitter
from ..scan import Rewindable, RewindableScan, Said
from .text_search import Found, PatternScan, StringScan

TextDecoder = RewindableScan[int, str]
"""Ids in, text out; `tokenizer_fix.StreamDecoder` is the real one."""


class ReplyText:
    """What of a reply's text is released, token by token.

    Args:
        splitter: takes out what the reply thinks; fresh. None: all of it is the answer.
        stops: end the answer.
        banned: strings that the released answer must not have, letters in either case.

    Attributes:
        num_reasoning_tokens: tokens of the reasoning, with its tags.
        found_banned: the first of the banned strings that the last piece completed; then go back.
    """

    def __init__(
        self, decoder: TextDecoder, splitter: ReasoningSplitter | None, stops: Stops, banned: Sequence[str] = ()
    ) -> None:
        self._decoder, self._splitter, self._stops = decoder, splitter, stops
        self._ban = StringScan(banned, ignores_case=True) if banned else None
        self._scans: list[Rewindable] = [each for each in (decoder, splitter, stops, self._ban) if each is not None]
        self._num_answer = 0  # characters that the decoder and the splitter gave so far
        self._num_undecided = 0  # tokens that may begin reasoning
        self.num_reasoning_tokens = 0
        self.found_banned: Found | None = None

    @property
    def has_banned(self) -> bool:
        """Whether there are strings that it must not have."""
        return self._ban is not None

    @property
    def stop(self) -> str | None:
        """The stop string or expression that ended it; None: none did."""
        return self._stops.matched

    def push(self, token_id: int | None, *, may_stop: bool) -> Said:
        """What a token releases; None: it has no text."""
        said = Said() if token_id is None else self._split(self._decoder.push(token_id))
        return self._released(said, may_stop=may_stop)

    def finish(self, *, may_stop: bool) -> Said:
        """What decoder, reasoning and stops still held back; it may complete a stop."""
        said = self._released(self._finish(), may_stop=may_stop)
        rest = self._stops.finish()
        self._look(rest)
        return Said(said.reasoning, said.answer + rest)

    # What goes back: places are characters of the answer.

    @property
    def open_from(self) -> int:
        """The place from which on the answer may still become a banned string."""
        assert self._ban is not None
        return self._ban.open_from

    def reach(self) -> int:
        """The place that the answer would end at if it ended now; an unfinished character counts as one."""
        before = self.state()
        rest = self._decoder.finish()[:1]
        said = Said(answer=rest)
        if self._splitter is not None:
            said = self._splitter.push(rest).followed_by(self._splitter.finish())
        self.restore(before)
        return self._num_answer + len(said.answer)

    def state(self) -> Any:
        """What `restore` needs to go on from here."""
        return [scan.state() for scan in self._scans], self._num_answer, self._num_undecided, self.num_reasoning_tokens

    def restore(self, state: Any) -> None:
        """Go on from where `state` was asked for."""
        states, self._num_answer, self._num_undecided, self.num_reasoning_tokens = state
        for scan, each in zip(self._scans, states, strict=True):
            scan.restore(each)
        self.found_banned = None

    def _finish(self) -> Said:
        rest = self._decoder.finish()
        if self._splitter is None:
            return Said(answer=rest)
        return self._splitter.push(rest).followed_by(self._splitter.finish())

    def _split(self, text: str) -> Said:
        """The reasoning and the answer in the newest token's text; counts the token."""
        splitter = self._splitter
        if splitter is None:
            return Said(answer=text)
        was_thinking = splitter.is_thinking
        said = splitter.push(text)
        if was_thinking or splitter.is_thinking:
            self.num_reasoning_tokens += self._num_undecided + 1
            self._num_undecided = 0
        else:
            self._num_undecided = 0 if splitter.is_answering else self._num_undecided + 1
        return said

    def _released(self, said: Said, *, may_stop: bool) -> Said:
        self._num_answer += len(said.answer)
        answer = self._stops.push(said.answer, may_stop=may_stop)
        self._look(answer)
        return Said(said.reasoning, answer)

    def _look(self, answer: str) -> None:
        """Look for a banned string in what is to be released."""
        if self._ban is not None and self.found_banned is None:
            self.found_banned = self._ban.push(answer)


class Search(Rewindable, Protocol):
    """Reads a text, as a `Scan` does, until one of its rules is complete; what it has then is where."""

    @property
    def open_from(self) -> int: ...

    def push(self, text: str, *, may_stop: bool = True) -> Found | None: ...


class Stops:
    """Passes text through until a stop string or expression is complete; neither it nor what follows is ever released.

    The one that is completed first wins, and of those completed by the same character the longest; so how the text was
    cut into pieces does not matter.

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
        """The stop string or expression that was found, as it was asked for; None: none was."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece and return what can be released.

        What a piece completes where it may not stop is text; a later piece may complete what begins in this.
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
            released, self._held = self._released(first.start), ""
            return released
        return self._released(min(scan.open_from for scan in self._scans))

    def finish(self) -> str:
        """Return what is still held back: no more text comes, so it is no stop."""
        return self._released(self._num_released + len(self._held))

    def state(self) -> Any:
        """What `restore` needs to go on from here."""
        return [scan.state() for scan in self._scans], self._held, self._num_released, self._matched

    def restore(self, state: Any) -> None:
        """Go on from where `state` was asked for."""
        states, self._held, self._num_released, self._matched = state
        for scan, each in zip(self._scans, states, strict=True):
            scan.restore(each)

    def _released(self, stop: int) -> str:
        """The text up to a place that nothing is held back before any more."""
        released = self._held[: stop - self._num_released]
        self._held = self._held[len(released) :]
        self._num_released += len(released)
        return released
