"""The engine's statistics, for `/health`, metrics and humans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..cache.window_rows import WindowStats
from ..prefix.tier_hooks import TierStats
from ..speculation.draft_model import DraftStats
from ..states.state_pool import StateStats
from .counters import LatencyCounts

if TYPE_CHECKING:
    from .engine_core import EngineCore
    from .engine_loop import EngineLoop


@dataclass(frozen=True)
class EngineStats:
    """The engine's current state, and counters since it was opened."""

    alive: bool  # the engine's thread runs
    stalled_s: float  # seconds since the last progress while there is work; 0.0 when idle
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
    crash: str | None = None  # the kind of error that killed the engine's thread for good
    num_restarts: int = 0  # restarts of the engine's thread; after its second death it stays dead
    restarted_after: str | None = None  # the kind of error that killed it, until a step computes something
    context_length: int = 0  # tokens of prompt and reply together
    memory_bytes: int = 0  # of weights, KV cache and states
    context_notice: str | None = None  # why that is less than the model's, unless it was requested
    num_drafted_tokens: int = 0  # draft tokens that were verified
    num_accepted_tokens: int = 0  # of those, the accepted ones
    draft: DraftStats | None = None  # None: there is no draft model or MTP head
    num_computed_tokens: int = 0  # tokens that went through the model: of prompts, and generated
    num_idle_tokens: int = 0  # of expected prompts, computed while idle
    num_evicted_pages: int = 0
    states: StateStats | None = None  # None: the model keeps none
    windows: WindowStats | None = None  # None: all pages have the rows of sliding windows, or there are no windows
    num_failed_steps: int = 0
    num_failed_steps_in_a_row: int = 0  # up to now
    last_failure: str | None = None  # the kind of error that the last failed step raised
    num_unused_request_rows: int = 0  # of 16 a page: in pages of running requests, without a token
    num_unused_cache_rows: int = 0  # the same, in pages that only the cache holds
    finished_by_reason: Mapping[str, int] = field(default_factory=dict)
    failed_by_type: Mapping[str, int] = field(default_factory=dict)
    cached_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    disk_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # of those, loaded from disk for the request
    tier: TierStats | None = None  # None: there is no store
    store_off_because: str | None = None  # why there is no tier, although a store was requested
    in_queue: LatencyCounts = field(default_factory=LatencyCounts)
    to_first_token: LatencyCounts = field(default_factory=LatencyCounts)
    between_tokens: LatencyCounts = field(default_factory=LatencyCounts)
    to_end: LatencyCounts = field(default_factory=LatencyCounts)

    @classmethod
    def of(
        cls,
        core: EngineCore,
        loop: EngineLoop,
        *,
        uptime_s: float,
        memory_bytes: int = 0,
        context_notice: str | None = None,
    ) -> EngineStats:
        """Return the statistics of an engine's core and loop, in any thread; never waits for a step."""
        counters, cache = core.counters, core.cache
        return cls(
            alive=loop.is_alive,
            crash=loop.crash,
            num_restarts=counters.num_restarts,
            restarted_after=counters.restarted_after,
            context_length=core.limits.context_length,
            memory_bytes=memory_bytes,
            context_notice=context_notice,
            stalled_s=loop.queue.stalled_s,
            uptime_s=uptime_s,
            num_waiting=core.num_waiting + loop.queue.num_submitted,
            num_running=core.num_running,
            num_pages=cache.pool.num_pages,
            num_free_pages=cache.pool.num_free,
            num_cached_pages=cache.pool.num_cached,
            num_steps=counters.num_steps,
            num_finished=counters.num_finished,
            num_failed=counters.num_failed,
            num_rejected=loop.queue.num_rejected,
            num_preemptions=core.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_drafted_tokens=counters.num_drafted_tokens,
            num_accepted_tokens=counters.num_accepted_tokens,
            draft=core.memories.stats(DraftStats),
            num_computed_tokens=counters.num_computed_tokens,
            num_idle_tokens=0 if core.expected is None else core.expected.num_tokens,
            num_evicted_pages=cache.tree.eviction.num_evicted_pages,
            states=None if cache.states is None else cache.states.stats(),
            windows=None if (windows := cache.pool.windows) is None else windows.stats(),
            num_failed_steps=counters.num_failed_steps,
            num_failed_steps_in_a_row=counters.num_failed_steps_in_a_row,
            last_failure=counters.last_failure,
            num_unused_request_rows=cache.sequences.num_unused_rows,
            num_unused_cache_rows=cache.tree.num_unused_rows,
            finished_by_reason=dict(counters.finished_by_reason),
            failed_by_type=dict(counters.failed_by_type),
            cached_tokens_by_kind=dict(counters.cached_tokens_by_kind),
            disk_tokens_by_kind=dict(counters.disk_tokens_by_kind),
            tier=core.memories.stats(TierStats),
            store_off_because=core.store_off_because,
            in_queue=counters.in_queue.read(),
            to_first_token=counters.to_first_token.read(),
            between_tokens=counters.between_tokens.read(),
            to_end=counters.to_end.read(),
        )

    @property
    def num_used_pages(self) -> int:
        """Number of pages that requests hold."""
        return self.num_pages - self.num_free_pages - self.num_cached_pages
