"""Count what an engine core does.

Counted by the thread of the core; any thread may read. Knows numbers, not what they are shown on.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .completion import Usage
from .latency_histogram import FAST_S, SLOW_S, LatencyHistogram


@dataclass
class CoreCounters:
    """What was done since the start; prompt and cached tokens are those of finished requests."""

    num_steps: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0  # that went through the model: of prompts, and generated
    num_failed_steps: int = 0
    num_failed_steps_in_a_row: int = 0  # up to now
    last_failure: str | None = None  # the kind of error that the last failed step raised
    num_restarts: int = 0  # after the thread died
    restarted_after: str | None = None  # the kind of error that it died of, until a step computes something
    finished_by_reason: Counter[str] = field(default_factory=Counter)
    failed_by_type: Counter[str] = field(default_factory=Counter)
    cached_tokens_by_kind: Counter[str] = field(default_factory=Counter)
    disk_tokens_by_kind: Counter[str] = field(default_factory=Counter)  # of those, loaded for the request
    in_queue: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))
    to_first_token: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))
    between_tokens: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(FAST_S))
    to_end: LatencyHistogram = field(default_factory=lambda: LatencyHistogram(SLOW_S))

    @property
    def progress(self) -> int:
        """Rises with every token that is computed and every request that ends, however it does."""
        return self.num_computed_tokens + self.num_finished + self.num_failed

    def count_step(self, num_tokens: int) -> None:
        """A step was computed and committed."""
        self.num_steps += 1
        if num_tokens:
            self.num_computed_tokens += num_tokens
            self.num_failed_steps_in_a_row, self.restarted_after = 0, None

    def count_failed_step(self, error: Exception) -> None:
        """A step raised."""
        self.num_failed_steps += 1
        self.num_failed_steps_in_a_row += 1
        self.last_failure = type(error).__name__

    def count_start(self, queue_s: float) -> None:
        """A request takes part in its first step, so long after it arrived."""
        self.in_queue.observe(queue_s)

    def count_restart(self, cause: BaseException) -> None:
        """The thread died, and everything starts over."""
        self.num_restarts += 1
        self.restarted_after = type(cause).__name__

    def count_token(self, now: float, arrived_at: float, before: float | None) -> None:
        """A request got a token, its first one if there is none `before`; in seconds on the core's clock."""
        self.num_generated_tokens += 1
        if before is None:
            self.to_first_token.observe(now - arrived_at)
        else:
            self.between_tokens.observe(now - before)

    def count_finished(self, usage: Usage, reason: str, total_s: float, *, was_admitted: bool) -> None:
        """A request ended with a completion; if it was never admitted, its prompt was not looked up either."""
        self.num_finished += 1
        self.finished_by_reason[reason] += 1
        if not was_admitted:
            return
        self.to_end.observe(total_s)
        self.num_prompt_tokens += usage.prompt_tokens
        self.num_cached_tokens += usage.cached_tokens
        self.cached_tokens_by_kind.update(usage.tokens_by_kind)
        self.disk_tokens_by_kind.update(usage.disk_tokens_by_kind)

    def count_failed(self, error: Exception) -> None:
        """A request ended with an error."""
        self.num_failed += 1
        self.failed_by_type[type(error).__name__] += 1
