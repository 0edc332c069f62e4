"""Learn which rows matter, order runs on disk by it, and read chosen rows: the `ChosenRows` of a disk tier.

Knows the tier's parts, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..artifact.manifest import PAGE_SIZE
from ..prefix.chosen_rows import WantedRows
from ..prefix.disk_tier import DiskTier
from ..store.chunk_cache import ChunkCache
from .attention_scores import AttentionScores
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache, ProbeKeyPrefetch
from .pruned_source import PrunedReads, PrunedSource
from .run_compactor import RunCompactor

CHUNK_CACHE_BYTES = 64 << 20  # of keys and values that are read often: a quarter of 11,000 tokens of SmolLM2


class Pruning:
    """See `ChosenRows`."""

    def __init__(
        self, tier: DiskTier, scores: AttentionScores, probe: ProbeForward, *, clock: Callable[[], float]
    ) -> None:
        page_bytes = tier.store.identity.page_bytes
        self._compactor = RunCompactor(tier.cache, tier.index, tier.writer, scores, page_bytes)
        known = ProbeKeyCache(chunks=ChunkCache(CHUNK_CACHE_BYTES))
        prefetch = ProbeKeyPrefetch(tier.reader, tier.read_ahead)
        self.reads = PrunedReads(tier.store, tier.reader, tier.rates, probe, known, prefetch, page_bytes, clock)

    @property
    def num_rewritten(self) -> int:
        """Runs that were stored in a better order."""
        return self._compactor.num_rewritten

    @property
    def num_dropped(self) -> int:
        """Runs that were not, because too many waited."""
        return self._compactor.num_dropped

    @property
    def num_read_bytes(self) -> int:
        """Bytes that closed sources asked of the disk."""
        return self.reads.num_read_bytes

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has a run to store, and the writer is idle."""
        return self._compactor.is_ready

    def advance(self) -> None:
        """Have the writer store the next run."""
        self._compactor.advance()

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """Note that a prompt is computed, of which the first `num_reused` tokens were found."""
        self._compactor.used(namespace, token_ids, num_reused=num_reused)

    def source(self, wanted: WantedRows) -> PrunedSource | None:
        """What reads rows for a request; None: one forward cannot probe with its prompt's end."""
        num_query_tokens = len(wanted.match.prompt_ids) - len(wanted.prefix.heads) * PAGE_SIZE
        return None if num_query_tokens > self.reads.probe.max_num_tokens else PrunedSource(wanted, self.reads)

    def read_ahead(self) -> None:
        """Read probe keys for later requests."""
        self.reads.prefetch.start()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop the runs that wait to be stored, and what memory keeps of runs, of one namespace or all."""
        self._compactor.forget(namespace)
        self.reads.forget(namespace)

    def close(self) -> None:
        """Close files; the reader has ended."""
        self.reads.prefetch.close()
