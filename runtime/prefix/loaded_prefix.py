"""A prompt whose prefix is looked for on disk, and what came: whole pages, or the rows that an extra offers instead.

Knows prompts by name, counts, positions, a match, a span of rows and pages; neither requests, nor how anything was
loaded, nor which rows were chosen and why.
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
    """The tokens `[start, stop)` of a prompt came from disk while it waited; what memory had before, by kind.

    >>> LoadedPrefix(32, 96, {"exact": 32}).by_kind({"exact": 64, "text": 40}, num_tokens=104)
    {'exact': 32, 'text': 32}
    """

    start: int
    stop: int
    memory_by_kind: Mapping[MatchKind, int]

    def behind(self, num_computed: int) -> LoadedPrefix:
        """The same without the first `num_computed` tokens of the prompt."""
        return replace(self, start=max(self.start, num_computed))

    def by_kind(self, found: Mapping[MatchKind, int], num_tokens: int) -> dict[MatchKind, int]:
        """How many of the tokens that were reused came from disk, of each kind.

        Args:
            found: all `num_tokens` that were reused, by kind. Where they lie is not known: those that memory did not
                have before are taken for the disk's first.
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
    """An offer: begin the sequence with the rows of `span`, in `pages`, uint8 `[N, page_bytes]`, of the prompt of
    `match`, which the disk gave.

    No other request may use the rows.

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
        """The pages of memory's match that the sequence shares: those before the rows."""
        return memory.pages[: self.span.start // PAGE_SIZE]

    @property
    def share(self) -> float:
        """Rows for each token before `span.stop`, above 0 and at most 1."""
        return (self.span.stop - self.span.num_missing) / self.span.stop

    def memory_match(self, cache: PrefixCache) -> PrefixMatch:
        """What memory has of the ids that the rows are of."""
        match = self.match
        return cache.match(match.prompt_ids, num_match=match.num_match, namespace=match.namespace)

    def open(self, cache: PrefixCache, *, context_length: int, request_id: str | None = None) -> Sequence:
        """A sequence of the match's prompt that begins with the rows.

        Raises:
            OutOfPages: there is no room.
            SparseSpanError: what is before the rows is no longer cached, or memory has all their tokens by now.
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
        """What a sequence that was opened so reuses, and which of it came from disk.

        The disk's match may reach behind the rows, and `memory`, memory's match, behind their beginning. The tokens
        that are not reused are counted off the weakest kind of match.
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
    """The first `num_tokens` of these counts, strongest kinds first."""
    counts, left = {}, num_tokens
    for kind, count in by_kind.items():
        if taken := min(count, left):
            counts[kind] = taken
        left -= taken
    return counts


FindPrefix = Callable[[PrefixCache], PrefixMatch]
"""What a request may reuse of a cache: of the one in memory, and of the one on disk."""


@dataclass(eq=False)
class Wanted:
    """A prompt that is looked for on disk, and what was found.

    Args:
        go_on: called when a request that waits need wait no longer, with what came from disk: pages, or rows that
            an extra offers.
        met: called with what the disk had of the prompt, when the prompt's end has come from there while the request
            computed or was still queued.
        num_tokens_ahead: that are computed before a request that does not wait; None: not known.
        options: what the request asks for, as an extra may know it.
    """

    name: str
    find: FindPrefix
    go_on: Callable[[LoadedPrefix | None, LoadedRows | None], None]
    met: Callable[[LoadedPrefix, PrefixMatch], None]
    num_tokens_ahead: int | None = None
    options: object = None
    is_abandoned: bool = False
    num_tries: int = 0
    match: PrefixMatch | None = None  # of the disk, at the last try
    num_in_memory: int = 0  # pages, before the first try
    memory_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)  # likewise
    loaded: LoadedPrefix | None = None
