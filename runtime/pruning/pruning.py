"""Choose rows of stored prefixes for a disk tier: its `ChosenRows`.

Knows the tier's parts, not requests.
"""

from __future__ import annotations

from collections.abc import Callable

from ..prefix.disk_tier import DiskTier
from ..store.chunk_cache import ChunkCache
from .attention_scores import AttentionScores
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache
from .pruned_source import PrunedSources
from .run_compactor import RunCompactor

CHUNK_CACHE_BYTES = 64 << 20  # of keys and values that are read often: a quarter of 11,000 tokens of SmolLM2


class Pruning:
    """Has runs stored in the order of `scores`, and reads rows by that order and by probes.

    Attributes:
        order: the first; a `RunOrder`.
        sources: the second; `RowSources`.
    """

    def __init__(
        self, tier: DiskTier, scores: AttentionScores, probe: ProbeForward, *, clock: Callable[[], float]
    ) -> None:
        page_bytes = tier.store.identity.page_bytes
        self.order = RunCompactor(tier.cache, tier.index, tier.writer, scores, page_bytes)
        known = ProbeKeyCache(chunks=ChunkCache(CHUNK_CACHE_BYTES))
        self.sources = PrunedSources(
            tier.store, tier.reader, tier.rates, probe, known, page_bytes=page_bytes, clock=clock, idle=tier.read_ahead
        )
