"""What the engine tells of itself: for `/health`, metrics and the curious."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .latency_histogram import LatencyCounts
from .tier_stats import TierStats


@dataclass(frozen=True)
class EngineStats:
    """The engine's state now and what it did since it was opened."""

    alive: bool  # the owner thread runs
    stalled_s: float  # seconds since something got on while there is work; 0.0 when idle
    uptime_s: float
    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int  # held by the prefix cache alone, can be evicted
    num_steps: int
    num_finished: int
    num_failed: int
    num_rejected: int  # the queue was full
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    crash: str | None = None  # the kind of error that the owner thread died of
    num_computed_tokens: int = 0  # that went through the model: of prompts, and generated
    num_evicted_pages: int = 0
    num_failed_steps: int = 0
    num_failed_steps_in_a_row: int = 0  # up to now
    last_failure: str | None = None  # the kind of error that the last failed step raised
    num_unused_request_rows: int = 0  # of 16 a page: in pages of running requests, and no token is in them
    num_unused_cache_rows: int = 0  # likewise in pages that only the cache holds
    finished_by_reason: Mapping[str, int] = field(default_factory=dict)
    failed_by_type: Mapping[str, int] = field(default_factory=dict)
    cached_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    disk_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # of those, loaded for the request
    tier: TierStats | None = None  # None: there is no store
    to_first_token: LatencyCounts = field(default_factory=LatencyCounts)
    between_tokens: LatencyCounts = field(default_factory=LatencyCounts)
    to_end: LatencyCounts = field(default_factory=LatencyCounts)

    @property
    def num_used_pages(self) -> int:
        """Pages that requests hold."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages
