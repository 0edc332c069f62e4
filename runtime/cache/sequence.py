"""Hold one request's tokens, the pages of their KV, and how many tokens have KV.

The only owner of all three, including the length of the KV. Knows page ids, not the contents of pages, and neither
requests nor the tree.
"""

from __future__ import annotations

import collections.abc
from array import array
from collections.abc import Iterable

from ..errors import AppendLengthError, ForkLengthError, PopLengthError, SparseForkError, UnknownSequence
from ..kv_log.log import KVLog
from ..states.sequence_state import SequenceState
from ..states.state_pool import NO_STATE, FoundState, StatePool
from .page_pool import PagePool, num_pages_for
from .radix_node import either, encode_key
from .sparse_span import SparseSpan


class Sequence:
    """The tokens of a request, prompt and generated, and their KV.

    ::

        token_ids  [0 ........................ len)
        KV         [0 ....... num_computed)              in page_ids, PAGE_SIZE rows a page, one a token
        to compute            [num_computed .. len)      input of the next forwards

    A prompt starts with `num_computed < len`: its last token is always computed, because its logits are needed. A
    sampled token has no KV until the next forward, so while decoding `num_uncomputed` is 1 at the start of each step.
    To sample again after a token that is computed, pop it and append it again.

    Rows are not positions: in a `sparse` span some tokens have no row, so there are fewer rows, `num_rows`. Positions
    stay those of the tokens. Only the KV of the first `num_shareable` tokens can be shared. These end at a sparse span,
    and at the tokens of a reply that can still be taken back; there are none without a `namespace`. With a recurrent
    model, `state` is the state after the computed tokens. If rows of sliding windows were dropped, `pop` and `fork` go
    back to a token from which the sequence can resume.

    Tokens change by `append` and `pop` alone, and `fork` copies them; each validates before it changes anything. KV is
    taken over from other pages by `take_kv`, grows by a `KVTransaction`, and is released by `pop`, `preempt` and
    `close`. To open, fork and close sequences, call `PrefixCache`, which keeps track of them.

    Attributes:
        resume_points: counts of tokens after which other sequences are likely to resume.
    """

    def __init__(
        self,
        seq_id: int,
        token_ids: Iterable[int],
        *,
        pool: PagePool,
        context_length: int,
        namespace: bytes | None = b"",
        generated: bytes | None = None,
        request_id: str | None = None,
        kv_log: KVLog | None = None,
        states: StatePool | None = None,
    ) -> None:
        """Create a sequence without KV.

        Args:
            seq_id: unique in its cache.
            token_ids: the prompt.
            context_length: the most tokens it can ever have.
            namespace: the part of the tree that it shares; None: it shares nothing, except with its forks.
            generated: one byte a token, 1 if a model generated it. By default a client wrote all tokens.
            request_id: the request that it belongs to, for the log.
            kv_log: gets a line for every mutation.
            states: recurrent models: the slots for states.

        Raises:
            AppendLengthError: the prompt is longer than the context.
        """
        tokens = list(token_ids)
        if len(tokens) > context_length:
            raise AppendLengthError(0, len(tokens), context_length)
        self.seq_id = seq_id
        self.context_length = context_length
        self.namespace = namespace
        self.request_id = request_id
        self._token_ids = tokens
        self._generated = bytearray(len(tokens) if generated is None else generated)
        assert len(self._generated) == len(tokens)
        self._pool = pool
        self._kv_log = kv_log
        self.state = SequenceState(states)
        self.resume_points: set[int] = set()
        self._page_ids = array("i")  # the type of the page table: no object per page and step
        self._num_computed = self._num_recomputed = 0
        self._sparse: SparseSpan | None = None
        self._num_certain: int | None = None
        self._is_reserved = False
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._token_ids)

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, {len(self)} tokens, {self.num_computed} computed)"

    @property
    def token_ids(self) -> collections.abc.Sequence[int]:
        """All tokens, prompt and generated; read only."""
        return self._token_ids

    @property
    def generated(self) -> bytes | bytearray:
        """One byte a token, 1 if a model generated it and 0 if a client wrote it; read only."""
        return self._generated

    @property
    def page_ids(self) -> array[int]:
        """The pages of `num_rows` rows, in order, int32; read only. `Reservation.page_ids` includes those of a step."""
        return self._page_ids

    @property
    def num_computed(self) -> int:
        """Number of tokens that need no forward: their KV is in the pages, or left out of the `sparse` span."""
        return self._num_computed

    @property
    def sparse(self) -> SparseSpan | None:
        """The computed span of which some tokens have no row; None if each has its own."""
        return self._sparse

    @property
    def num_rows(self) -> int:
        """Number of KV rows of `[0, num_computed)`."""
        return self._num_computed if self._sparse is None else self._num_computed - self._sparse.num_missing

    @property
    def num_shareable(self) -> int:
        """Number of first tokens whose KV can be shared.

        They end at a sparse span and at tokens that can be taken back. There are none without a namespace.
        """
        if self.namespace is None:
            return 0
        most = self._num_computed if self._sparse is None else self._sparse.start
        return most if self._num_certain is None else min(most, self._num_certain)

    @property
    def num_uncomputed(self) -> int:
        """Number of tokens that have no KV yet."""
        return len(self._token_ids) - self._num_computed

    @property
    def num_recomputed(self) -> int:
        """Number of uncomputed tokens that were already computed in a step whose draft was rejected.

        Only recurrent models have them, because such a step leaves no state. Their rows on the last page are still
        valid.
        """
        return self._num_recomputed

    @property
    def decodes(self) -> bool:
        """Return whether only one token is left to compute, not counting tokens that are computed again."""
        return self.num_uncomputed == 1 + self._num_recomputed

    @property
    def is_closed(self) -> bool:
        """Return whether the cache closed it, after which it can only be read."""
        return self._is_closed

    def append(self, token_ids: Iterable[int], *, generated: bool = True) -> None:
        """Add tokens at the end, without KV; `generated` says whether a model generated them.

        Raises:
            AppendLengthError: the result would exceed the context length; nothing is appended.
            UnknownSequence: it is closed.
        """
        self.require_open()
        tokens = list(token_ids)
        length = len(self._token_ids)
        if length + len(tokens) > self.context_length:
            raise AppendLengthError(length, len(tokens), self.context_length)
        self._token_ids += tokens
        self._generated += (b"\1" if generated else b"\0") * len(tokens)
        if self._kv_log is not None:
            self._kv_log.write("append", self, length=length)

    def pop(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens with their KV, and release the pages that become empty.

        A shared last page keeps its rows: the next reservation copies the ones that remain here. A pop into a sparse
        span drops all of the span's KV, so the sequence is exact again. A recurrent state cannot be cut. A pop of
        computed tokens then goes back to the last snapshot, and the tokens after it must be computed again.

        Raises:
            PopLengthError: there are fewer tokens; nothing is popped.
            UnknownSequence: it is closed.
        """
        self.require_open()
        if not 0 <= num_tokens <= len(self):
            raise PopLengthError(len(self), num_tokens)
        assert not self._is_reserved, "popped inside a transaction"
        length, before = len(self) - num_tokens, (len(self), self._num_computed)
        self._num_recomputed = 0
        num_free = self._pool.num_free
        del self._token_ids[length:]
        del self._generated[length:]
        if length < self._num_computed:
            if (state := self._state_before(length)) is not None:
                self.state.move(state.slot)
                length = state.num_tokens
            length = self._resumable(length)
        self.state.cut(len(self))
        self._num_computed = min(self._num_computed, length)
        if self._sparse is not None and length < self._sparse.stop:
            self._num_computed = min(length, self._sparse.start)
            self._sparse = None
        num_pages = num_pages_for(self.num_rows)
        self._pool.release(self._page_ids[num_pages:])
        del self._page_ids[num_pages:]
        if self._kv_log is not None:
            free = [num_free, self._pool.num_free]
            self._kv_log.write("pop", self, length=before[0], computed=before[1], free=free, **self._logged)

    def fork(self, at: int, *, seq_id: int) -> Sequence:
        """Return a new sequence of the first `at` tokens that shares their pages, partial and sparse ones too.

        The first of the two that writes to the partial page gets a copy by its reservation. With a recurrent model less
        is shared if there is no state at `at`. Call `PrefixCache.fork`, which assigns the id and keeps track of the
        sequence.

        Raises:
            ForkLengthError: `at` is beyond the computed tokens; nothing is shared.
            SparseForkError: `at` is inside a sparse span; nothing is shared.
            UnknownSequence: it is closed.
        """
        self.require_open()
        if not 0 <= at <= self._num_computed:
            raise ForkLengthError(self._num_computed, at)
        sparse = self._sparse
        if sparse is not None and at < sparse.stop:
            if at > sparse.start:
                raise SparseForkError(sparse.start, sparse.stop, at)
            sparse = None
        assert not self._is_reserved, "forked inside a transaction"
        child = Sequence(
            seq_id,
            self._token_ids[:at],
            pool=self._pool,
            context_length=self.context_length,
            namespace=self.namespace,
            generated=bytes(self._generated[:at]),
            request_id=self.request_id,
            kv_log=self._kv_log,
            states=self.state.pool,
        )
        slot, at = self.state.slot, self._resumable(at)
        if at < self._num_computed and (state := self._state_before(at)) is not None:
            at, slot = state
        elif self.state.pool is not None:
            self.state.pool.retain(slot)
        page_ids = self._page_ids[: num_pages_for(at - (0 if sparse is None else sparse.num_missing))]
        self._pool.retain(page_ids)
        child.take_kv(page_ids, at, b"", sparse=sparse, state_slot=slot)
        if self._num_certain is not None:
            child.set_certain(min(self._num_certain, len(child)))
        if self._kv_log is not None:
            self._kv_log.write(
                "fork", child, length=0, computed=0, parent=self.seq_id, pages=list(page_ids), **self._logged
            )
        return child

    def want_resumable_at(self, num_tokens: int) -> None:
        """Keep whatever a sequence needs to resume after `num_tokens` tokens, because others are likely to."""
        self.state.want_at(num_tokens)
        self.resume_points.add(num_tokens)

    @property
    def _logged(self) -> dict[str, bool]:
        """The log fields that say that a pop or fork can go back further than to the given token."""
        return self.state.logged if self._pool.windows is None else {"state": True}

    def _resumable(self, num_tokens: int) -> int:
        """Return the longest prefix, at most `num_tokens`, after which window rows allow the sequence to resume."""
        windows = self._pool.windows
        return num_tokens if windows is None else windows.resumable(self._page_ids, num_tokens)

    def _state_before(self, num_tokens: int) -> FoundState | None:
        """Return the last snapshot at or before `num_tokens` tokens, retained; None if the model keeps no states."""
        if (pool := self.state.pool) is None:
            return None
        found = FoundState(0, NO_STATE)
        if self.namespace is not None:
            found = pool.find(self.namespace, self._page_ids, encode_key(self._token_ids[:num_tokens]), num_tokens)
        pool.retain(found.slot)
        return found

    def require_open(self) -> None:
        """Raise UnknownSequence if it is closed."""
        if self._is_closed:
            raise UnknownSequence(f"sequence {self.seq_id} is closed; open it again from the cache")

    # For PrefixCache and KVTransaction, which make the other half of each change (pool and tree).

    def take_kv(
        self,
        page_ids: collections.abc.Sequence[int],
        num_computed: int,
        generated: bytes,
        *,
        sparse: SparseSpan | None = None,
        state_slot: int = NO_STATE,
    ) -> None:
        """Replace the sequence's KV by that of the first `num_computed` tokens in `page_ids`.

        The old pages are released. The caller has retained the new pages and the state in `state_slot`.

        Args:
            generated: one byte for each of the first tokens, 1 if a model generated it.
        """
        assert not self._is_reserved, f"{self} is reserved"
        self._pool.release(self._page_ids)
        self.state.restart(state_slot)
        self._sparse = sparse
        self.replace_kv(page_ids, num_computed)
        self.inherit_generated(generated)

    def preempt(self) -> None:
        """Release all pages; the tokens stay, uncomputed."""
        self._release_kv("preempt")

    def close(self) -> None:
        """Release all pages for good; the tokens can still be read."""
        self._release_kv("close")
        self._is_closed = True

    def _release_kv(self, event: str) -> None:
        """Release all pages and the state of the sequence, which keeps its tokens; log it as `event`."""
        before, num_free = self._num_computed, self._pool.num_free
        self.take_kv([], 0, b"")
        if self._kv_log is not None:
            self._kv_log.write(event, self, computed=before, free=[num_free, self._pool.num_free])

    @property
    def is_reserved(self) -> bool:
        """Return whether a transaction holds pages for it."""
        return self._is_reserved

    def set_reserved(self, is_reserved: bool) -> None:
        """Record whether a transaction holds pages for it."""
        self._is_reserved = is_reserved

    def set_recomputed(self) -> None:
        """Record that all uncomputed tokens were computed in a step that left no state."""
        self._num_recomputed = self.num_uncomputed

    def set_certain(self, num_tokens: int | None) -> None:
        """Record that only the first `num_tokens` tokens are final; None: all of them."""
        assert num_tokens is None or num_tokens <= len(self)
        self._num_certain = num_tokens

    def replace_kv(
        self, page_ids: collections.abc.Sequence[int], num_computed: int, *, num_kept_pages: int = 0
    ) -> None:
        """Set the pages of `[0, num_computed)`: the first `num_kept_pages` of the present ones, and then `page_ids`.

        The caller has retained and released the pages.
        """
        if page_ids or num_kept_pages != len(self._page_ids):
            self._page_ids[num_kept_pages:] = array("i", page_ids)
        self._num_computed, self._num_recomputed = num_computed, 0
        assert len(self._page_ids) == num_pages_for(self.num_rows) and num_computed <= len(self)

    def inherit_generated(self, generated: bytes) -> None:
        """Mark first tokens as generated if they are marked in the run where they were found."""
        own = self._generated[: len(generated)]
        self._generated[: len(generated)] = either(own, generated[: len(own)])

    def check(self) -> None:
        """Raise AssertionError unless tokens, KV length and pages agree."""
        assert 0 <= self._num_computed <= len(self) <= self.context_length
        assert len(self._page_ids) == num_pages_for(self.num_rows)
        if self._sparse is not None:
            assert self._sparse.stop <= self._num_computed
            assert tuple(self._token_ids[: self._sparse.stop]) == self._sparse.token_ids, "rows of other tokens"
        assert len(set(self._page_ids)) == len(self._page_ids)
        self.state.check(self._num_computed)
        assert len(self._generated) == len(self)
