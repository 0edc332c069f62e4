"""Measure the speed of an engine as a caller of `Engine` sees it: from the call until a token is delivered.

Prompts are token ids. Knows streams and clocks, not what is measured with them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixlm.runtime import SamplingParams

if TYPE_CHECKING:
    from radixlm.runtime import Engine

_LOWEST = 1000  # special tokens and single bytes have lower ids


class EngineTimer:
    """Measures requests to one engine, which has no other requests at the same time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def prefill(self, prompt: Sequence[int]) -> float:
        """Return the seconds to the first token of a prompt that shares no prefix with earlier ones."""
        return self.first_token_s(prompt, num_cached=0)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Return the decode rate in tokens per second, without the first token."""
        speed = self.engine.generate(prompt, greedy(num_tokens)).timings.decode_tokens_per_s
        assert speed is not None
        return speed

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Return the decode rate of all prompts together in tokens per second, while all decode."""
        times: list[list[float]] = [[] for _ in prompts]

        def note(mine: list[float]) -> Callable[[], None]:
            return lambda: mine.append(time.perf_counter())

        streams = [
            self.engine.stream(prompt, greedy(num_tokens), on_ready=note(mine))
            for prompt, mine in zip(prompts, times, strict=True)
        ]
        for stream in streams:
            for _ in stream:  # with `result`, the engine would report the last token only
                pass
            assert len(stream.result().token_ids) == num_tokens
        return steady_tokens_per_s([mine.copy() for mine in times])  # the last `note` may come after the last delta

    def first_token_s(self, prompt: Sequence[int], num_cached: int) -> float:
        """Return the seconds to the first token. Raises ValueError unless `num_cached` tokens came from the cache."""
        start = time.perf_counter()
        stream = self.engine.stream(prompt, greedy(1))
        next(stream)
        elapsed = time.perf_counter() - start
        cached = stream.result().usage.cached_tokens
        if abs(cached - num_cached) > 1:  # a random first token may agree
            raise ValueError(f"{cached} tokens came from the cache, {num_cached} should have")
        return elapsed


def greedy(num_tokens: int) -> SamplingParams:
    """Return parameters for a greedy reply of exactly `num_tokens`."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def random_ids(chance: random.Random, count: int, vocab_size: int) -> list[int]:
    """Return a random prompt, which shares no prefix with others. Speed depends only on its length."""
    return [chance.randrange(min(_LOWEST, vocab_size // 2), vocab_size) for _ in range(count)]


def steady_tokens_per_s(streams: Sequence[Sequence[float]]) -> float:
    """Return the rate of all streams in tokens per second, while all of them decode.

    That is from the latest first token to the earliest last token. `streams` has the times of each stream's tokens, in
    order, in seconds.

    >>> steady_tokens_per_s([[0.0, 1.0, 2.0], [1.0, 1.5, 2.0, 2.5]])
    3.0

    Raises:
        ValueError: at no time do all streams decode.
    """
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    if start >= end:
        raise ValueError(f"one stream began at {start:.3f} s and another had ended at {end:.3f} s; ask for more tokens")
    return sum(start < time <= end for times in streams for time in times) / (end - start)
