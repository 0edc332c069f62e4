"""A request in the queue: its cached prefix, the pages loaded from disk for it, and whether it fits.

Knows one request, the cache and the planned step, not the order of requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.page_pool import num_pages_for
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import Sequence
from ..errors import KVError
from ..prefix.loaded_prefix import LoadedPrefix, LoadedRows
from .completion import KVPruning, PrefixReuse
from .request import Request
from .step.plan import AdmissionPolicy, StepPlan


class RequestBroken(Exception):
    """The failure of matching one waiting request: it can only fail, and nothing else is changed."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


def find_prefix(cache: PrefixCache, request: Request, context_length: int) -> PrefixMatch:
    """Return the longest reuse that the request allows; ids that leave no room for a reply are not used."""
    prompt, spelled = request.prompt, request.spec.spelled
    match = cache.match(
        prompt.ids,
        num_match=prompt.num_match,
        namespace=request.namespace,
        num_known=prompt.num_known,
        spelled=spelled,
    )
    if len(match.prompt_ids) < context_length or spelled is None:
        return match
    return cache.match(prompt.ids, num_match=prompt.num_match, namespace=request.namespace, num_known=prompt.num_known)


@dataclass(eq=False)
class WaitingRequest:
    """A request in the scheduler's queue.

    Attributes:
        loaded: whole pages that were loaded from disk while it waited.
        rows: rows that an extra offers; its sequence begins with them.
        match: the cached prefix; None: not matched yet.
        is_final: the match considers all kinds that the request allows, and the tree is unchanged since.
        num_common: by sequence and its length, number of tokens of whole pages that the match's prompt shares with it.
    """

    request: Request
    loaded: LoadedPrefix | None = None
    rows: LoadedRows | None = None
    match: PrefixMatch | None = None
    is_final: bool = False
    num_common: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_cached_tokens(self) -> int:
        """Number of the prompt's tokens that need not be computed, as far as is known."""
        if self.rows is not None:
            return self.rows.span.stop
        return 0 if self.match is None else self.match.num_tokens

    def score(self, *, now: float, ageing: float) -> float:
        """Return the priority: cached tokens, plus `ageing` for each second of waiting."""
        return self.num_cached_tokens + ageing * max(0.0, now - self.request.spec.arrived_at)

    def current_match(self, cache: PrefixCache, context_length: int) -> PrefixMatch:
        """Return the match, updated to the current tree: matching by text each time is too slow."""
        match, rows = self.match, self.rows
        if match is None and rows is not None:  # of the ids of the rows, which matching by text may change
            match = rows.memory_match(cache)
        elif match is None:
            match = self.match_prefix(cache, context_length)
        elif match.version != cache.tree.version:
            match = cache.match_again(match)
            self.is_final = False
        self.match = match
        if rows is not None and match.num_tokens >= rows.span.stop:
            self.rows = None  # memory has all their tokens now
        return match

    def match_prefix(self, cache: PrefixCache, context_length: int) -> PrefixMatch:
        """Match the prompt, by all kinds that the request allows."""
        self.match, self.is_final = find_prefix(cache, self.request, context_length), True
        self.num_common.clear()  # it belongs to the ids of another match
        return self.match

    def waits_for(self, sequence: Sequence) -> bool:
        """Return whether a running sequence computes more whole pages of the match's prompt than the match has.

        If so, a recurrent model will leave a state after them.
        """
        match = self.match
        assert match is not None, "the prompt was not matched"
        if sequence.num_uncomputed == 1 or sequence.namespace is None or sequence.namespace != match.namespace:
            return False
        limit = min(match.num_match, len(match.prompt_ids) - 1)
        # no other request finds what is computed after offered rows
        if sequence.sparse is not None or sequence.num_computed >= limit or match.num_tokens >= limit:
            return False
        place = sequence.seq_id, len(sequence)
        if place not in self.num_common:  # compared once: neither changes during prefill
            self.num_common[place] = _num_common(match, sequence, min(limit, len(sequence)))
        num_common = self.num_common[place]
        if num_common <= max(match.num_tokens, sequence.num_computed):
            return False
        sequence.state.want_at(num_common)
        return True

    def open(self, cache: PrefixCache, match: PrefixMatch, context_length: int) -> Sequence | None:
        """Open the request's sequence.

        None if it cannot begin with the rows that were loaded for it: the request continues to wait, without them.
        """
        request_id = self.request.request_id
        if self.rows is None:
            return cache.open(match, context_length=context_length, request_id=request_id)
        try:
            return self.rows.open(cache, context_length=context_length, request_id=request_id)
        except KVError:
            self.drop_rows()
            return None

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Give the request the sequence that `open` made for a match."""
        loaded, pruning = self.loaded, None
        if self.rows is not None:
            match, loaded = self.rows.reuse(match)
            pruning = KVPruning(self.rows.share, self.rows.dropped_attention)
        from_disk = {} if loaded is None else loaded.by_kind(match.tokens_by_kind, match.num_tokens)
        reuse = PrefixReuse(match.tokens_by_kind, from_disk, match.why_not_more, pruning)
        self.request.admit(sequence, match, reuse)

    def drop_rows(self) -> None:
        """Continue as if no rows had been loaded."""
        self.rows = self.match = None
        self.is_final = False


def _num_common(match: PrefixMatch, sequence: Sequence, limit: int) -> int:
    """Return how many tokens of whole pages two prompts share, at most `limit`.

    A page that both have at the same position holds the same tokens, and so do all before it: only tokens after it are
    compared.
    """
    num_shared = min(len(match.pages), len(sequence.page_ids))
    if not num_shared or match.pages[num_shared - 1] != sequence.page_ids[num_shared - 1]:
        num_shared = 0
    ids, num_common = sequence.token_ids, num_shared * PAGE_SIZE
    while num_common + PAGE_SIZE <= limit:
        page = slice(num_common, num_common + PAGE_SIZE)
        if tuple(match.prompt_ids[page]) != tuple(ids[page]):
            break
        num_common += PAGE_SIZE
    return min(num_common, limit // PAGE_SIZE * PAGE_SIZE)


@dataclass(frozen=True)
class Admission:
    """Decides which requests enter the pool of `cache`, whose sequences have at most `context_length` tokens."""

    cache: PrefixCache
    policy: AdmissionPolicy
    context_length: int

    def choose(
        self, waiting: Iterable[WaitingRequest], running: Iterable[Request], score: Callable[[WaitingRequest], float]
    ) -> tuple[WaitingRequest, PrefixMatch] | None:
        """Return the waiting request with the highest score, the first on ties.

        Skips requests while a running one computes more of their prompt, because that one computes it for both.

        Raises:
            RequestBroken: matching one of them raised.
        """
        running = list(running)
        best: tuple[WaitingRequest, PrefixMatch] | None = None
        best_score = 0.0
        for each in waiting:
            try:
                match = each.current_match(self.cache, self.context_length)
            except Exception as error:
                raise RequestBroken(each.request) from error
            if each.rows is None and any([each.waits_for(other.admitted) for other in running]):
                continue
            if best is None or score(each) > best_score:
                best, best_score = (each, match), score(each)
        return best

    def fits(
        self,
        request: Request,
        match: PrefixMatch,
        rows: LoadedRows | None,
        plan: StepPlan,
        running: Iterable[Request],
    ) -> bool:
        """Return whether there are pages for a request that begins with this match, or with offered rows.

        Admitted earlier, it would only be preempted again. A request that is alone always fits.
        """
        running = list(running)
        if not running:
            return True
        states = self.cache.states
        if states is not None and states.num_available < len(running) + 2:
            return False  # each of them writes a state in the next step, and this one reads one, too
        windows = self.cache.pool.windows
        if windows is not None and not windows.has_room_for(len(running) + 1, plan.max_num_tokens):
            return False
        pool, shared, num_missing = self.cache.pool, match.pages, 0
        if rows is not None:
            shared, num_missing = rows.shared_pages(match), rows.span.num_missing
        num_needed = self._num_pages(request, len(match.prompt_ids), num_missing, has_prompt=False) - len(shared)
        # sequences that use a page use all pages before it, so unused ones are the last
        num_used = bisect_left(shared, True, key=lambda page: pool.num_users(page) == 0)
        num_evictable = pool.num_cached - (len(shared) - num_used)
        num_promised = sum(max(0, self._num_needed_pages(each) - plan.num_held_pages(each)) for each in running)
        return num_needed <= pool.num_free + num_evictable - num_promised

    def _num_needed_pages(self, request: Request) -> int:
        """Return the most pages that a running request may need, those that it holds included."""
        sequence = request.admitted
        num_missing = sequence.num_computed - sequence.num_rows
        return self._num_pages(request, len(sequence), num_missing, has_prompt=sequence.num_uncomputed == 1)

    def _num_pages(self, request: Request, num_tokens: int, num_missing: int, *, has_prompt: bool) -> int:
        """Return the pages for a sequence of `num_tokens`, of which `num_missing` have no rows, and for the reply.

        The last token of a reply is never computed, that of a prompt always is. Until the prompt is, the rows of a page
        that is partly reused can exist twice for a moment.
        """
        if self.policy == "optimistic":
            return num_pages_for(num_tokens + 1 - num_missing)
        max_length = request.max_length_of(num_tokens, self.context_length)
        return num_pages_for(max(num_tokens, max_length - 1) - num_missing) + (not has_prompt)
