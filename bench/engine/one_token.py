"""Send one-token requests for `request_cost.py`: to an `Engine` of this process, or with the `openai` package.

    python -m bench.engine.one_token engine ARTIFACT
    python -m bench.engine.one_token openai PORT

Times are those of a caller of `Engine.generate`, or of the package on the connection that it keeps open. For
`openai` nothing else of ours is imported, so that it runs in an environment with the package.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..worker import serve

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes home to"
MAX_TOKENS = 1


def main() -> None:
    """Time one-token requests, to an engine or by the `openai` package, as commands on standard input say."""
    kind, where = sys.argv[1:]
    if kind == "engine":
        from radixlm.runtime import Engine, SamplingParams

        with Engine(where) as engine:
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
            _serve_timings(lambda: engine.generate(PROMPT, params))
    else:
        import openai

        client = openai.OpenAI(base_url=f"http://127.0.0.1:{where}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        _serve_timings(
            lambda: client.completions.create(model=model, prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0)
        )


def _serve_timings(ask: Callable[[], object]) -> None:
    """Answer commands on standard input with the seconds of each call of `ask`.

    `one` calls it `count` times in a row, `together` does so for several clients at once.
    """

    def one(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - start)
        return seconds

    def together(clients: int, count: int) -> list[float]:
        with ThreadPoolExecutor(clients) as threads:
            return [seconds for client in threads.map(one, [count] * clients) for seconds in client]

    serve({"one": one, "together": together})


if __name__ == "__main__":
    main()
