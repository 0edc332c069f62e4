"""Guess with a second model of the same vocabulary, which has its own pages and prefix cache.

A guess is never in the second model's sequence: rows for guesses are reserved behind it, and given back when guessing
ends, so that nothing that the first model rejects is in a tree. What was right is computed again with the next guesses,
as rows of one step. Knows token ids, pages and seconds; not requests, nor how a token is chosen from logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..cache import sequence as cached
from ..cache.kv_transaction import KVTransaction, Reservation
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..memory import Forgotten, Memory
from ..model.batch import Float32Array, Runner, TopLogits, make_batch
from .draft import MODEL, Draft, StepCost, best_length
from .draft_worth import MAX_DEPTH, DraftWorth, bin_of

_LOGGER = logging.getLogger(__name__)

_MOST_BEHIND = 16  # tokens that a step of guessing may catch up with; more are computed before
_CHUNK = 64  # tokens of a prompt in a step

Choose = Callable[[Float32Array, TopLogits], "tuple[int, float] | None"]
"""The token that is chosen from logits `[1, vocab]` as the reply would, and how likely these find it; then from those
behind it. None: none can be."""


@dataclass(frozen=True)
class DraftAbout:
    """What a draft model takes of memory."""

    name: str
    weights_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class DraftStats:
    """What a draft model has and did."""

    about: DraftAbout | None
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_computed_tokens: int


@dataclass
class Ask:
    """A reply that guesses are wanted for.

    Attributes:
        name: of the request, until `DraftModel.end`.
        token_ids: of prompt and reply so far.
        namespace: whose part of the draft model's tree is shared; None: nothing is.
        most: guesses that there is room for.
        num_generated, num_left: tokens that the reply has, and that it may still have.
    """

    name: str
    token_ids: Sequence[int]
    namespace: bytes | None
    most: int
    num_generated: int
    num_left: int
    choose: Choose
    guesses: list[int] = field(default_factory=list)
    likely: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def chance(self) -> float:
        """That all guesses so far are right."""
        return self.chances[-1] if self.chances else 1.0


class DraftModel(Memory):
    """A model that guesses for another.

    Args:
        forward: the model; `shut_down` closes it.
        cache: its own.
        context_length: of its own; replies that are longer have no guesses.
        vocab_size: tokens that both models know.
        clock: seconds; only differences count.
        about: what it takes of memory, to be told.

    Attributes:
        worth: when guesses pay.
        num_tokens: that it computed.
    """

    def __init__(
        self,
        forward: Runner,
        cache: PrefixCache,
        *,
        context_length: int,
        vocab_size: int,
        clock: Callable[[], float],
        about: DraftAbout | None = None,
    ) -> None:
        self._about = about
        self._forward, self._cache, self._clock = forward, cache, clock
        self._context_length, self._vocab_size = context_length, vocab_size
        self.worth = DraftWorth()
        self.num_tokens = 0
        self._num_steps = 0
        self._sequences: dict[str, cached.Sequence] = {}
        self._without: set[str] = set()  # requests that have no room
        self._likely_of: dict[str, list[int]] = {}  # of what was guessed last

    def guess(self, asks: Sequence[Ask], cost: StepCost, *, num_rows: int, num_expected: float) -> dict[str, Draft]:
        """Drafts by the names of the requests, for a step of `num_rows` without them that takes as `cost` says. Where
        the model fails, it is not used any more: no reply needs it."""
        if not asks:
            return {}
        try:
            ready = [(ask, sequence) for ask in asks if (sequence := self._follow(ask, cost, num_rows)) is not None]
            return self._guess(ready, cost, num_rows, num_expected) if ready else {}
        except Exception:
            _LOGGER.exception("the draft model failed, and is not used any more")
            self.worth.turn_off()
            self.start_over()
            return {}

    @property
    def names(self) -> frozenset[str]:
        """The requests that it follows."""
        return frozenset(self._sequences)

    def observe(self, name: str, num_checked: int, num_accepted: int) -> None:
        """Note how many of the guesses that were made last for a request, and checked, were right."""
        self.worth.observe(self._likely_of.pop(name, [])[:num_checked], num_accepted)

    def end(self, name: str) -> None:
        """A request gave its pages back, or ended; what was computed for it stays cached."""
        self._without.discard(name)
        self._likely_of.pop(name, None)
        if (sequence := self._sequences.pop(name, None)) is not None:
            self._cache.close(sequence)

    def forget(self, namespace: bytes) -> Forgotten:
        """Forget a namespace's prefixes, but for what live requests use; its own pages are not counted."""
        self._cache.clear(namespace)
        return Forgotten()

    def drop_unused(self, since: float) -> int:
        """Free what was last used before a time on the cache's clock; returns how many pages."""
        return self._cache.drop_unused(since)

    def start_over(self) -> None:
        """Forget everything."""
        self._sequences.clear()
        self._without.clear()
        self._likely_of.clear()
        self._cache.start_over()

    def stats(self) -> DraftStats:
        """What it has now, and did so far."""
        pages = self._cache.stats()
        numbers = (pages.num_pages, pages.num_free_pages, pages.num_cached_pages)
        return DraftStats(self._about, *numbers, self.num_tokens)

    def check(self) -> None:
        """Raise AssertionError unless pages and sequences agree; between steps."""
        self._cache.check()
        assert len(self._cache.sequences) == len(self._sequences), "a sequence of the draft model belongs to no request"

    def shut_down(self) -> None:
        """Close the model."""
        self._forward.close()

    def _follow(self, ask: Ask, cost: StepCost, num_rows: int) -> cached.Sequence | None:
        """The sequence of a reply, with all of its tokens and few of them uncomputed; None: not now."""
        if ask.name in self._without or len(ask.token_ids) + ask.most > self._context_length:
            return None
        is_worth = partial(self.worth.pays_for_prompt, ask.num_generated, ask.num_left, cost, num_rows)
        sequence = self._sequences.get(ask.name)
        if sequence is None:
            match = self._cache.match(ask.token_ids, namespace=ask.namespace)
            if not is_worth(len(ask.token_ids) - match.num_tokens):
                return None
            sequence = self._cache.open(match, context_length=self._context_length)
            self._sequences[ask.name] = sequence
        else:
            _go_along(sequence, ask.token_ids)
        if sequence.num_uncomputed > _MOST_BEHIND:
            if not is_worth(sequence.num_uncomputed):
                return None
            self._compute_part(ask.name, sequence)
        return sequence if ask.name in self._sequences and sequence.num_uncomputed <= _MOST_BEHIND else None

    def _compute_part(self, name: str, sequence: cached.Sequence) -> None:
        """Compute the next tokens of what a sequence is behind."""
        begun = self._clock()
        num_tokens = min(_CHUNK, sequence.num_uncomputed - 1)
        with self._cache.begin() as step:
            try:
                reservation = step.reserve(sequence, num_tokens)
            except OutOfPages:
                self._give_up(name)
                return
            if step.copies:
                self._forward.copy_rows(step.copies)
            self._forward.forward(make_batch([reservation], [0]))
            step.commit()
        self.num_tokens += num_tokens
        self.worth.observe_prompt(num_tokens, self._clock() - begun)

    def _give_up(self, name: str) -> None:
        """Follow a request no more: there are too few pages."""
        self._without.add(name)
        self._cache.close(self._sequences.pop(name), keep=False)

    def _guess(
        self, ready: list[tuple[Ask, cached.Sequence]], cost: StepCost, num_rows: int, num_expected: float
    ) -> dict[str, Draft]:
        with self._cache.begin() as step:
            rows = [(ask, r) for ask, sequence in ready if (r := self._reserve(step, ask, sequence)) is not None]
            if step.copies:
                self._forward.copy_rows(step.copies)
            begun = self._clock()
            active = rows
            for depth in range(MAX_DEPTH):
                active = [(ask, r) for ask, r in active if depth < len(r.draft_ids) + 1 and len(ask.guesses) == depth]
                chances = [ask.chance for ask, _ in active]
                made = [chance for ask, _ in rows for chance in ask.chances]
                expected, total = num_expected + sum(made), num_rows + len(made)
                spent_s = self._clock() - begun
                depth_left = MAX_DEPTH - depth
                if not active or not self.worth.depth(cost, total, expected, chances, depth_left, spent_s):
                    break
                self._compute_level(active, depth)
            for _, reservation in rows:
                step.accept(reservation.sequence, 0)
            step.commit()
        return self._drafts([ask for ask, _ in rows], cost, num_rows, num_expected)

    def _reserve(self, step: KVTransaction, ask: Ask, sequence: cached.Sequence) -> Reservation | None:
        """Rows of a sequence's uncomputed tokens and of guesses behind them, whose ids are not known yet."""
        try:
            return step.reserve(sequence, sequence.num_uncomputed, [0] * (min(ask.most, MAX_DEPTH) - 1))
        except OutOfPages:
            self._give_up(ask.name)
            return None

    def _compute_level(self, active: list[tuple[Ask, Reservation]], depth: int) -> None:
        """The next guess of each."""
        parts = [_part(reservation, ask.guesses, depth) for ask, reservation in active]
        num_tokens = sum(part.num_tokens for part in parts)
        begun = self._clock()
        logits = self._forward.forward(make_batch(parts, [1] * len(parts)))[:, : self._vocab_size]
        top = self._forward.top_logits(len(parts), self._vocab_size)
        for row, (ask, _) in enumerate(active):
            chosen = ask.choose(logits[row : row + 1], top.one(row))
            if chosen is not None:
                likely = bin_of(chosen[1])
                ask.chances.append(ask.chance * self.worth.share_of(likely))
                ask.guesses.append(chosen[0])
                ask.likely.append(likely)
        self.num_tokens += num_tokens
        self._num_steps += 1
        if self._num_steps > 2:  # the first ones map weights in
            self.worth.cost.observe(num_tokens, self._clock() - begun)

    def _drafts(self, asks: list[Ask], cost: StepCost, num_rows: int, num_expected: float) -> dict[str, Draft]:
        """Of all guesses, those that pay to be checked."""
        chances = sorted((chance for ask in asks for chance in ask.chances), reverse=True)
        number, _ = best_length(chances, cost, num_rows=num_rows, num_expected=num_expected)
        least = chances[number - 1] if number else 2.0
        drafts: dict[str, Draft] = {}
        for ask in asks:
            length = sum(chance >= least for chance in ask.chances)
            if length:
                drafts[ask.name] = Draft(tuple(ask.guesses[:length]), MODEL, tuple(ask.chances[:length]))
                self._likely_of[ask.name] = ask.likely[:length]
        return drafts


def _part(reservation: Reservation, guesses: Sequence[int], depth: int) -> Reservation:
    """Of what was reserved, the tokens before the first guess, or the guess before another."""
    sequence = reservation.sequence
    number = len(sequence) - reservation.start
    if depth == 0:
        return reservation._replace(stop=len(sequence), rows=reservation.rows[:number], draft_ids=())
    start, row = len(sequence) + depth - 1, number + depth - 1
    return reservation._replace(
        start=start, stop=start + 1, rows=reservation.rows[row : row + 1], draft_ids=(guesses[-1],)
    )


def _go_along(sequence: cached.Sequence, token_ids: Sequence[int]) -> None:
    """Have a sequence hold these tokens: drop those that were taken back, and add those that came."""
    own, length = sequence.token_ids, min(len(sequence), len(token_ids))
    if len(own) > length or own != token_ids[:length]:
        same = next((place for place in range(length) if own[place] != token_ids[place]), length)
        sequence.pop(len(sequence) - same)
    sequence.append(token_ids[len(sequence) :])
    if not sequence.num_uncomputed:  # the logits behind the last token are wanted once more
        last = token_ids[-1]
        sequence.pop(1)
        sequence.append([last])
