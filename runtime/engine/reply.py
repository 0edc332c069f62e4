"""What a request has generated so far: tokens, their text, and what ends them.

Knows one reply: stop rules, a constraint, the sampler's state. Not the prompt's keys and values, other requests or
threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..chat.thought_splitter import Said, ThoughtSplitter
from ..chat.token_constraint import Foresight, HeldOpen, TokenConstraint
from .completion import Delta, FinishReason, StopReason, TokenLogprob
from .sampling_params import SamplingParams
from .step.sampler import SampledToken, SamplerState


class TextDecoder(Protocol):
    """Ids in, text out; `tokenizer_fix.StreamDecoder` is the real one."""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return the text that was still open."""
        ...


class Reply:
    """A reply token by token, until it has a `finish_reason`.

    Attributes:
        token_ids: all tokens so far, the stop token included.
        num_thought_tokens: how many of them are a thought's, with its tags.
        logprobs: one for each token, if the request asks for them; else empty.
        sampler: the state that `sample` draws with.
        finish_reason: why the reply ended; None: it goes on.
        first_token_at, last_token_at: seconds on the engine's clock; None: there is no token yet.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        *,
        decoder: TextDecoder,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        constraint: TokenConstraint | None = None,
        thoughts: ThoughtSplitter | None = None,
    ) -> None:
        """A reply without tokens.

        Args:
            prompt_ids: what repetition penalties count beside the reply.
            decoder: fresh, and told of the prompt.
            eos_token_ids: the model's own, which end the reply unless `params.ignore_eos`.
            constraint: what the reply must keep to, at its beginning and this reply's own.
            thoughts: takes out what the reply thinks; fresh. None: all of it is the answer.
        """
        self._params, self._vocab_size = params, vocab_size
        self._own_end_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = params.end_ids(eos_token_ids)
        if params.min_tokens:
            constraint = HeldOpen(params.min_tokens, self._stop_ids, vocab_size, constraint)
        self._constraint = constraint
        self._decoder = decoder
        self._stops = StopStrings(params.stop)
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._splitter = thoughts
        self._num_undecided = 0  # tokens that may begin a thought
        self.num_thought_tokens = 0
        self.sampler = SamplerState(params, prompt_ids, vocab_size, constraint)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def text(self) -> str:
        """The text that was released so far, without thoughts."""
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """The thought that was released so far."""
        return "".join(self._thoughts)

    @property
    def foresight(self) -> Foresight | None:
        """What its constraint can say of the tokens behind the next one."""
        return self._constraint if isinstance(self._constraint, Foresight) else None

    @property
    def ids_without_end(self) -> list[int]:
        """The tokens but for a stop token at the end."""
        ids = self.token_ids
        return ids[:-1] if ids and ids[-1] in self._stop_ids else ids

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the text within its tokens."""
        return self._stops.matched is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop string or stop token of the request's own that ended the reply."""
        if self.finish_reason != "stop":
            return None
        if self.is_cut:
            return self._stops.matched
        last = self.token_ids[-1]
        return last if last in self._stop_ids - self._own_end_ids else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, over the time after the first; None: there are too few."""
        first, last = self.first_token_at, self.last_token_at
        if first is None or last is None or last <= first:
            return None
        return (len(self.token_ids) - 1) / (last - first)

    def follow(self, prompt_ids: Iterable[int]) -> None:
        """Count penalties from other ids of the prompt, before the first token."""
        assert not self.token_ids
        self.sampler = SamplerState(self._params, prompt_ids, self._vocab_size, self._constraint)

    def accept(self, sampled: SampledToken, now: float, *, is_full: bool) -> Delta:
        """Add a token, and end the reply if the token or its text says so, its constraint is complete, or it `is_full`.

        Raises:
            ConstraintFailed: the token may not come here.
        """
        assert self.finish_reason is None
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self.sampler.record(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        said, reason = self._advance(token_id, is_full=is_full)
        if sampled.logprob is None:
            return self._delta(said, (token_id,), None, reason)
        self.logprobs.append(sampled.logprob)
        return self._delta(said, (token_id,), (sampled.logprob,), reason)

    def cancel(self) -> Delta:
        """End the reply where it is."""
        assert self.finish_reason is None
        return self._delta(self._flush(), (), None, "cancelled")

    def end_unsaid(self) -> Delta:
        """End a reply of which no token was wanted."""
        assert self.finish_reason is None and not self.token_ids
        return self._delta(Said(), (), None, "length")

    def _advance(self, token_id: int, *, is_full: bool) -> tuple[Said, FinishReason | None]:
        """The text that the token releases, and whether it ends the reply."""
        is_end = token_id in self._stop_ids
        said = Said() if is_end else self._push(self._split(self._decoder.push(token_id)))
        is_end = is_end or self.is_cut or (self._constraint is not None and self._constraint.is_finished)
        if is_end or is_full:
            said = said.followed_by(self._flush())  # which may complete a stop string
        if is_end or self.is_cut:
            return said, "stop"
        return said, "length" if is_full else None

    def _flush(self) -> Said:
        """What decoder, thoughts and stop strings still held back."""
        rest = self._decoder.finish()
        said = Said(answer=rest) if self._splitter is None else self._splitter.push(rest)
        if self._splitter is not None:
            said = said.followed_by(self._splitter.finish())
        said = self._push(said)
        return Said(said.thought, said.answer + self._stops.finish())

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

    def _push(self, said: Said) -> Said:
        """What of the newest token's text can be sent."""
        may_stop = len(self.token_ids) > self._params.min_tokens
        return Said(said.thought, self._stops.push(said.answer, may_stop=may_stop))

    def _delta(
        self,
        said: Said,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
    ) -> Delta:
        self._texts.append(said.answer)
        if said.thought:
            self._thoughts.append(said.thought)
        self.finish_reason = reason
        return Delta(
            said.answer,
            token_ids,
            logprobs,
            reason,
            None if reason is None else self.stop_reason,
            thought=said.thought,
            num_thought_tokens=self.num_thought_tokens,
        )


class StopStrings:
    """Passes text through until a stop string is complete; neither it nor what follows is ever released.

    The stop string that is completed first wins, and of those completed by the same character the longest; so
    how the text was cut into pieces does not matter.

    >>> stops = StopStrings(["\\nUser:"])
    >>> stops.push("Hello.\\nUs"), stops.push("er"), stops.push(": hi")
    ('Hello.', '', '')
    >>> stops.matched
    '\\nUser:'
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None: none was."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece and return what can be released.

        A stop string that a piece completes where it may not stop is text; a later piece may complete one that begins
        in this.
        """
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        num_held, text = len(self._held), self._held + text
        if may_stop and (found := self._first(text, num_held)) is not None:
            start, end = found
            self._matched, self._held = text[start:end], ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what is still held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_held: int) -> tuple[int, int] | None:
        """Where the stop string is that is complete first beyond the first `num_held` characters."""
        begins = ((stop, text.find(stop, max(0, num_held - len(stop) + 1))) for stop in self._stops)
        found = [(start + len(stop), start) for stop, start in begins if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
