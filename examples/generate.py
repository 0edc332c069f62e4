"""Continue a prompt: python examples/generate.py smollm2.radixlm"""

from __future__ import annotations

import sys

from radixlm import Engine, SamplingParams


def main(artifact: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0)
    with Engine(artifact) as engine:
        completion = engine.generate("The capital of France is", params)
        print(completion.text)
        for token in completion.logprobs or ():
            print(f"{token.logprob:8.3f}  {engine.tokenizer.decode([token.token_id])!r}")
        print(completion.finish_reason, completion.usage)


if __name__ == "__main__":
    main(*sys.argv[1:])
