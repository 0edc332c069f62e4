"""A disk tier under the fake model: a real store in a directory, whose reads and writes can be held up or spoiled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.engine_queue import WorkQueue
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.tier_hooks import TierExtra
from radixlm.runtime.store import PageKey, PageStore, PutResult, StoredAlias, StoreIdentity, StoreStats

from .fake_model import FAKE_PAGE_BYTES, POLICY, Bench, FakeModel

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "layout", FAKE_PAGE_BYTES)
NUM_RECORDS = 512
WAIT_S = 30.0  # only a hang takes that long


class SlowStore:
    """The store of a directory; `may_read` and `may_write` let it go on, `spoil` changes what was read."""

    def __init__(self, directory: Path, num_records: int = NUM_RECORDS) -> None:
        record_bytes = 4096 + 4096
        self.store = PageStore.open(directory, IDENTITY, max_bytes=num_records * record_bytes)
        self.directory, self.identity, self.secret = directory, self.store.identity, self.store.secret
        self.may_read, self.may_write = threading.Event(), threading.Event()
        self.may_read.set()
        self.may_write.set()
        self.spoil: Callable[[int, np.ndarray], int] = lambda num_right, pages: num_right
        self.num_reads = 0
        self.num_asked = 0

    def page_keys(self) -> Iterator[PageKey]:
        return self.store.page_keys()

    def aliases(self) -> Iterator[StoredAlias]:
        return self.store.aliases()

    def put_small(self, alias: StoredAlias) -> PutResult:
        return self.store.put_small(alias)

    def put(self, page_keys: Sequence[PageKey], payload: np.ndarray) -> PutResult:
        assert self.may_write.wait(WAIT_S)
        return self.store.put(page_keys, payload)

    def read(self, page_keys: Sequence[PageKey], out: np.ndarray) -> int:
        self.num_reads += 1
        self.num_asked += len(page_keys)
        assert self.may_read.wait(WAIT_S)
        return self.spoil(self.store.read(page_keys, out), out)

    def touch(self, keys: Iterable[bytes]) -> None:
        self.store.touch(keys)

    def drop(self, keys: Iterable[bytes]) -> list[bytes]:
        return self.store.drop(keys)

    def discard(self, namespace: bytes) -> list[bytes]:
        return self.store.discard(namespace)

    def stats(self) -> StoreStats:
        return self.store.stats()

    def close(self) -> None:
        self.store.close()

    def abandon(self) -> None:
        self.store.abandon()


@dataclass
class Served:
    """An engine core over a directory; opened again, only the directory is what it was."""

    directory: Path
    num_pages: int = 32
    queue_bytes: int = 1 << 20
    context_length: int = 96
    num_records: int = NUM_RECORDS
    policy: SchedulerPolicy = POLICY
    make_extra: Callable[[DiskTier], TierExtra] | None = None
    aside: Callable[[Callable[[], None]], object] | None = None  # what makes the ids of expected prompts
    bench: Bench = field(init=False)

    def __post_init__(self) -> None:
        self.store = SlowStore(self.directory, self.num_records)
        self.bench = Bench(
            self.num_pages, self.context_length, self.policy, open_tier=self._open_tier, aside=self.aside
        )
        assert self.bench.tier is not None
        self.tier = self.bench.tier
        self._had_pages = len(self.tier.index) > 0

    def _open_tier(self, cache: PrefixCache, model: FakeModel, queue: WorkQueue) -> DiskTier:
        return DiskTier(
            self.store,
            cache,
            model,
            queue,
            clock=lambda: self.bench.now if hasattr(self, "bench") else 0.0,
            queue_bytes=self.queue_bytes,
            make_extra=self.make_extra,
        )

    def run(self) -> None:
        """Until every request has ended, as the loop does."""
        deadline = time.monotonic() + WAIT_S
        while self.bench.core.has_work or self.bench.core.num_waiting:
            if self.bench.core.has_work:
                self.bench.step()
                time.sleep(0.0001)  # steps of this model cost nothing: else the reader waits for the interpreter
            else:
                time.sleep(0.001)
            assert time.monotonic() < deadline, "a request waits for ever"

    def settle(self) -> None:
        """Until everything that is to be saved is on disk, and the disk was measured if it had pages."""
        deadline = time.monotonic() + WAIT_S
        while (
            not self.tier.writer.is_idle
            or self.bench.core.has_work
            or (self._had_pages and self.tier.rates.disk_bytes_per_s is None)
        ):
            self.bench.step()
            time.sleep(0.001)
            assert time.monotonic() < deadline, "saving does not end"
        self.bench.step()

    def close(self) -> None:
        self.store.may_read.set()
        self.store.may_write.set()
        self.tier.shut_down(WAIT_S)

    def num_loaded(self, name: str) -> int:
        """Tokens of a finished request that came from disk."""
        completion = self.bench.outputs[name][-1].completion
        assert completion is not None, self.bench.outputs[name][-1].error
        usage = completion.usage
        assert sum(usage.disk_tokens_by_kind.values()) <= usage.cached_tokens
        return sum(usage.disk_tokens_by_kind.values())


@contextmanager
def processes(directory: Path) -> Iterator[Callable[..., Served]]:
    """Opens an engine core over the same directory again and again; each ends the one before, as processes do."""
    opened: list[Served] = []

    def open_again(**options: Any) -> Served:
        if opened:
            opened[-1].close()
        opened.append(Served(directory, **options))
        return opened[-1]

    yield open_again
    if opened:
        opened[-1].close()
