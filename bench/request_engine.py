"""One-token requests to an `Engine` of this process, as `request_cost.py` compares them with a server's.

    python -m bench.request_engine ARTIFACT

Times are those of a caller of `Engine.generate`.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from radixlm.runtime import Engine, SamplingParams

from .worker import serve

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes home to"
MAX_TOKENS = 1


def main() -> None:
    """Serve until standard input ends."""
    with Engine(sys.argv[1]) as engine:

        def one(count: int) -> list[float]:
            return [_seconds(engine) for _ in range(count)]

        def together(clients: int, count: int) -> list[float]:
            with ThreadPoolExecutor(clients) as threads:
                return [seconds for client in threads.map(one, [count] * clients) for seconds in client]

        serve({"one": one, "together": together})


def _seconds(engine: Engine) -> float:
    start = time.perf_counter()
    engine.generate(PROMPT, SamplingParams(max_tokens=MAX_TOKENS, temperature=0))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
