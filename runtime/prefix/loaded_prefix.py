"""A prompt whose prefix is searched for on disk, and the result: whole pages, or the rows that an extra offers instead.

Knows prompts by name, counts, positions, a match, a span of rows and pages. Does not know requests, how anything was
loaded, or how rows were selected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import Sequence
from ..cache.sparse_span import SparseSpan
from ..cache.why_not_more import MatchKind
from ..errors import SparseSpanError
from ..model.batch import PageIO, UInt8Array


@dataclass(frozen=True)
class LoadedPrefix:
    """The tokens `[start, stop)` of a prompt that came from disk, and memory's tokens before that, by kind.

    >>> LoadedPrefix(32, 96, {"exact": 32}).by_kind({"exact": 64, "text": 40}, num_tokens=104)
    {'exact': 32, 'text': 32}
    """

    start: int
    stop: int
    memory_by_kind: Mapping[MatchKind, int]

    def behind(self, num_computed: int) -> LoadedPrefix:
        """Return a copy without the first `num_computed` tokens of the prompt."""
        return replace(self, start=max(self.start, num_computed))

    def by_kind(self, found: Mapping[MatchKind, int], num_tokens: int) -> dict[MatchKind, int]:
        """Return how many of the reused tokens came from disk, by kind of match.

        Args:
            found: all `num_tokens` reused tokens, by kind. Their positions are not known: those that memory did not
                have before are attributed to the disk first.
        """
        left = max(0, min(self.stop, num_tokens) - self.start)
        counts = dict.fromkeys(found, 0)
        for most in ({kind: count - self.memory_by_kind.get(kind, 0) for kind, count in found.items()}, found):
            for kind, count in most.items():
                taken = max(0, min(count - counts[kind], left))
                counts[kind] += taken
                left -= taken
        return {kind: count for kind, count in counts.items() if count}


@dataclass(frozen=True, eq=False)
class LoadedRows:
    """An offer to begin the sequence with the KV rows of `span`, read from disk for the prompt of `match`.

    The rows are in `pages`, uint8 `[N, page_bytes]`. No other request can use them.

    Attributes:
        io: writes the pages to the pool.
        dropped_attention: estimated share of the prompt's attention to the prefix that falls on tokens without rows.
    """

    match: PrefixMatch
    span: SparseSpan
    pages: UInt8Array
    io: PageIO
    dropped_attention: float = 0.0

    def shared_pages(self, memory: PrefixMatch) -> tuple[int, ...]:
        """Return the pages of memory's match that the sequence shares: those before the rows."""
        return memory.pages[: self.span.start // PAGE_SIZE]

    @property
    def share(self) -> float:
        """Number of rows divided by the number of tokens before `span.stop`, above 0 and at most 1."""
        return (self.span.stop - self.span.num_missing) / self.span.stop

    def memory_match(self, cache: PrefixCache) -> PrefixMatch:
        """Match the ids of the rows in memory."""
        match = self.match
        return cache.match(match.prompt_ids, num_match=match.num_match, namespace=match.namespace)

    def open(self, cache: PrefixCache, *, context_length: int, request_id: str | None = None) -> Sequence:
        """Open a sequence of the match's prompt that begins with the rows.

        Raises:
            OutOfPages: there is no room.
            SparseSpanError: the pages before the rows are no longer cached, or memory has all their tokens by now.
        """
        span, match = self.span, self.memory_match(cache)
        if match.num_tokens >= span.stop:
            raise SparseSpanError(f"memory has {match.num_tokens} tokens of the prompt now; open it without {span!r}")
        sequence = cache.open(match, context_length=context_length, sparse=span, request_id=request_id)
        try:
            self.io.write_pages(list(sequence.page_ids[span.start // PAGE_SIZE :]), self.pages)
        except BaseException:
            cache.close(sequence, keep=False)
            raise
        return sequence

    def reuse(self, memory: PrefixMatch) -> tuple[PrefixMatch, LoadedPrefix]:
        """Return what a sequence opened in this way reuses, and the part that came from disk.

        The disk's match can extend beyond the rows, and `memory`, memory's match, beyond their beginning. Tokens that
        are not reused are subtracted from the weakest kind of match.
        """
        start, stop = self.span.start, self.span.stop
        match = replace(
            self.match,
            tokens_by_kind=_first(self.match.tokens_by_kind, stop),
            pages=self.shared_pages(memory),
            partial=None,
            version=memory.version,
        )
        return match, LoadedPrefix(start, stop, _first(memory.tokens_by_kind, start))


def _first(by_kind: Mapping[MatchKind, int], num_tokens: int) -> dict[MatchKind, int]:
    """Return the first `num_tokens` of these counts, strongest kinds first."""
    counts, left = {}, num_tokens
    for kind, count in by_kind.items():
        if taken := min(count, left):
            counts[kind] = taken
        left -= taken
    return counts


FindPrefix = Callable[[PrefixCache], PrefixMatch]
"""Match a prompt in a cache: the one in memory, or the one on disk."""


@dataclass(eq=False)
class PrefixLookup:
    """A prompt that is searched for on disk, and the result.

    Args:
        go_on: called when a waiting request can continue, with the pages from disk, or with rows that an extra offers.
        met: called with the loaded prefix and the disk's match, when the end of the prompt was loaded from disk. The
            request was prefilling or queued at that time.
        num_tokens_ahead: tokens that are computed before a request that does not wait; None if unknown.
        options: the request's options for an extra.
    """

    name: str
    find: FindPrefix
    go_on: Callable[[LoadedPrefix | None, LoadedRows | None], None]
    met: Callable[[LoadedPrefix, PrefixMatch], None]
    num_tokens_ahead: int | None = None
    options: object = None
    is_abandoned: bool = False
    num_tries: int = 0
    match: PrefixMatch | None = None  # on disk, at the last try
    num_in_memory: int = 0  # pages in memory before the first try
    memory_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)  # tokens in memory before the first try
    loaded: LoadedPrefix | None = None
