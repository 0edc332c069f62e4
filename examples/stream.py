"""Stream a reply, and stop it early: python examples/stream.py smollm2.radixlm"""

from __future__ import annotations

import sys

from radixlm import Engine, SamplingParams


def main(artifact: str) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Tell me a long story about a lighthouse."},
    ]
    with Engine(artifact) as engine, engine.stream_chat(messages, SamplingParams(temperature=0.0)) as stream:
        num_tokens = 0
        for delta in stream:
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.token_ids)
            if num_tokens >= 24:
                stream.cancel()
        print(f"\n{stream.result().finish_reason} after {num_tokens} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
