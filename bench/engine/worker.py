"""radixlm, as it is measured: one engine with its defaults, in a process of its own.

    python -m bench.engine.worker ARTIFACT

Times are those of a user of `Engine`: from the call until the token is delivered.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from radixlm.runtime import Engine, SamplingParams

from ..timing import steady_tokens_per_s
from ..worker import serve


class RadixLM:
    """The measurements; every prompt is a list of token ids."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds to the first token of a prompt that shares nothing with an earlier one."""
        return self._first_token_s(prompt, num_cached=0)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Tokens a second after the first."""
        speed = self._engine.generate(prompt, _greedy(num_tokens)).timings.decode_tokens_per_s
        assert speed is not None
        return speed

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Tokens a second of all prompts together, while all decode."""
        times: list[list[float]] = [[] for _ in prompts]

        def note(mine: list[float]) -> Callable[[], None]:
            return lambda: mine.append(time.perf_counter())

        streams = [
            self._engine.stream(prompt, _greedy(num_tokens), on_ready=note(mine))
            for prompt, mine in zip(prompts, times, strict=True)
        ]
        for stream, mine in zip(streams, times, strict=True):
            for _ in stream:  # `result` would have the engine tell of the last token only
                pass
            assert len(stream.result().token_ids) == num_tokens == len(mine)
        return steady_tokens_per_s(times)

    def resume(self, prefix: Sequence[int], suffix: Sequence[int]) -> float:
        """Seconds to the first token of `prefix + suffix`, when `prefix` was a prompt just before."""
        self._engine.generate(prefix, _greedy(1))
        return self._first_token_s([*prefix, *suffix], num_cached=len(prefix))

    def _first_token_s(self, prompt: Sequence[int], num_cached: int) -> float:
        start = time.perf_counter()
        stream = self._engine.stream(prompt, _greedy(1))
        next(stream)
        elapsed = time.perf_counter() - start
        cached = stream.result().usage.cached_tokens
        if abs(cached - num_cached) > 1:  # a random first token may agree
            raise ValueError(f"{cached} tokens came from the cache, {num_cached} should have")
        return elapsed


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def main() -> None:
    """Serve until standard input ends."""
    with Engine(sys.argv[1]) as engine:
        radixlm = RadixLM(engine)
        serve({name: getattr(radixlm, name) for name in ("prefill", "decode", "streams", "resume")})


if __name__ == "__main__":
    main()
