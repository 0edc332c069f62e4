"""Say which cached tokens of a request came from disk, by the kinds by which they were found.

Knows counts and positions, not how anything was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..cache.prefix_match import MatchKind


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
