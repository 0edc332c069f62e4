"""Run the server under load in a separate process: the product's application and engine, and a way to inspect them.

    python -m bench.load.server ARTIFACT PAGES

Inspection uses this process's standard input, which clients cannot reach; the product has none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, ModuleInfo
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.cache.page_pool import num_pages_for
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.malloc_arenas import share_one_arena
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen
from radixlm.runtime.server.http.uvicorn_server import server

from ..worker import serve
from .requests import API_KEYS, MAX_BODY_BYTES, Facts

NUM_STATES = 24  # for a model that has states: fewer than its requests write and read
MAX_NUM_SEQS, MAX_QUEUE = 32, 128  # so that fifty clients find room, and two hundred are refused now and then


class LoadedServer:
    """A server of `engine` on real sockets, with its event loop in a separate thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._listener = listen("127.0.0.1", 0)
        app = create_app(engine, api_keys=API_KEYS, max_body_bytes=MAX_BODY_BYTES)
        self._server = server(uvicorn.Config(app, log_level="error", http=HTTPProtocol), engine.close, 5.0)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def facts(self) -> Facts:
        """The model's name, context length and vocabulary size, and whether it has a chat template."""
        engine, manifest = self._engine, self._engine.manifest
        vocab_size = min(manifest.model.vocab_size, engine.tokenizer.vocab_size)
        return Facts(manifest.name, engine.context_length, vocab_size, engine.prompts.chat_template is not None)

    def books(self) -> dict[str, int | float]:
        """Return the engine's counters, and those of its cache."""
        evicted = self._engine._loop.call(lambda core: core.cache.stats().num_evicted_pages)
        return asdict(self._engine.stats()) | {"num_evicted_pages": evicted}

    def leaks(self) -> dict[str, int]:
        """Check all owners of pages, clear the cache, and return what is still held; call it after the last request.

        Returns:
            Sequences and pages in use before the cache was cleared, and pages and states that are not free after it.

        Raises:
            AssertionError: owners and counts disagree.
        """
        loop = self._engine._loop
        loop.call(lambda core: core.check())
        busy = loop.call(lambda core: (core.cache.stats().num_sequences, core.cache.pool.num_in_use))
        for key in API_KEYS:
            self._engine.clear_cache(self._engine.namespaces.of(CacheScope(api_key=key)))
        loop.call(lambda core: core.check())
        pool = self._engine.stats()
        states = pool.states
        return {
            "num_states_lost": 0 if states is None else states.num_slots - states.num_free,
            "num_sequences": busy[0],
            "num_pages_in_use": busy[1],
            "num_pages_lost": pool.num_pages - pool.num_free_pages,
        }

    def close(self) -> None:
        """Stop serving, as the command does when it is interrupted."""
        self._server.should_exit = True
        self._thread.join()
        self._engine.close()
        self._listener.close()


def methods(loaded: LoadedServer) -> Mapping[str, Any]:
    """Return the methods for inspection by the name of their command."""
    return {
        "open": lambda: {"port": loaded.port, "facts": asdict(loaded.facts)},
        "books": loaded.books,
        "leaks": loaded.leaks,
    }


def compute_widest_step(core: EngineCore, module: ModuleInfo) -> None:
    """Compute as many tokens and logits as a step may have, of no request, and discard the results.

    A step's work buffers take memory on the first access: that is no growth, and with few states it may be long until a
    step of requests is as wide.
    """
    pool, states = core.cache.pool, core.cache.states
    num_tokens = min(module.max_num_tokens, pool.num_free * PAGE_SIZE, core.limits.context_length)
    num_logits = min(module.max_num_logits, num_tokens)
    pages, slot = pool.allocate(num_pages_for(num_tokens)), None if states is None else states.allocate()
    try:
        zeros = Batch.of_zeros(0, num_tokens, pages, state_out=slot)
        rows = np.arange(num_tokens - num_logits, num_tokens, dtype=np.int32)
        core._forward.forward(Batch(*zeros.arrays[:-1], rows, state_in=zeros.state_in, state_out=zeros.state_out))
        core._forward.top_logits(num_logits, core.limits.vocab_size)
    finally:
        pool.release(pages)
        if states is not None and slot is not None:
            states.release(slot)


def kv_cache_bytes(artifact: Artifact, num_pages: int) -> int:
    """Return the bytes of `num_pages` pages."""
    return num_pages * artifact.manifest.kv.page_bytes


def main() -> None:
    """Serve over HTTP, and answer commands for inspection on standard input, until that ends."""
    share_one_arena()  # as the command does
    artifact = Artifact.open(Path(sys.argv[1]))
    size = kv_cache_bytes(artifact, int(sys.argv[2]))
    states = NUM_STATES * artifact.manifest.model.state_bytes or None
    engine = Engine(
        artifact, kv_cache_bytes=size, state_cache_bytes=states, max_num_seqs=MAX_NUM_SEQS, max_queue=MAX_QUEUE
    )
    engine._loop.call(lambda core: compute_widest_step(core, artifact.manifest.module))
    loaded = LoadedServer(engine)
    serve(methods(loaded))
    loaded.close()


if __name__ == "__main__":
    main()
