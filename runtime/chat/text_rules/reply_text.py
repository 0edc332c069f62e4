"""The text of one reply as its tokens come: decoded, without its thought, and up to what ends it.

Knows what is held back, and why; it can go back to where it was. Not which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..thought_splitter import Said, ThoughtSplitter
from .stops import Stops
from .string_scan import Found, StringScan


class TextDecoder(Protocol):
    """Ids in, text out; `tokenizer_fix.StreamDecoder` is the real one. Its attributes are values that never change."""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return the text that was still open."""
        ...


class _State(NamedTuple):
    decoder: dict[str, Any]
    splitter: dict[str, Any]
    stops: object
    ban: Any
    num_answer: int
    num_undecided: int
    num_thought_tokens: int


class ReplyText:
    """What of a reply's text is released, token by token.

    Args:
        splitter: takes out what the reply thinks; fresh. None: all of it is the answer.
        stops: end the answer.
        banned: strings that the released answer must not have, letters in either case.

    Attributes:
        num_thought_tokens: tokens of the thought, with its tags.
        found_banned: the first of the banned strings that the last piece completed; then go back.
    """

    def __init__(
        self, decoder: TextDecoder, splitter: ThoughtSplitter | None, stops: Stops, banned: Sequence[str] = ()
    ) -> None:
        self._decoder, self._splitter, self._stops = decoder, splitter, stops
        self._ban = StringScan(banned, ignores_case=True) if banned else None
        self._num_answer = 0  # characters that the decoder and the splitter gave so far
        self._num_undecided = 0  # tokens that may begin a thought
        self.num_thought_tokens = 0
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
        """What decoder, thoughts and stops still held back; it may complete a stop."""
        said = self._released(self._finish(), may_stop=may_stop)
        rest = self._stops.finish()
        self._look(rest)
        return Said(said.thought, said.answer + rest)

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

    def state(self) -> _State:
        """What `restore` needs to go on from here."""
        return _State(
            dict(vars(self._decoder)),
            {} if self._splitter is None else dict(vars(self._splitter)),
            self._stops.state(),
            None if self._ban is None else self._ban.state(),
            self._num_answer,
            self._num_undecided,
            self.num_thought_tokens,
        )

    def restore(self, state: _State) -> None:
        """Go on from where `state` was asked for."""
        vars(self._decoder).update(state.decoder)
        if self._splitter is not None:
            vars(self._splitter).update(state.splitter)
        self._stops.restore(state.stops)
        if self._ban is not None:
            self._ban.restore(state.ban)
        self._num_answer, self._num_undecided = state.num_answer, state.num_undecided
        self.num_thought_tokens = state.num_thought_tokens
        self.found_banned = None

    def _finish(self) -> Said:
        rest = self._decoder.finish()
        if self._splitter is None:
            return Said(answer=rest)
        return self._splitter.push(rest).followed_by(self._splitter.finish())

    def _split(self, text: str) -> Said:
        """The thought and the answer in the newest token's text; counts the token."""
        splitter = self._splitter
        if splitter is None:
            return Said(answer=text)
        was_thinking = splitter.is_thinking
        said = splitter.push(text)
        if was_thinking or splitter.is_thinking:
            self.num_thought_tokens += self._num_undecided + 1
            self._num_undecided = 0
        else:
            self._num_undecided = 0 if splitter.is_answering else self._num_undecided + 1
        return said

    def _released(self, said: Said, *, may_stop: bool) -> Said:
        self._num_answer += len(said.answer)
        answer = self._stops.push(said.answer, may_stop=may_stop)
        self._look(answer)
        return Said(said.thought, answer)

    def _look(self, answer: str) -> None:
        """Look for a banned string in what is to be released."""
        if self._ban is not None and self.found_banned is None:
            self.found_banned = self._ban.push(answer)
