"""Measure a server's start: when it is ready, its first prompt, the same when warm, the memory of a full context."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..processes import MemoryOfTree, bytes_of_tree, memory_of, tree
from ..prompts import Prompts
from ..served import ServedProcess
from .client import EngineClient
from .scenarios import FIRST, MEMORY, MEMORY_REPLY, MEMORY_TOKENS, PEAK, READY, RESIDENT, START, WARM, Values

_NUM_TOKENS = 180
_REST_S = 3.0  # by then a server has finished its work in idle time
_NUM_WARM = 2
_STARTS_WITHIN_S = 1800.0  # a first start compiles, and vLLM takes minutes
_MIB = 1 << 20


def start(
    command: tuple[str, ...], client_of: Callable[[int], EngineClient], prompts: Prompts, ready_path: str = "/health"
) -> tuple[ServedProcess, EngineClient, Values]:
    """Start a server, which the caller closes; return it, its client, and the times of start and first prompt."""
    server = ServedProcess(command, starts_within_s=_STARTS_WITHIN_S, ready_path=ready_path)
    try:
        client = client_of(server.port)
        first = client.ask(prompts.ids(_NUM_TOKENS), 1)
    except BaseException:
        server.close()
        raise
    return (
        server,
        client,
        {
            START.name: first.times[0] - server.started_at,
            READY.name: server.ready_at - server.started_at,
            FIRST.name: 1e3 * first.to_first_s,
        },
    )


def when_warm(server: ServedProcess, client: EngineClient, prompts: Prompts) -> Values:
    """Return the time to the first token of the same prompt in a rested server, and the memory of a full context."""
    time.sleep(_REST_S)
    warm = min(client.ask(prompts.ids(_NUM_TOKENS), 1).to_first_s for _ in range(_NUM_WARM))
    with MemoryOfTree(server.pid) as memory:
        client.ask(prompts.ids(MEMORY_TOKENS), MEMORY_REPLY)
    return {WARM.name: 1e3 * warm, MEMORY.name: memory.peak_bytes / _MIB}


def weight(server: ServedProcess) -> Values:
    """Return the resident memory now, and the peak of its largest process, including mapped files."""
    peak = max(memory_of(pid).resident for pid in tree(server.pid))
    return {RESIDENT.name: bytes_of_tree(server.pid) / _MIB, PEAK.name: peak / _MIB}
