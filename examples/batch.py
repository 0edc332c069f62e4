"""Complete the lines of a file, in order of completion: python examples/batch.py smollm2.radixlm [prompts.txt]"""

from __future__ import annotations

import sys
from pathlib import Path

from radixlm import Engine, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "", "A year has twelve"]  # the third one fails


def main(artifact: str, path: str | None = None) -> None:
    prompts = PROMPTS if path is None else Path(path).read_text(encoding="utf-8").splitlines()
    params = SamplingParams(temperature=0.0, max_tokens=8, stop=["\n"])
    with Engine(artifact) as engine:
        for result in engine.generate_many(prompts, params, progress=True):
            print(f"{result.index}: {result.error or result.prompt + result.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
