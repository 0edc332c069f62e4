"""The reply of one request so far: tokens, text, and the rules that end it.

Knows one reply: stop rules, a constraint, the sampler's state. Not the prompt's KV, other requests or
threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..chat.reasoning_splitter import ReasoningSplitter
from ..chat.scan import ReplyPiece
from ..chat.text_rules.reply_text import ReplyText, Stops, TextDecoder
from ..chat.text_rules.text_search import Found
from ..chat.token_constraint import Foresight, MinTokens, TokenConstraint, restore, state_of
from ..errors import ConstraintFailed
from .completion import Delta, FinishReason, StopReason, TokenLogprob
from .sampling_params import SamplingParams
from .step.dry import IntArray
from .step.sampler import SampledToken
from .step.sampler_state import NO_IDS, SamplerState

_NOTHING = ReplyPiece()
MAX_BANS = 64  # tokens tried one by one at one position; then all tokens with a banned string are banned at once
MAX_TAKEN_BACK = 1 << 14  # tokens of one reply; then it fails


class _Revocable(NamedTuple):
    """A token that may still be taken back, and the text that it released; a delta has it only when it is final."""

    before: tuple[Any, Any]  # states of text and constraint before it
    open_from: int  # position in the answer from which a banned string could begin, before this token
    reach: int  # end of its text in the answer
    sampled: SampledToken
    is_drafted: bool
    said: ReplyPiece


@dataclass
class _Bans:
    """The tokens that must not come at one position, and the banned strings that those tried there led to."""

    ids: IntArray
    tried: Counter[str] = field(default_factory=Counter)


class Reply:
    """A reply, extended token by token until it has a `finish_reason`.

    Attributes:
        token_ids: all tokens so far, the stop token included.
        logprobs: one for each token, if the request asks for them; else empty.
        sampler: the state for `sample`.
        finish_reason: why the reply ended; None: it continues.
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
        """Make a reply without tokens.

        Args:
            prompt_ids: counted by repetition penalties, together with the reply.
            decoder: a fresh one that knows the prompt.
            eos_token_ids: the model's own, which end the reply unless `params.ignore_eos`.
            constraint: the constraint of this reply only, at its beginning.
            thoughts: a fresh splitter that separates reasoning. None: all of the reply is the answer.
            holding: returns the tokens that contain a string; called if too many were tried one by one.
            breaker_ids: tokens that end a repetition for the DRY penalty.
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
        self._open: list[_Revocable] = []
        self._bans: dict[int, _Bans] = {}  # by position
        self._holding = holding
        self._holders = NO_IDS  # tokens with a banned string that too many tokens led to
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
        """The released text of the answer, without reasoning."""
        return "".join(self._texts)

    @property
    def thought(self) -> str:
        """The released reasoning."""
        return "".join(self._thoughts)

    @property
    def foresight(self) -> Foresight | None:
        """The constraint, if it can look beyond the next token."""
        return self._constraint if isinstance(self._constraint, Foresight) else None

    @property
    def ids_without_end(self) -> list[int]:
        """The token ids without a stop token at the end."""
        ids = self.token_ids
        return ids[:-1] if ids and ids[-1] in self._stop_ids else ids

    @property
    def is_cut(self) -> bool:
        """Return whether a stop string or expression ended the text within its tokens."""
        return self._text.stop is not None

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop string, stop expression or requested stop token that ended the reply."""
        if self.finish_reason != "stop":
            return None
        if self.is_cut:
            return self._text.stop
        last = self.token_ids[-1]
        return last if last in self._stop_ids - self._own_end_ids else None

    @property
    def num_thought_tokens(self) -> int:
        """Number of reasoning tokens, tags included."""
        return self._text.num_reasoning_tokens

    @property
    def num_accepted_drafts(self) -> int:
        """Number of tokens that were drafted."""
        return sum(self._guessed)

    @property
    def num_delivered(self) -> int:
        """Number of tokens in the deltas so far."""
        return len(self.token_ids) - len(self._open)

    @property
    def num_certain(self) -> int | None:
        """Number of tokens that are never taken back; None: none is ever taken back."""
        return self.num_delivered if self._text.has_banned else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first, divided by the time after the first; None if there are too few."""
        first, last = self.first_token_at, self.last_token_at
        if first is None or last is None or last <= first:
            return None
        return (len(self.token_ids) - 1) / (last - first)

    def follow(self, prompt_ids: Iterable[int]) -> None:
        """Use other ids of the prompt for penalties, before the first token."""
        assert not self.token_ids
        self.sampler = SamplerState(self._params, prompt_ids, self._vocab_size, self._constraint, self._breaker_ids)

    def accept(self, sampled: SampledToken, now: float, *, is_full: bool, is_drafted: bool = False) -> Delta:
        """Add a token; end the reply if the token or its text stops it, its constraint is complete, or it `is_full`.

        If the token completes a banned string, all tokens since the string's beginning are taken back: the next token
        takes the place of the first of them, and is another. The delta has only final tokens, none in this case.

        Raises:
            ConstraintFailed: the constraint forbids the token, or too many were taken back.
        """
        assert self.finish_reason is None
        before, open_from = None, 0
        if self._text.has_banned:
            before, open_from = (self._text.state(), state_of(self._constraint)), self._text.open_from
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        self._guessed.append(is_drafted)
        self.sampler.record(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
        said, reason = self._advance(token_id, is_full=is_full)
        if before is None:
            return self._add_delta(said, [(sampled, is_drafted)], reason)
        if self._text.found_banned is not None:
            self._open.append(_Revocable(before, open_from, self._text.found_banned.stop, sampled, is_drafted, said))
            self._take_back(self._text.found_banned)
            return self._add_delta(ReplyPiece(), [], None)
        self._open.append(_Revocable(before, open_from, self._text.reach(), sampled, is_drafted, said))
        bans = self._bans.get(len(self.token_ids))
        self.sampler.banned_ids = NO_IDS if bans is None else bans.ids
        return self._release_final(reason)

    def cancel(self) -> Delta:
        """End the reply here, or before a banned string that it would end with."""
        assert self.finish_reason is None
        said = self._flush()
        while self._text.found_banned is not None:
            self._take_back(self._text.found_banned)
            said = self._flush()
        return self._release_final("cancelled", said)

    def end_empty(self) -> Delta:
        """End a reply that must have no tokens."""
        assert self.finish_reason is None and not self.token_ids
        return self._add_delta(ReplyPiece(), [], "length")

    def _advance(self, token_id: int, *, is_full: bool) -> tuple[ReplyPiece, FinishReason | None]:
        """Return the text that becomes certain with this token, and why it ends the reply; None if it does not."""
        is_end = token_id in self._stop_ids
        said = self._text.push(None if is_end else token_id, may_stop=self._may_stop)
        is_end = is_end or self.is_cut or (self._constraint is not None and self._constraint.is_finished)
        if is_end or is_full:
            said = said.followed_by(self._flush())  # can complete a stop string
        if is_end or self.is_cut:
            return said, "stop"
        return said, "length" if is_full else None

    def _flush(self) -> ReplyPiece:
        return self._text.finish(may_stop=self._may_stop)

    @property
    def _may_stop(self) -> bool:
        return len(self.token_ids) > self._params.min_tokens

    def _take_back(self, found: Found) -> None:
        """Take back the token in which a banned string begins and all after it, and ban that token at its position.

        Raises:
            ConstraintFailed: too many tokens were taken back or tried here.
        """
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
        """Ban all tokens that contain the string that most of those tried led to, here and in later bans.

        Return whether that bans any more tokens.
        """
        [(string, _)] = bans.tried.most_common(1)
        held = self._holding(string)
        more = np.setdiff1d(held, bans.ids)
        self._holders = np.union1d(self._holders, held)
        bans.ids = np.append(bans.ids, more)
        bans.tried.clear()
        return len(more) > 0

    def _release_final(self, reason: FinishReason | None, more: ReplyPiece = _NOTHING) -> Delta:
        """Release the open tokens that are final, all of them if the reply has ended; return their delta.

        A token is final if no banned string can begin in it, whichever token after it is taken back.

        Args:
            reason: why the reply has ended; None if it goes on.
            more: text of the delta after that of the tokens, such as what a cancelled reply still held.
        """
        number = len(self._open)
        if reason is None:
            open_from = self._text.open_from
            while number and self._open[number - 1].reach > open_from:
                number -= 1
                open_from = min(open_from, self._open[number].open_from)
        certain, self._open = self._open[:number], self._open[number:]
        said = ReplyPiece(
            "".join(each.said.reasoning for each in certain), "".join(each.said.answer for each in certain)
        )
        return self._add_delta(said.followed_by(more), [(each.sampled, each.is_drafted) for each in certain], reason)

    def _add_delta(
        self, said: ReplyPiece, tokens: list[tuple[SampledToken, bool]], reason: FinishReason | None
    ) -> Delta:
        """Add final text and tokens to the reply, and return them as its next delta.

        Args:
            tokens: sampled tokens, each with whether it was drafted.
            reason: why the reply has ended; None if it goes on.
        """
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
            guessed=tuple(is_drafted for _, is_drafted in tokens),
        )
