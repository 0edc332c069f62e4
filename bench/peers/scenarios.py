"""The requests to engines, and the figures from their replies: one table, the same for all of them.

Knows requests of token ids and the times of tokens; not which engine replies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from radixlm.cli.bench.engine_timer import steady_tokens_per_s

from ..engine.figures import Figure
from ..prompts import Prompts
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
PREFILL_32000 = Figure("prefill_32000", "prompt of 32,000", "tok/s", True)
DECODE_200 = Figure("decode_200", "decode after 200", "tok/s", True)
DECODE_32000 = Figure("decode_32000", "decode after 32,000", "tok/s", True)
BUSY_PREFILL = Figure("busy_prefill", "prompt of 512, a core taken", "tok/s", True)
BUSY_DECODE = Figure("busy_decode", "decode after 512, a core taken", "tok/s", True)
REQUESTS_8 = Figure("requests_8", "8 requests of 128 + 48, total", "tok/s", True)
REQUESTS_8_STEADY = Figure("requests_8_steady", "the same while all decode", "tok/s", True)
FIRST_START = Figure("first_start", "first start of all to first token of 180", "s", False)
RESIDENT = Figure("resident", "resident memory after 2,048", "MiB", False)
PEAK = Figure("peak", "peak resident memory until then", "MiB", False)
FIGURES = (
    *(PREFILL_512, PREFILL_2048, PREFILL_8000, DECODE, DECODE_8000),
    *(STREAMS_8, STREAMS_8_STEADY, STREAMS_50, STREAMS_50_STEADY, CACHED, CHAT, START, READY, FIRST, WARM, MEMORY),
)

SIZE_FIGURES = (
    *(PREFILL_512, PREFILL_2048, PREFILL_8000, PREFILL_32000, DECODE_200, DECODE_8000, DECODE_32000),
    *(REQUESTS_8, REQUESTS_8_STEADY, BUSY_PREFILL, BUSY_DECODE, FIRST_START, START, READY, RESIDENT, PEAK),
)

Values = dict[str, float]  # by the name of a figure
_NUM_TURNS, _TURN_TOKENS, _REPLY_TOKENS = 6, 75, 32
MEMORY_TOKENS, MEMORY_REPLY = 2000, 48


@dataclass(frozen=True)
class Scenario:
    """Requests to a server that can compute `num_streams` at once, each of `context` tokens at most.

    `decodes` says that replies take the time, rather than prompts: some engines have settings for that. A request of a
    second at most is repeated `repeats` times a round, and the median counts; with `is_once` it is sent in the first
    round alone. Another process loops on one of the processors while a scenario with `takes_core` is measured. With
    `weighs`, the server's memory is a figure, too.
    """

    name: str
    measure: Callable[[EngineClient, Prompts], Values]
    num_streams: int = 1
    context: int = 8192
    decodes: bool = False
    repeats: int = 1
    is_once: bool = False
    takes_core: bool = False
    weighs: bool = False


@dataclass(frozen=True)
class Plan:
    """The scenarios of a comparison, and the figures in its table.

    With `one_server` no two servers are alive at a time, which models that fill the memory need: each engine runs all
    scenarios in turn, with one best known setting for all of them.
    """

    scenarios: Sequence[Scenario]
    figures: Sequence[Figure]
    one_server: bool = False


def _prefill_scenario(figure: Figure, num_tokens: int, **how: Any) -> Scenario:
    """Make a scenario that measures prefill: prompt tokens per second until the first token of the reply.

    Args:
        how: further fields of `Scenario`.
    """

    def measure(client: EngineClient, prompts: Prompts) -> Values:
        return {figure.name: num_tokens / client.ask(prompts.ids(num_tokens), 1).to_first_s}

    return Scenario(figure.name, measure, **how)


def _decode_scenario(figure: Figure, num_tokens: int, num_reply: int, **how: Any) -> Scenario:
    """Make a scenario that measures decode: tokens per second after the first of a reply of `num_reply` tokens."""

    def measure(client: EngineClient, prompts: Prompts) -> Values:
        return {figure.name: _tokens_per_s(client.ask(prompts.ids(num_tokens), num_reply))}

    return Scenario(figure.name, measure, decodes=True, **how)


def _prefill_and_decode_scenario(
    prefill: Figure, decode: Figure, num_tokens: int, num_reply: int, **how: Any
) -> Scenario:
    """Make a scenario of a prompt and its reply, each with a figure."""

    def measure(client: EngineClient, prompts: Prompts) -> Values:
        reply = client.ask(prompts.ids(num_tokens), num_reply)
        return {prefill.name: num_tokens / reply.to_first_s, decode.name: _tokens_per_s(reply)}

    return Scenario(prefill.name, measure, **how)


def _streams_scenario(total: Figure, steady: Figure, num_streams: int, num_tokens: int, num_reply: int) -> Scenario:
    """Make a scenario of `num_streams` requests sent at once.

    Args:
        total: figure for all reply tokens per second, from the first request to the last token.
        steady: figure for tokens per second while all of them decode.
    """

    def measure(client: EngineClient, prompts: Prompts) -> Values:
        replies = client.ask_all(prompts.batch(num_streams, num_tokens), num_reply)
        begun, ended = min(reply.sent_at for reply in replies), max(reply.times[-1] for reply in replies)
        found = {total.name: num_streams * num_reply / (ended - begun)}
        with suppress(ValueError):  # the first has ended before the last begins: there is no such figure
            found[steady.name] = steady_tokens_per_s([reply.times for reply in replies])
        return found

    return Scenario(total.name, measure, num_streams, num_tokens + num_reply + 16, decodes=True)


def _cached(client: EngineClient, prompts: Prompts) -> Values:
    """Return the milliseconds to the first token of a prompt whose beginning was the prompt before."""
    prefix = prompts.ids(600)
    client.ask(prefix, 1)
    return {CACHED.name: 1e3 * client.ask([*prefix, *prompts.ids(80)], 2).to_first_s}


def _measure_chat(client: EngineClient, prompts: Prompts) -> Values:
    """Return the median milliseconds to the first token of a conversation's later turns."""
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
    _prefill_scenario(PREFILL_512, 512, repeats=3),
    _prefill_scenario(PREFILL_2048, 2048),
    _decode_scenario(DECODE, 16, 128, repeats=3),
    Scenario(CACHED.name, _cached, repeats=3),
    Scenario(CHAT.name, _measure_chat),
    _streams_scenario(STREAMS_8, STREAMS_8_STEADY, 8, 128, 128),
    _prefill_and_decode_scenario(PREFILL_8000, DECODE_8000, 8000, 64),
    _streams_scenario(STREAMS_50, STREAMS_50_STEADY, 50, 64, 64),
)
"""Each engine is started before them once a round, which gives the figures of `starting.py`."""

SIZE_SCENARIOS: Sequence[Scenario] = (
    _prefill_scenario(PREFILL_512, 512),
    _prefill_scenario(PREFILL_2048, 2048, weighs=True),
    _decode_scenario(DECODE_200, 200, 48),
    _prefill_and_decode_scenario(BUSY_PREFILL, BUSY_DECODE, 512, 12, takes_core=True),
    _prefill_and_decode_scenario(PREFILL_8000, DECODE_8000, 8000, 32, is_once=True),
    _streams_scenario(REQUESTS_8, REQUESTS_8_STEADY, 8, 128, 48),
    _prefill_and_decode_scenario(PREFILL_32000, DECODE_32000, 32_000, 16, context=32_256, is_once=True),
)
"""For models with billions of parameters, which take seconds where others take milliseconds."""

PEERS = Plan(SCENARIOS, FIGURES)
SIZES = Plan(SIZE_SCENARIOS, SIZE_FIGURES, one_server=True)
