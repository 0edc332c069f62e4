"""The speed of many streams while all of them decode. Knows times of tokens, not who made them."""

from __future__ import annotations

from collections.abc import Sequence


def steady_tokens_per_s(streams: Sequence[Sequence[float]]) -> float:
    """Tokens of all streams a second, from when the last has its first token until the first has its last.

    `streams` are the times of each stream's tokens, in order, in seconds.

    >>> steady_tokens_per_s([[0.0, 1.0, 2.0], [1.0, 1.5, 2.0, 2.5]])
    3.0

    Raises:
        ValueError: there is no moment at which all decode.
    """
    start, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    if start >= end:
        raise ValueError(f"one stream began at {start:.3f} s and another had ended at {end:.3f} s; ask for more tokens")
    return sum(start < time <= end for times in streams for time in times) / (end - start)
