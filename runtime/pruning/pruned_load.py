"""A part of a prefix that came from disk for a request, and how its sequence begins with it.

Knows a match, rows and pages; not requests, nor who chose the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import MatchKind, PrefixMatch
from ..cache.pruned_prefix import PrunedPrefix
from ..cache.sequence import Sequence
from ..errors import PrunedPrefixError
from ..model.batch import PageIO, UInt8Array
from ..prefix.loaded_prefix import LoadedPrefix


@dataclass(frozen=True)
class KVPruning:
    """Of a cached prefix only the part that matters most was loaded: the reply is near what it would be, not exact."""

    loaded: float  # the share of the cached tokens' keys and values that is there
    dropped_mass: float  # estimated: the share of the prompt's attention to the prefix that the others would have got


@dataclass(frozen=True)
class PrunedLoad:
    """The rows of `pruned`, in `pages`, uint8 `[N, page_bytes]`; `match` is what the disk has of the prompt."""

    match: PrefixMatch
    pruned: PrunedPrefix
    pages: UInt8Array
    dropped_mass: float  # estimated share of the prompt's attention to the tokens that are not there

    @property
    def label(self) -> KVPruning:
        """What the reply says of it."""
        pruned = self.pruned
        return KVPruning((pruned.stop - pruned.num_missing) / pruned.stop, self.dropped_mass)

    def open(self, cache: PrefixCache, io: PageIO, *, context_length: int, request_id: str | None = None) -> Sequence:
        """A sequence of the match's prompt that begins with the rows.

        Raises:
            OutOfPages: there is no room.
            PrunedPrefixError: what is before the rows is cached no more, or memory has by now all that they are of.
        """
        pruned = self.pruned
        match = self.candidate(cache)
        if match.num_tokens >= pruned.stop:
            raise PrunedPrefixError(
                f"memory has {match.num_tokens} tokens of the prompt now; open it without {pruned!r}"
            )
        sequence = cache.open_pruned(match, pruned, context_length=context_length, request_id=request_id)
        try:
            io.write_pages(list(sequence.page_ids[pruned.start // PAGE_SIZE :]), self.pages)
        except BaseException:
            cache.close(sequence, keep=False)
            raise
        return sequence

    def candidate(self, cache: PrefixCache) -> PrefixMatch:
        """What memory has of the very ids that the rows are of."""
        match = self.match
        return cache.match(match.prompt_ids, num_match=match.num_match, namespace=match.namespace)

    def found(self, memory: PrefixMatch) -> tuple[PrefixMatch, LoadedPrefix]:
        """What a sequence that was opened so reuses, and what of it came from disk; `memory` is what memory had.

        The disk's match may go on behind the rows, and memory's behind their beginning: what is not reused is taken for
        the weakest kind's.
        """
        start, stop = self.pruned.start, self.pruned.stop
        match = replace(
            self.match,
            tokens_by_kind=_first(self.match.tokens_by_kind, stop),
            pages=memory.pages[: start // PAGE_SIZE],
            partial=None,
            version=memory.version,
        )
        return match, LoadedPrefix(start, stop, _first(memory.tokens_by_kind, start))


def _first(by_kind: Mapping[MatchKind, int], num_tokens: int) -> dict[MatchKind, int]:
    """So many of them, strongest kinds first."""
    counts, left = {}, num_tokens
    for kind, count in by_kind.items():
        if taken := min(count, left):
            counts[kind] = taken
        left -= taken
    return counts
