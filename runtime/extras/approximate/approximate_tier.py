"""Add approximate KV loading to a disk tier: its `TierExtra`.

Knows the tier's parts, not requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...artifact.manifest import Manifest
from ...cache.prefix_cache import PrefixCache
from ...errors import InvalidParameter
from ...model.batch import Runner
from ...prefix.disk_tier import DiskTier
from ...prefix.transfer import PageInserter
from .attention_scores import AttentionScores, ScoredRunner, ScoringRunner
from .calibration.calibration import Calibration
from .chosen_loader import ChosenLoader
from .chosen_rows import PartStats
from .packed_keys import kept_dims
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache
from .promoter import Promoter
from .pruned_source import PrunedSources
from .records.chunk_cache import ChunkCache
from .records.row_records import RowRecords
from .run_compactor import MIN_PAGES, RUN_BYTES, RunCompactor
from .score_keeper import ScoreKeeper
from .score_updater import ScoreUpdater

CHUNK_CACHE_BYTES = 64 << 20  # of frequently read KV: a quarter of 11,000 tokens of SmolLM2


def score(runner: Runner) -> ScoredRunner:
    """Return a wrapper of the runner that also records the attention to each KV row.

    Raises:
        InvalidParameter: the runner has no `forward_scored`.
        EngineError: it was opened without `keep_scores`.
    """
    if not isinstance(runner, ScoringRunner):
        raise InvalidParameter(f"{type(runner).__name__} cannot score, which a kv_budget needs; open without it")
    return ScoredRunner(runner)


def choose_rows(
    manifest: Manifest,
    calibration: Calibration,
    cache: PrefixCache,
    runner: ScoredRunner,
    chunk_cache_bytes: int | None = None,
    *,
    clock: Callable[[], float],
) -> Callable[[DiskTier], ApproximateTier]:
    """Return a factory of the `TierExtra` for a tier of this cache and a calibrated model.

    Args:
        chunk_cache_bytes: memory for frequently read KV; 0: none; None: `CHUNK_CACHE_BYTES`.
    """
    num_bytes = CHUNK_CACHE_BYTES if chunk_cache_bytes is None else chunk_cache_bytes
    known = ProbeKeyCache(kept_dims(manifest), chunks=ChunkCache(num_bytes) if num_bytes else None)
    group_size = manifest.model.num_attention_heads // manifest.kv.num_kv_heads
    probe = ProbeForward(cache, runner, max_num_tokens=manifest.module.max_num_tokens, group_size=group_size)
    return lambda tier: ApproximateTier(tier, runner.scores, probe, calibration, known, clock=clock)


class ApproximateTier:
    """Stores runs in the order of `scores`, and reads rows by that order and by probes.

    Attributes:
        records: the records stored besides pages.
        observer: stores the runs.
        sources: reads rows for `offers`.
    """

    def __init__(
        self,
        tier: DiskTier,
        scores: AttentionScores,
        probe: ProbeForward,
        calibration: Calibration,
        known: ProbeKeyCache,
        *,
        clock: Callable[[], float],
    ) -> None:
        page_bytes = tier.store.identity.page_bytes
        self.records = records = RowRecords.of(tier.store)
        step = max(MIN_PAGES, RUN_BYTES // page_bytes)
        updater = ScoreUpdater(records, tier.cache, tier.writer, scores, step, calibration.probe_head, known.pack)
        promoter = Promoter(PageInserter(tier.cache, probe.runner), tier.reader, tier.read_ahead, clock)
        keeper = ScoreKeeper(records, tier.cache, tier.index, tier.writer, tier.reader, scores)
        self.observer = RunCompactor(
            *(tier.cache, tier.index, tier.writer, scores, keeper, updater, page_bytes),
            calibration.probe_head,
            tier.saver.go_on,
        )
        self.sources = PrunedSources(
            *(records, tier.reader, tier.rates, probe, known),
            page_bytes=page_bytes,
            max_dropped_attention=calibration.max_dropped_attention,
            least_share=calibration.least_budget,
            clock=clock,
            idle=tier.read_ahead,
            updater=updater,
            promoter=promoter,
        )
        self.offers = ChosenLoader(
            *(self.sources, tier.cache, tier.index, tier.reader, tier.rates, tier.queue),
            clock=clock,
            ready=tier.go_on,
            send_back=tier.load_pages,
            ended=tier.load_ended,
        )

    @property
    def num_read_bytes(self) -> int:
        """Bytes requested from disk for chosen rows."""
        return self.sources.num_read_bytes

    def stats(self) -> PartStats:
        """Return the current counts, in any thread."""
        return PartStats(
            chosen=replace(self.offers.counts),
            num_rewritten_runs=self.observer.num_rewritten,
            num_dropped_rewrites=self.observer.num_dropped,
            num_promoted=self.sources.promoter.num_promoted,
            chunks=self.sources.chunks,
        )
