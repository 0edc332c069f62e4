"""Raise the number of clients of a server with a small KV pool: tokens per second, time to first token, failures.

    python -m bench.load.ladder ARTIFACT [--admission conservative]

Each rung has a fresh `radixlm serve` with its defaults except for the pool, and a fixed number of chats: prompts of
distinct words, replies of a fixed length. A stream sends its next chat when its last reply has ended. Fails if a
request failed, or if a page is not free when all requests have ended and the cache is empty.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from tokenizers import Tokenizer

from ..connection import BrokenReply, Call, Connection
from ..options import read_options
from ..processes import RADIXLM
from ..report.page import publish
from ..served import Client, ServedProcess
from .clients import percentiles
from .replies import Reply, ReplyError, check_usage
from .server import kv_cache_bytes

HANG_S = 600.0
MAX_TOLD = 5


@dataclass(frozen=True)
class Rung:
    """The number of streams, the sizes of their requests, and the pool that they share, in tokens."""

    name: str
    num_streams: int
    num_requests: int
    num_words: int  # of a prompt; each is about a token
    num_reply_tokens: int
    pool_tokens: int


# Of SmolLM2, whose template adds some 30 tokens: the pool holds 17 requests at once.
RUNGS = (
    *(Rung(f"{count} streams", count, max(60, 6 * count), 100, 100, 4096) for count in (5, 10, 20, 50, 100)),
    Rung("50 streams, mlc-llm #2766", 50, 500, 50, 150, 16_384),
)


@dataclass
class Crowd:
    """The clients of one rung, and their measurements."""

    port: int
    rung: Rung
    words: Sequence[str]
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_reply_tokens: int = 0
    failures: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Send every request; return when the last reply has ended, or took too long."""
        prompts = prompts_of(self.words, self.rung)
        await asyncio.gather(*(self._run_client(prompts) for _ in range(self.rung.num_streams)))

    async def _run_client(self, prompts: Iterator[str]) -> None:
        """Send chats one after the other on one connection, as long as there are prompts; record failures."""
        connection = Connection(self.port)
        for prompt in prompts:
            try:
                await asyncio.wait_for(self._time_chat(connection, prompt), HANG_S)
            except (BrokenReply, ReplyError, OSError, TimeoutError) as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                connection.drop()
        connection.drop()

    async def _time_chat(self, connection: Connection, prompt: str) -> None:
        """Send one chat, and record its times to first token and between tokens, and its token counts.

        Raises:
            ReplyError: the reply is an error, or incomplete.
        """
        start, last, reply = time.perf_counter(), None, Reply()
        head = await connection.ask(_chat_call(prompt, self.rung.num_reply_tokens))
        if head.status != 200:
            raise ReplyError(f"status {head.status}: {(await connection.body(head))[:300]!r}")
        async for event in connection.events(head):
            now = time.perf_counter()
            if event == b"[DONE]":
                reply.is_done = True
            elif reply.take(json.loads(event)):
                (self.between_tokens_s if last else self.first_token_s).append(now - (last or start))
                last = now
        reply.check_complete(is_stream=True)
        check_usage([reply])
        if len(reply.token_ids) != self.rung.num_reply_tokens:
            raise ReplyError(f"{len(reply.token_ids)} tokens, {self.rung.num_reply_tokens} were asked for")
        self.num_prompt_tokens += len(reply.prompt_token_ids)
        self.num_reply_tokens += len(reply.token_ids)


def climb(artifact: Artifact, rung: Rung, options: Sequence[str]) -> dict[str, Any]:
    """Serve chats of one rung, a number of concurrent clients, by a fresh server; return its times, rates and failures.

    Args:
        options: further options of `radixlm serve`.
    """
    half_a_page = artifact.manifest.kv.page_bytes / 2  # so that no rounding loses a page
    gb = (kv_cache_bytes(artifact, rung.pool_tokens // PAGE_SIZE) + half_a_page) / 1e9
    command = [RADIXLM, "serve", str(artifact.path), "--kv-cache-gb", str(gb), *options]
    with ServedProcess(command) as server:
        crowd = Crowd(server.port, rung, words_of(artifact))
        started = time.perf_counter()
        asyncio.run(crowd.run())
        seconds = time.perf_counter() - started
        client = Client(server.port)
        counts = client.json("GET", "/health")
        client.json("DELETE", "/v1/cache")
        num_free_pages = client.json("GET", "/health")["num_free_pages"]
        client.close()
    return {
        **asdict(rung),
        "seconds": seconds,
        "mean_prompt_tokens": crowd.num_prompt_tokens / max(1, len(crowd.first_token_s)),
        "tokens_per_s": crowd.num_reply_tokens / seconds,
        "first_token_s": percentiles(crowd.first_token_s),
        "between_tokens_s": percentiles(crowd.between_tokens_s),
        "num_preemptions": counts["num_preemptions"],
        "num_evicted_pages": counts["num_evicted_pages"],
        "num_failures": len(crowd.failures) + counts["num_failed"],
        "failures": crowd.failures[:MAX_TOLD],
        "num_pages": counts["num_pages"],
        "num_free_pages": num_free_pages,
    }


def is_met(rung: dict[str, Any]) -> bool:
    """Return whether no request failed and no page is lost."""
    return not rung["num_failures"] and rung["num_free_pages"] == rung["num_pages"]


def prompts_of(words: Sequence[str], rung: Rung) -> Iterator[str]:
    """Yield a text for each request, of distinct words; the same for the same rung."""
    source = random.Random(rung.name)
    return (" ".join(source.sample(words, rung.num_words)) for _ in range(rung.num_requests))


def words_of(artifact: Artifact) -> list[str]:
    """Return the words that are one token each, from the artifact's own vocabulary."""
    vocabulary = Tokenizer.from_file(str(artifact.path / "tokenizer.json")).get_vocab()
    found = (re.fullmatch("[Ġ▁]([a-z]{3,})", token) for token in vocabulary)
    return sorted({word[1] for word in found if word})


def _chat_call(prompt: str, num_tokens: int) -> Call:
    """Return the HTTP call of a streamed chat with one message, whose reply has exactly `num_tokens` tokens."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        **{"ignore_eos": True, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}},
    }
    headers = {"host": "localhost", "content-type": "application/json"}
    return Call("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)


def main() -> None:
    """Measure the server with more and more clients (rungs), print, and write `results/ladder.json`."""
    options = read_options(__doc__, "artifact", admission=str)  # as `radixlm serve` expects it
    artifact = Artifact.open(options.artifact)
    more = ("--admission", options.admission) if options.admission else ()
    rungs = [climb(artifact, rung, more) for rung in RUNGS]
    name = f"{artifact.manifest.name}{f', --admission {options.admission}' if options.admission else ''}"
    publish("ladder", {"name": name, "rungs": rungs}, run=name)
    sys.exit(0 if all(map(is_met, rungs)) else "a request failed or a page is lost: see above")


if __name__ == "__main__":
    main()
