"""One-token requests by the `openai` package, on the connection that it keeps open.

    python -m bench.request_openai PORT

Runs in an environment that has the package; imports nothing of ours but `worker.py`.
"""

from __future__ import annotations

import sys
import time

from .worker import serve

PROMPT = "The quick brown fox jumps over the lazy dog, and then it goes home to"


def main() -> None:
    """Serve until standard input ends."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id

    def one(count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            client.completions.create(model=model, prompt=PROMPT, max_tokens=1, temperature=0)
            seconds.append(time.perf_counter() - start)
        return seconds

    serve({"one": one})


if __name__ == "__main__":
    main()
