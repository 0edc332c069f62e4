"""Use one engine from fifty threads, with the same output as alone: python examples/fifty_threads.py smollm2.radixlm"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from radixlm import Engine, SamplingParams

NUM_THREADS = 50


def main(artifact: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = [f"Count on: {number}, {number + 1}," for number in range(NUM_THREADS)]
    with Engine(artifact) as engine:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            together = list(threads.map(lambda prompt: engine.generate(prompt, params).text, prompts))
        for prompt, text in zip(prompts[:5], together, strict=False):
            print(f"{prompt}{text!r}")
            assert text == engine.generate(prompt, params).text
        print(f"{NUM_THREADS} threads, {engine.stats().num_steps} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
