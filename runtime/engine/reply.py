"""What a request has generated so far: tokens, their text, and what ends them.

Knows one reply: stop rules, a constraint, the sampler's state. Not the prompt's keys and values, other requests or
threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..chat.reasoning_splitter import ReasoningSplitter
from ..chat.scan import Said
from ..chat.text_rules.reply_text import ReplyText, Stops, TextDecoder
from ..chat.text_rules.text_search import Found
from ..chat.token_constraint import Foresight, MinTokens, TokenConstraint, restore, state_of
from ..errors import ConstraintFailed
from .completion import Delta, FinishReason, StopReason, TokenLogprob
from .sampling_params import SamplingParams
from .step.dry import IntArray
from .step.sampler import SampledToken
from .step.sampler_state import NO_IDS, SamplerState

_NOTHING = Said()
MAX_BANS = 64  # tokens at one place that are tried one by one; then those that hold a banned string go at once
MAX_TAKEN_BACK = 1 << 14  # tokens of one reply; then it fails


class _Open(NamedTuple):
    """A token that may still be taken back, and what it released; nothing of it is told until it is certain."""

    before: tuple[Any, Any]  # where text and constraint were
    open_from: int  # the place in the answer from which on it might become a banned string, before this token
    reach: int  # the place that it leads to
    sampled: SampledToken
    is_guessed: bool
    said: Said


@dataclass
class _Bans:
    """The tokens that must not come in one place, and to which banned strings those led that were tried."""

    ids: IntArray
    tried: Counter[str] = field(default_factory=Counter)


class Reply:
    """A reply token by token, until it has a `finish_reason`.

    Attributes:
        token_ids: all tokens so far, the stop token included.
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
        thoughts: ReasoningSplitter | None = None,
        holding: Callable[[str], IntArray] = lambda string: NO_IDS,
        breaker_ids: IntArray = NO_IDS,
    ) -> None:
        """A reply without tokens.

        Args:
            prompt_ids: what repetition penalties count beside the reply.
            decoder: fresh, and told of the prompt.
            eos_token_ids: the model's own, which end the reply unless `params.ignore_eos`.
            constraint: what the reply must keep to, at its beginning and this reply's own.
            thoughts: takes out what the reply thinks; fresh. None: all of it is the answer.
            holding: the tokens that hold a string by themselves; asked where too many were tried one by one.
            breaker_ids: tokens over which no repetition goes that DRY penalizes.
        """
        self._params, self._vocab_size = params, vocab_size
        self._own_end_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = params.end_ids(eos_token_ids)
        if params.min_tokens:
            constraint = MinTokens(params.min_tokens, self._stop_ids, vocab_size, constraint)
        self._constraint = constraint
        self._text = ReplyText(decoder, thoughts, Stops(params.stop, params.stop_regex), params.banned_strings)
        if self._text.has_banned:
            state_of(constraint)
        self._open: list[_Open] = []
        self._bans: dict[int, _Bans] = {}  # by place
        self._holding = holding
        self._holders = NO_IDS  # of banned strings that too many tokens led to
        self._num_taken_back = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._guessed = bytearray()
        self._breaker_ids = breaker_ids
        self.sampler = SamplerState(params, prompt_ids, vocab_size, constraint, breaker_ids)
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
        """Whether a stop string or expression ended the text within its tokens."""
        return self._text.stop is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop string, stop expression or stop token of the request's own that ended the reply."""
        if self.finish_reason != "stop":
            return None
        if self.is_cut:
            return self._text.stop
        last = self.token_ids[-1]
        return last if last in self._stop_ids - self._own_end_ids else None

    @property
    def num_thought_tokens(self) -> int:
        """How many tokens are a thought's, with its tags."""
        return self._text.num_reasoning_tokens

    @property
    def num_guessed(self) -> int:
        """How many tokens were guessed."""
        return sum(self._guessed)

    @property
    def num_told(self) -> int:
        """How many tokens its deltas had so far."""
        return len(self.token_ids) - len(self._open)

    @property
    def num_certain(self) -> int | None:
        """How many tokens are never taken back any more; None: all of them, whatever comes."""
        return self.num_told if self._text.has_banned else None

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
        self.sampler = SamplerState(self._params, prompt_ids, self._vocab_size, self._constraint, self._breaker_ids)

    def accept(self, sampled: SampledToken, now: float, *, is_full: bool, is_guessed: bool = False) -> Delta:
        """Add a token, and end the reply if the token or its text says so, its constraint is complete, or it `is_full`.

        Where it completes a banned string, the tokens from that on which began it are taken back: the next one comes
        in the place of that one, and is another. The delta has what is certain, which is nothing then.

        Raises:
            ConstraintFailed: the token may not come here, or too many were taken back.
        """
        assert self.finish_reason is None
        before, open_from = None, 0
        if self._text.has_banned:
            before, open_from = (self._text.state(), state_of(self._constraint)), self._text.open_from
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self._guessed.append(is_guessed)
        self.sampler.record(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
        said, reason = self._advance(token_id, is_full=is_full)
        if before is None:
            return self._delta(said, [(sampled, is_guessed)], reason)
        if self._text.found_banned is not None:
            self._open.append(_Open(before, open_from, self._text.found_banned.stop, sampled, is_guessed, said))
            self._take_back(self._text.found_banned)
            return self._delta(Said(), [], None)
        self._open.append(_Open(before, open_from, self._text.reach(), sampled, is_guessed, said))
        bans = self._bans.get(len(self.token_ids))
        self.sampler.banned_ids = NO_IDS if bans is None else bans.ids
        return self._settled(reason)

    def cancel(self) -> Delta:
        """End the reply where it is, or before the banned string that it would end with."""
        assert self.finish_reason is None
        said = self._flush()
        while self._text.found_banned is not None:
            self._take_back(self._text.found_banned)
            said = self._flush()
        return self._settled("cancelled", said)

    def end_unsaid(self) -> Delta:
        """End a reply of which no token was wanted."""
        assert self.finish_reason is None and not self.token_ids
        return self._delta(Said(), [], "length")

    def _advance(self, token_id: int, *, is_full: bool) -> tuple[Said, FinishReason | None]:
        """The text that the token releases, and whether it ends the reply."""
        is_end = token_id in self._stop_ids
        said = self._text.push(None if is_end else token_id, may_stop=self._may_stop)
        is_end = is_end or self.is_cut or (self._constraint is not None and self._constraint.is_finished)
        if is_end or is_full:
            said = said.followed_by(self._flush())  # which may complete a stop string
        if is_end or self.is_cut:
            return said, "stop"
        return said, "length" if is_full else None

    def _flush(self) -> Said:
        return self._text.finish(may_stop=self._may_stop)

    @property
    def _may_stop(self) -> bool:
        return len(self.token_ids) > self._params.min_tokens

    def _take_back(self, found: Found) -> None:
        """Take back the token that a banned string began with, and all behind it, and ban it there."""
        reaches = [each.reach for each in self._open]
        place = 1 + max((number for number, reach in enumerate(reaches) if reach <= found.start), default=-1)
        index = len(self.token_ids) - len(self._open) + place
        taken = self.token_ids[index:]
        self._num_taken_back += len(taken)
        self._bans = {at: bans for at, bans in self._bans.items() if at <= index}
        bans = self._bans.setdefault(index, _Bans(self._holders))
        num_tried = bans.tried.total()
        bans.tried[found.rule] += 1
        if self._num_taken_back > MAX_TAKEN_BACK or (num_tried == MAX_BANS and not self._ban_holders(bans)):
            raise ConstraintFailed(
                f"{num_tried} tokens led to a banned string behind {index} tokens of the reply, and "
                f"{self._num_taken_back} were taken back in all; ban fewer strings"
            )
        bans.ids = np.append(bans.ids, taken[0])
        del self.token_ids[index:], self._guessed[index:], self.logprobs[index:]
        self.sampler.take_back(taken)
        self.sampler.banned_ids = bans.ids
        text, constraint = self._open[place].before
        self._text.restore(text)
        restore(self._constraint, constraint)
        del self._open[place:]

    def _ban_holders(self, bans: _Bans) -> bool:
        """Ban the tokens that hold by themselves the string that most of those tried led to, here and wherever one is
        banned from now on. Returns whether that bans any more.
        """
        [(string, _)] = bans.tried.most_common(1)
        held = self._holding(string)
        more = np.setdiff1d(held, bans.ids)
        self._holders = np.union1d(self._holders, held)
        bans.ids = np.append(bans.ids, more)
        bans.tried.clear()
        return len(more) > 0

    def _settled(self, reason: FinishReason | None, more: Said = _NOTHING) -> Delta:
        """What is certain now, which is all if the reply has ended.

        Tokens are, where no banned string can begin in them, whichever of those behind them is taken back.
        """
        number = len(self._open)
        if reason is None:
            open_from = self._text.open_from
            while number and self._open[number - 1].reach > open_from:
                number -= 1
                open_from = min(open_from, self._open[number].open_from)
        certain, self._open = self._open[:number], self._open[number:]
        said = Said("".join(each.said.reasoning for each in certain), "".join(each.said.answer for each in certain))
        return self._delta(said.followed_by(more), [(each.sampled, each.is_guessed) for each in certain], reason)

    def _delta(self, said: Said, tokens: list[tuple[SampledToken, bool]], reason: FinishReason | None) -> Delta:
        self._texts.append(said.answer)
        if said.reasoning:
            self._thoughts.append(said.reasoning)
        self.finish_reason = reason
        logprobs = tuple(sampled.logprob for sampled, _ in tokens if sampled.logprob is not None)
        return Delta(
            said.answer,
            tuple(sampled.token_id for sampled, _ in tokens),
            logprobs or None,
            reason,
            None if reason is None else self.stop_reason,
            thought=said.reasoning,
            num_thought_tokens=self.num_thought_tokens,
            guessed=tuple(is_guessed for _, is_guessed in tokens),
        )
