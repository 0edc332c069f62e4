"""Guess with a second model of the same vocabulary, which has its own pages and prefix cache.

A guess is never in the second model's sequence: rows for guesses are reserved behind it, and given back when guessing
ends, so that nothing that the first model rejects is in a tree. What was right is computed again with the next guesses,
as rows of one step. Knows token ids, pages and seconds; not requests, nor how a token is chosen from logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..cache import sequence as cached
from ..cache.kv_transaction import KVTransaction, Reservation
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..memory import Forgotten, Memory
from ..model.batch import Runner, make_batch
from .draft import StepCost
from .draft_levels import Ask, DraftRows, DraftSource
from .draft_worth import MAX_DEPTH

_MOST_BEHIND = 16  # tokens that a step of guessing may catch up with; more are computed before
_CHUNK = 64  # tokens of a prompt in a step


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


class DraftModel(DraftSource, Memory):
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
        super().__init__("the draft model", forward, vocab_size=vocab_size, clock=clock)
        self._about = about
        self._forward, self._cache = forward, cache
        self._context_length = context_length
        self._sequences: dict[str, cached.Sequence] = {}
        self._without: set[str] = set()  # requests that have no room

    @property
    def names(self) -> frozenset[str]:
        """The requests that it follows."""
        return frozenset(self._sequences)

    def end(self, name: str) -> None:
        """A request gave its pages back, or ended; what was computed for it stays cached."""
        super().end(name)
        self._without.discard(name)
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
        super().start_over()
        self._sequences.clear()
        self._without.clear()
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
        if ask.name in self._without or len(ask.sequence.token_ids) + ask.most > self._context_length:
            return None
        is_worth = partial(self.worth.pays_for_prompt, ask.num_generated, ask.num_left, cost, num_rows)
        sequence = self._sequences.get(ask.name)
        if sequence is None:
            match = self._cache.match(ask.sequence.token_ids, namespace=ask.sequence.namespace)
            if not is_worth(len(ask.sequence.token_ids) - match.num_tokens):
                return None
            sequence = self._cache.open(match, context_length=self._context_length)
            self._sequences[ask.name] = sequence
        else:
            _go_along(sequence, ask.sequence.token_ids)
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

    def _guess(self, asks: Sequence[Ask], cost: StepCost, num_rows: int, num_expected: float) -> None:
        ready = [(ask, sequence) for ask in asks if (sequence := self._follow(ask, cost, num_rows)) is not None]
        with self._cache.begin() as step:
            rows = [(ask, r) for ask, sequence in ready if (r := self._reserve(step, ask, sequence)) is not None]
            if not rows:
                return
            if step.copies:
                self._forward.copy_rows(step.copies)
            self._levels([(ask, _rows_of(reservation)) for ask, reservation in rows], cost, num_rows, num_expected)
            for _, reservation in rows:
                step.accept(reservation.sequence, 0)
            step.commit()

    def _reserve(self, step: KVTransaction, ask: Ask, sequence: cached.Sequence) -> Reservation | None:
        """Rows of a sequence's uncomputed tokens and of guesses behind them, whose ids are not known yet."""
        try:
            return step.reserve(sequence, sequence.num_uncomputed, [0] * (min(ask.most, MAX_DEPTH) - 1))
        except OutOfPages:
            self._give_up(ask.name)
            return None


def _rows_of(reservation: Reservation) -> DraftRows:
    """The rows that were reserved."""
    tokens = reservation.sequence.token_ids[reservation.start :]
    return DraftRows(reservation.start, tokens, reservation.rows, reservation.page_ids)


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
