"""Chat, and show each prompt's cache hit: python examples/chat_cache.py smollm2.radixlm"""

from __future__ import annotations

import sys

from radixlm import Engine, SamplingParams

QUESTIONS = (
    "What is gravity?",
    "Who first described it?",
    "Why do things fall down?",
)


def main(artifact: str) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with Engine(artifact) as engine:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            completion = engine.chat(messages, params)
            messages.append({"role": "assistant", "content": completion.text})
            usage, match = completion.usage, completion.cache_match
            print(f"> {question}\n{completion.text}")
            print(f"  {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")
            print(f"  {match.why_not_more}")


if __name__ == "__main__":
    main(*sys.argv[1:])
