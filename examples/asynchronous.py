"""Await replies, and read streams, in one event loop: python examples/asynchronous.py smollm2.radixlm"""

from __future__ import annotations

import asyncio
import sys

from radixlm import Engine

QUESTIONS = ("What is gravity?", "Name three fruits.", "Write one sentence about rain.")


async def main(artifact: str) -> None:
    async with Engine(artifact) as engine:
        asked = [engine.achat([{"role": "user", "content": each}], max_tokens=24, temperature=0) for each in QUESTIONS]
        for question, reply in zip(QUESTIONS, await asyncio.gather(*asked), strict=True):
            print(f"> {question}\n{reply.text}")
        try:
            async with asyncio.timeout(0.5):  # leaving the block ends the request
                await engine.agenerate("Once upon a time", max_tokens=100_000, ignore_eos=True)
        except TimeoutError:
            print("given up after half a second")
        async with engine.stream("The capital of France is", max_tokens=12, temperature=0) as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
