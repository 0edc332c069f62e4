"""Put together what learns which rows matter, orders runs by it, and loads chosen rows: the `ChosenRows` of a tier.

Knows the tier's parts, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..prefix.disk_tier import DiskTier
from ..store.chunk_cache import ChunkCache
from .attention_scores import AttentionScores
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache, ProbeKeyPrefetch
from .pruned_loader import PrunedLoader
from .pruned_source import PrunedReads
from .run_compactor import RunCompactor

CHUNK_CACHE_BYTES = 64 << 20  # of keys and values that are read often: a quarter of 11,000 tokens of SmolLM2


class Pruning:
    """See `ChosenRows`.

    Attributes:
        parts: loads chosen rows; None without a probe.
    """

    def __init__(
        self, tier: DiskTier, scores: AttentionScores, probe: ProbeForward | None, *, clock: Callable[[], float]
    ) -> None:
        page_bytes = tier.store.identity.page_bytes
        self._compactor = RunCompactor(tier.cache, tier.index, tier.writer, scores, page_bytes)
        self.parts: PrunedLoader | None = None
        if probe is not None:
            known = ProbeKeyCache(chunks=ChunkCache(CHUNK_CACHE_BYTES))
            prefetch = ProbeKeyPrefetch(tier.reader, known.discard, tier.advance_chosen)
            reads = PrunedReads(tier.store, tier.reader, tier.rates, probe, known, prefetch, page_bytes, clock)
            self.parts = PrunedLoader(tier.cache, tier.index, reads, tier.queue, tier.advance_chosen)

    @property
    def num_rewritten(self) -> int:
        """Runs that were stored in a better order."""
        return self._compactor.num_rewritten

    @property
    def num_dropped(self) -> int:
        """Runs that were not, because too many waited."""
        return self._compactor.num_dropped

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

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop the runs that wait to be stored, of one namespace or all."""
        self._compactor.forget(namespace)
