"""Draft with a second model of the same vocabulary, which has its own pages and prefix cache.

Draft tokens never enter the second model's sequence. Rows for them are reserved after it, and released when drafting
ends, so that no rejected token is in a tree. Accepted tokens are computed again with the next draft, as rows of one
step. Knows token ids, pages and seconds; not requests, nor how a token is chosen from logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..cache import sequence as cached
from ..cache.kv_transaction import KVTransaction, Reservation
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..memory import ForgetResult, Memory
from ..model.batch import Runner, make_batch
from .draft import StepCost
from .draft_levels import DraftRequest, DraftRows, DraftSource
from .draft_worth import MAX_DEPTH

_MAX_UNCOMPUTED = 16  # uncomputed tokens that a drafting step can include; more are computed before
_CHUNK = 64  # prompt tokens in a step


@dataclass(frozen=True)
class DraftModelInfo:
    """Name and memory use of a draft model."""

    name: str
    weights_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class DraftStats:
    """Current state and counts of a draft model."""

    about: DraftModelInfo | None
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_computed_tokens: int


class DraftModel(DraftSource, Memory):
    """A model that drafts for another.

    Args:
        forward: the model; `shut_down` closes it.
        cache: its own prefix cache.
        context_length: its own; longer replies get no drafts.
        vocab_size: number of tokens that both models know.
        clock: seconds; only differences count.
        about: its memory use, for `stats`.

    Attributes:
        worth: decides when drafting is worthwhile.
        num_tokens: number of tokens that it computed.
    """

    def __init__(
        self,
        forward: Runner,
        cache: PrefixCache,
        *,
        context_length: int,
        vocab_size: int,
        clock: Callable[[], float],
        about: DraftModelInfo | None = None,
    ) -> None:
        super().__init__("the draft model", forward, vocab_size=vocab_size, clock=clock)
        self._about = about
        self._forward, self._cache = forward, cache
        self._context_length = context_length
        self._sequences: dict[str, cached.Sequence] = {}
        self._without: set[str] = set()  # names of requests that it has too few pages for

    @property
    def names(self) -> frozenset[str]:
        """Names of the requests that it follows."""
        return frozenset(self._sequences)

    def end(self, name: str) -> None:
        """Forget a request that released its pages or ended; its computed tokens stay cached."""
        super().end(name)
        self._without.discard(name)
        if (sequence := self._sequences.pop(name, None)) is not None:
            self._cache.close(sequence)

    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget a namespace's prefixes, except those of live requests; its own pages are not counted."""
        self._cache.clear(namespace)
        return ForgetResult()

    def drop_unused(self, since: float) -> int:
        """Free pages that were last used before a time on the cache's clock; return their number."""
        return self._cache.drop_unused(since)

    def start_over(self) -> None:
        """Forget all requests, their sequences and the cached KV."""
        super().start_over()
        self._sequences.clear()
        self._without.clear()
        self._cache.start_over()

    def stats(self) -> DraftStats:
        """Return the current state and counts."""
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

    def _update_sequence(self, request: DraftRequest, cost: StepCost, num_rows: int) -> cached.Sequence | None:
        """Return the draft model's own sequence for a reply, brought up to date: few of its tokens are left to compute.

        None if the request is not followed, or computing its missing tokens does not pay or takes further steps.
        """
        if request.name in self._without or len(request.sequence.token_ids) + request.most > self._context_length:
            return None
        is_worth = partial(self.worth.pays_for_prompt, request.num_generated, request.num_left, cost, num_rows)
        sequence = self._sequences.get(request.name)
        if sequence is None:
            match = self._cache.match(request.sequence.token_ids, namespace=request.sequence.namespace)
            if not is_worth(len(request.sequence.token_ids) - match.num_tokens):
                return None
            sequence = self._cache.open(match, context_length=self._context_length)
            self._sequences[request.name] = sequence
        else:
            _synchronize(sequence, request.sequence.token_ids)
        if sequence.num_uncomputed > _MAX_UNCOMPUTED:
            if not is_worth(sequence.num_uncomputed):
                return None
            self._compute_part(request.name, sequence)
        return sequence if request.name in self._sequences and sequence.num_uncomputed <= _MAX_UNCOMPUTED else None

    def _compute_part(self, name: str, sequence: cached.Sequence) -> None:
        """Compute the next chunk of a sequence's uncomputed tokens."""
        begun = self._clock()
        num_tokens = min(_CHUNK, sequence.num_uncomputed - 1)
        with self._cache.begin() as transaction:
            try:
                reservation = transaction.reserve(sequence, num_tokens)
            except OutOfPages:
                self._give_up(name)
                return
            if transaction.copies:
                self._forward.copy_rows(transaction.copies)
            self._forward.forward(make_batch([reservation], [0]))
            transaction.commit()
        self.num_tokens += num_tokens
        self.worth.observe_prompt(num_tokens, self._clock() - begun)

    def _give_up(self, name: str) -> None:
        """Stop following a request, because there are too few pages."""
        self._without.add(name)
        self._cache.close(self._sequences.pop(name), keep=False)

    def _draft_tokens(
        self, requests: Sequence[DraftRequest], cost: StepCost, num_rows: int, num_expected: float
    ) -> None:
        """Bring the requests' sequences up to date, and append draft tokens to the requests that get rows."""
        ready = [
            (request, sequence)
            for request in requests
            if (sequence := self._update_sequence(request, cost, num_rows)) is not None
        ]
        with self._cache.begin() as transaction:
            rows = [
                (request, r)
                for request, sequence in ready
                if (r := self._reserve_rows(transaction, request, sequence)) is not None
            ]
            if not rows:
                return
            if transaction.copies:
                self._forward.copy_rows(transaction.copies)
            self._draft_together(
                [(request, _rows_of(reservation)) for request, reservation in rows], cost, num_rows, num_expected
            )
            for _, reservation in rows:
                transaction.accept(reservation.sequence, 0)
            transaction.commit()

    def _reserve_rows(
        self, transaction: KVTransaction, request: DraftRequest, sequence: cached.Sequence
    ) -> Reservation | None:
        """Reserve KV rows for a sequence's uncomputed tokens, and for draft tokens after them, whose ids are unknown.

        None if there are too few pages; the request is then no longer followed.
        """
        try:
            return transaction.reserve(sequence, sequence.num_uncomputed, [0] * (min(request.most, MAX_DEPTH) - 1))
        except OutOfPages:
            self._give_up(request.name)
            return None


def _rows_of(reservation: Reservation) -> DraftRows:
    """Return the room of a reservation for a sequence's tokens and draft tokens."""
    tokens = reservation.sequence.token_ids[reservation.start :]
    return DraftRows(reservation.start, tokens, reservation.rows, reservation.page_ids)


def _synchronize(sequence: cached.Sequence, token_ids: Sequence[int]) -> None:
    """Make a sequence hold these tokens: drop those that were taken back, and add new ones."""
    own, length = sequence.token_ids, min(len(sequence), len(token_ids))
    if len(own) > length or own != token_ids[:length]:
        same = next((place for place in range(length) if own[place] != token_ids[place]), length)
        sequence.pop(len(sequence) - same)
    sequence.append(token_ids[len(sequence) :])
    if not sequence.num_uncomputed:  # the logits after the last token are needed once more
        last = token_ids[-1]
        sequence.pop(1)
        sequence.append([last])
