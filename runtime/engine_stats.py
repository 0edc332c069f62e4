"""What the engine tells of itself: for `/health`, metrics and the curious."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """The engine's state now and what it did since it was opened."""

    alive: bool  # the owner thread runs
    stalled_s: float  # seconds since the last finished step while there is work; 0.0 when idle
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
