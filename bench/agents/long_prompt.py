"""Measure a prompt of 16,000 tokens: alone, batched with others, and in llama.cpp's server.

    python -m bench.agents.long_prompt ARTIFACT [--rounds 1] [--tokens 16000] [--llama-cpp .cache/llama.cpp]

ARTIFACT is Qwen2.5-Coder-0.5B, compiled from the Q4_K_M file that llama.cpp gets. In each round a fresh `radixlm serve`
with its defaults computes a long prompt alone, and then another one while a request decodes all the time and a
client sends a short prompt every five seconds. A fresh llama-server with flash attention gets the first prompt
alone, if there is one. Prompts are random ids that are not cached; the short ones have 100. The decoding request
samples at temperature 2: at 1 it repeats itself in the end, and accepted draft tokens make it faster. Two minutes
per round on two cores; llama.cpp takes five.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.tokenizer_fix import TokenizerProfile

from ..connection import BrokenReply, Call, Connection
from ..options import read_options
from ..peers.client import LlamaCppClient
from ..peers.models import qwen_coder
from ..processes import RADIXLM
from ..prompts import Prompts
from ..report.page import publish
from ..served import Json, ServedProcess

FIRST_TOKEN_BAR_S, STREAM_BAR, LONG_BAR, PEER_BAR = 1.0, 0.5, 2.2, 5.0
NUM_SHORT_TOKENS = 100
_ALONE_S = 5.0  # before and after the long prompt, to measure the decoding request's own speed
_EVERY_S = 5.0
_HEADERS = {"content-type": "application/json", "host": "localhost"}


@dataclass(frozen=True)
class Round:
    """Seconds to first tokens, tokens per second of the decoding request, and its longest time between two tokens.

    Its speed alone is the mean of before and after the long prompt: the longer a reply, the slower.
    """

    long_alone_s: float
    long_beside_s: float
    stream_alone: float
    stream_beside: float
    stream_gap_s: float
    short_s: tuple[float, ...]
    peer_alone_s: float | None = None


def main() -> None:
    """Measure a long prompt alone, in a batch and in llama.cpp; print, and write `results/long_prompt.json`.

    The file keeps the last run of each artifact.
    """
    options = read_options(__doc__, "artifact", rounds=1, tokens=16_000, llama_cpp=Path(".cache/llama.cpp"))
    artifact = Artifact.open(options.artifact)
    peer = options.llama_cpp.resolve() / "llama-server"
    rounds = []
    for number in range(options.rounds):
        measured = measure_round(artifact, number, options.tokens, peer if peer.exists() else None)
        print(measured, file=sys.stderr)
        rounds.append(measured)
    publish("long_prompt", figures(rounds, options.tokens), run=f"{artifact.path.stem}, {artifact.manifest.kv.dtype}")


def measure_round(artifact: Artifact, number: int, num_tokens: int, peer: Path | None) -> Round:
    """Time a long prompt's first token on a fresh server, alone and beside a stream and short requests, and time those.

    With `peer`, llama.cpp's server, the prompt is timed there alone, too. Prompts depend on the round's `number`.
    """
    profile = TokenizerProfile.from_dict(artifact.manifest.tokenizer.profile)
    prompts = Prompts(number, min(artifact.manifest.model.vocab_size, profile.vocab_size))
    alone = prompts.ids(num_tokens)
    with ServedProcess([RADIXLM, "serve", str(artifact.path)]) as server:
        num_streamed = artifact.manifest.context_length - NUM_SHORT_TOKENS
        measured = asyncio.run(Clients(server.port, prompts, num_streamed).round(alone, prompts.ids(num_tokens)))
    return (
        measured
        if peer is None
        else Round(**asdict(measured) | {"peer_alone_s": _llama_cpp_first_token_s(peer, alone)})
    )


def _llama_cpp_first_token_s(program: Path, prompt: Sequence[int]) -> float:
    """Return the seconds from sending a prompt to llama.cpp to its reply's first token."""
    options = ("--parallel", "1", "--ctx-size", str(len(prompt) + NUM_SHORT_TOKENS), "--flash-attn", "on")
    threads = str(default_num_threads())
    command = [str(program), "--model", str(qwen_coder()), "--threads", threads, "--cache-ram", "0", *options]
    with ServedProcess(command) as server:
        return LlamaCppClient(server.port).ask(prompt, 1).to_first_s


class Clients:
    """All clients of a round; `num_streamed` is more tokens than the decoding request gets in that time."""

    def __init__(self, port: int, prompts: Prompts, num_streamed: int) -> None:
        self._port, self._prompts, self._num_streamed = port, prompts, num_streamed

    async def round(self, alone: Sequence[int], beside: Sequence[int]) -> Round:
        """Compute one long prompt alone, and one batched with others.

        Raises:
            RuntimeError: the decoding request ended too soon, or no short request was sent.
        """
        long_alone_s = await self._first_token_s(alone)
        print(f"alone: {long_alone_s:.1f} s", file=sys.stderr)
        streamed: list[float] = []
        stream = asyncio.create_task(self._stream(streamed))
        while not streamed:
            await asyncio.sleep(0.05)
        await asyncio.sleep(_ALONE_S)
        began = time.perf_counter()
        long = asyncio.create_task(self._first_token_s(beside))
        short_s = []
        while not long.done():
            await asyncio.wait([long], timeout=_EVERY_S)
            if not long.done():
                short_s.append(await self._first_token_s(self._prompts.ids(NUM_SHORT_TOKENS)))
        ended = time.perf_counter()
        await asyncio.sleep(_ALONE_S)
        if stream.done() or not short_s:
            raise RuntimeError("the stream ended before the long prompt did, or no short request was sent")
        stream.cancel()
        own = statistics.mean((_per_s(streamed, began - _ALONE_S, began), _per_s(streamed, ended, ended + _ALONE_S)))
        gap = max(later - at for at, later in pairwise(streamed) if began <= at <= ended)
        return Round(long_alone_s, long.result(), own, _per_s(streamed, began, ended), gap, tuple(short_s))

    async def _first_token_s(self, prompt: Sequence[int]) -> float:
        """Return the seconds from sending a prompt to its reply's first token."""
        start = time.perf_counter()
        async for at in self._arrivals(prompt, 2, temperature=0.0):
            return at - start
        raise BrokenReply("a reply has no token")

    async def _stream(self, arrivals: list[float]) -> None:
        async for at in self._arrivals(self._prompts.ids(NUM_SHORT_TOKENS), self._num_streamed, temperature=2.0):
            arrivals.append(at)

    async def _arrivals(self, prompt: Sequence[int], max_tokens: int, temperature: float) -> AsyncIterator[float]:
        """Yield the time of each token of a reply."""
        fixed = {"seed": 1, "ignore_eos": True, "stream": True, "return_token_ids": True}
        fixed |= {"top_k": 0, "top_p": 1, "min_p": 0}  # sampled from all tokens
        body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, **fixed})
        connection = Connection(self._port)
        try:
            head = await connection.ask(Call("POST", "/v1/completions", body.encode(), _HEADERS))
            if head.status != 200:
                raise BrokenReply(f"{head.status}: {(await connection.body(head))[:300]!r}")
            async for event in connection.events(head):
                at = time.perf_counter()
                if event != b"[DONE]":
                    for choice in json.loads(event)["choices"]:
                        for _ in choice.get("token_ids", ()):
                            yield at
        finally:
            connection.drop()


def figures(rounds: Sequence[Round], num_tokens: int) -> Json:
    """Return the rounds, and each requirement (`bars`) with its value, its limit, and whether it is met.

    The value is the slowest short request of all rounds, or the median of a ratio.
    """
    worst = max(seconds for each in rounds for seconds in each.short_s)
    stream = statistics.median(each.stream_beside / each.stream_alone for each in rounds)
    long = statistics.median(each.long_beside_s / each.long_alone_s for each in rounds)
    bars = [
        _bar("a short request's first token, s, at worst", worst, FIRST_TOKEN_BAR_S, worst <= FIRST_TOKEN_BAR_S),
        _bar("a stream's speed, of its speed alone", stream, STREAM_BAR, stream >= STREAM_BAR),
        _bar("the long prompt's time, of its time alone", long, LONG_BAR, long <= LONG_BAR),
    ]
    ratios = [each.peer_alone_s / each.long_alone_s for each in rounds if each.peer_alone_s is not None]
    if ratios:
        peer = statistics.median(ratios)
        bars.append(_bar("alone, times as fast as llama.cpp", peer, PEER_BAR, peer >= PEER_BAR))
    return {"num_tokens": num_tokens, "rounds": [asdict(each) for each in rounds], "bars": bars}


def _bar(name: str, value: float, bar: float, is_met: bool) -> Json:
    return {"name": name, "value": value, "bar": bar, "is_met": is_met}


def _per_s(arrivals: Sequence[float], start: float, end: float) -> float:
    return sum(start <= at < end for at in arrivals) / (end - start)


if __name__ == "__main__":
    main()
