"""What approximate loading tells of itself: for metrics and the curious."""

from __future__ import annotations

from dataclasses import dataclass, field

from .records.chunk_cache import ChunkCacheStats


@dataclass
class ChosenCounts:
    """What became of the requests for which a share of the rows is enough; all but the first were served exactly."""

    num_loaded: int = 0
    num_refused: int = 0  # all was as quick, there was no room, or the prompt does not suit
    num_disagreed: int = 0  # too much of the prompt's attention would have been dropped
    num_broken: int = 0  # some pages have no ordered run, or one that is not right, or there was no page
    num_late: int = 0
    num_tokens: int = 0  # of the prefixes that were loaded in part
    num_missing_bytes: int = 0  # of their keys and values, what was left out


@dataclass(frozen=True)
class PartStats:
    """What became of parts of prefixes since the tier was opened."""

    chosen: ChosenCounts = field(default_factory=ChosenCounts)
    num_rewritten_runs: int = 0  # stored in a better order, too
    num_dropped_rewrites: int = 0  # were to be, and too many waited
    num_promoted: int = 0  # prefixes that came to memory whole, because parts of them were asked for often
    chunks: ChunkCacheStats | None = None  # what memory keeps of runs; None: nothing
