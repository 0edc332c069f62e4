"""What engines are asked, and how the answers become numbers: one table, the same for all of them.

Knows requests of token ids and the times at which tokens come; not which engine answers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..engine.figures import Figure
from ..prompts import Prompts
from ..timing import steady_tokens_per_s
from .client import EngineClient, Reply

PREFILL_512 = Figure("prefill_512", "prompt of 512", "tok/s", True)
PREFILL_2048 = Figure("prefill_2048", "prompt of 2,048", "tok/s", True)
PREFILL_8000 = Figure("prefill_8000", "prompt of 8,000", "tok/s", True)
DECODE = Figure("decode", "decode", "tok/s", True)
DECODE_8000 = Figure("decode_8000", "decode after 8,000", "tok/s", True)
STREAMS_8 = Figure("streams_8", "8 streams, total", "tok/s", True)
STREAMS_8_STEADY = Figure("streams_8_steady", "8 streams, steady", "tok/s", True)
STREAMS_50 = Figure("streams_50", "50 streams, total", "tok/s", True)
STREAMS_50_STEADY = Figure("streams_50_steady", "50 streams, steady", "tok/s", True)
CACHED = Figure("cached", "first token of 600 cached + 80", "ms", False)
CHAT = Figure("chat", "first token of a chat's later turns", "ms", False)
START = Figure("start", "process start to first token of 180", "s", False)
READY = Figure("ready", "process start to ready", "s", False)
FIRST = Figure("first", "first prompt of 180 after ready", "ms", False)
WARM = Figure("warm", "prompt of 180 when warm", "ms", False)
MEMORY = Figure("memory", "peak memory, one request of 2,048", "MiB", False)
FIGURES = (
    *(PREFILL_512, PREFILL_2048, PREFILL_8000, DECODE, DECODE_8000),
    *(STREAMS_8, STREAMS_8_STEADY, STREAMS_50, STREAMS_50_STEADY, CACHED, CHAT, START, READY, FIRST, WARM, MEMORY),
)

Values = dict[str, float]  # by the name of a figure
_NUM_TURNS, _TURN_TOKENS, _REPLY_TOKENS = 6, 75, 32
MEMORY_TOKENS, MEMORY_REPLY = 2000, 48


@dataclass(frozen=True)
class Scenario:
    """Requests to a server that can compute `num_streams` at once, each of `context` tokens at most.

    `decodes` says that replies take the time, rather than prompts: some engines have settings for that. What takes a
    second at most is asked `repeats` times a round, and the median counts.
    """

    name: str
    measure: Callable[[EngineClient, Prompts], Values]
    num_streams: int = 1
    context: int = 8192
    decodes: bool = False
    repeats: int = 1


def _prefill(figure: Figure, num_tokens: int, repeats: int = 1) -> Scenario:
    def measure(client: EngineClient, prompts: Prompts) -> Values:
        return {figure.name: num_tokens / client.ask(prompts.ids(num_tokens), 1).to_first_s}

    return Scenario(figure.name, measure, repeats=repeats)


def _decode(client: EngineClient, prompts: Prompts) -> Values:
    return {DECODE.name: _tokens_per_s(client.ask(prompts.ids(16), 128))}


def _long(client: EngineClient, prompts: Prompts) -> Values:
    reply = client.ask(prompts.ids(8000), 64)
    return {PREFILL_8000.name: 8000 / reply.to_first_s, DECODE_8000.name: _tokens_per_s(reply)}


def _streams(total: Figure, steady: Figure, num_streams: int, num_tokens: int) -> Scenario:
    def measure(client: EngineClient, prompts: Prompts) -> Values:
        replies = client.ask_all(prompts.batch(num_streams, num_tokens), num_tokens)
        begun, ended = min(reply.sent_at for reply in replies), max(reply.times[-1] for reply in replies)
        found = {total.name: num_streams * num_tokens / (ended - begun)}
        with suppress(ValueError):  # the first has ended before the last begins: there is no such figure
            found[steady.name] = steady_tokens_per_s([reply.times for reply in replies])
        return found

    return Scenario(total.name, measure, num_streams, 2 * num_tokens + 16, decodes=True)


def _cached(client: EngineClient, prompts: Prompts) -> Values:
    prefix = prompts.ids(600)
    client.ask(prefix, 1)
    return {CACHED.name: 1e3 * client.ask([*prefix, *prompts.ids(80)], 2).to_first_s}


def _chat(client: EngineClient, prompts: Prompts) -> Values:
    history: list[int] = []
    to_first: list[float] = []
    for _ in range(_NUM_TURNS):
        history += prompts.ids(_TURN_TOKENS)
        reply = client.ask(history, _REPLY_TOKENS)
        history += client.ids_of(reply)
        to_first.append(reply.to_first_s)
    return {CHAT.name: 1e3 * statistics.median(to_first[1:])}


def _tokens_per_s(reply: Reply) -> float:
    return (len(reply.times) - 1) / (reply.times[-1] - reply.times[0])


SCENARIOS: Sequence[Scenario] = (
    _prefill(PREFILL_512, 512, repeats=3),
    _prefill(PREFILL_2048, 2048),
    Scenario(DECODE.name, _decode, decodes=True, repeats=3),
    Scenario(CACHED.name, _cached, repeats=3),
    Scenario(CHAT.name, _chat),
    _streams(STREAMS_8, STREAMS_8_STEADY, 8, 128),
    Scenario(PREFILL_8000.name, _long),
    _streams(STREAMS_50, STREAMS_50_STEADY, 50, 64),
)
"""Each engine is started before them once a round, which gives the figures of `starting.py`."""
