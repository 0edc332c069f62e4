"""A part of a prefix that came from disk for a request, and how its sequence begins with it.

Knows a match, rows and pages, not who chose the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .batch import PageIO, UInt8Array
from .completion import KVPruning
from .manifest import PAGE_SIZE
from .prefix_cache import PrefixCache
from .prefix_match import MatchKind, PrefixMatch
from .pruned_prefix import PrunedPrefix
from .sequence import Sequence


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

    @property
    def tokens_by_kind(self) -> dict[MatchKind, int]:
        """The tokens before `pruned.stop`, by how the disk's match found them: it ends with a page, the match may not,
        and the rest is taken for the weakest kind's."""
        left, counts = self.pruned.stop, {}
        for kind, count in self.match.tokens_by_kind.items():
            if taken := min(count, left):
                counts[kind] = taken
            left -= taken
        return counts

    def open(self, cache: PrefixCache, io: PageIO, *, context_length: int) -> tuple[Sequence, PrefixMatch] | None:
        """A sequence that begins with the rows, and the match that it stands for; None: memory has all of it now.

        Raises:
            OutOfPages, PrunedPrefixError: there is no room, or what is before the rows is cached no more.
        """
        pruned = self.pruned
        match = cache.match(self.match.prompt_ids, num_match=self.match.num_match, namespace=self.match.namespace)
        if match.num_tokens >= pruned.stop:
            return None
        sequence = cache.open_pruned(match, pruned, context_length=context_length)
        try:
            num_shared = pruned.start // PAGE_SIZE
            io.write_pages(list(sequence.page_ids[num_shared:]), self.pages)
        except BaseException:
            cache.close(sequence, keep=False)
            raise
        shared = match.pages[:num_shared]
        why = self.match.why_not_more
        return sequence, replace(
            match, tokens_by_kind=self.tokens_by_kind, pages=shared, partial=None, why_not_more=why
        )
