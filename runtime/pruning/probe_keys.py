"""What memory keeps of ordered runs on disk: the keys of their probe heads, and which token lies where.

With both, a query ranks the rows of a prefix without the disk, and asks it only for the rows that it picks. Knows runs
by their keys and the number of their file, not what they are used for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from cachetools import Cache, LRUCache

if TYPE_CHECKING:
    from ..store.chunk_cache import ChunkCache
    from ..store.ordered_reader import OpenRun
    from ..store.ordered_record import BlockHeads
    from ..store.page_key import PageKey

DEFAULT_MAX_BYTES: Final = 128 << 20
ProbeKeys = npt.NDArray[np.floating[Any]]  # [layers, tokens, head_dim]


@dataclass(frozen=True)
class KnownRun:
    """What is kept of one run. The keys have 16 bits unless the pool has 32: a probe needs no more."""

    namespace: bytes
    block_heads: BlockHeads
    probe_keys: ProbeKeys

    @property
    def num_bytes(self) -> int:
        """In memory."""
        heads = [head for head in self.block_heads.by_block if head is not None]
        return self.probe_keys.nbytes + sum(head.order.nbytes + head.checksums.nbytes for head in heads)


class ProbeKeyCache:
    """Keeps what is known of runs in at most `max_bytes`, and drops the least recently used. Any thread may use it.

    Attributes:
        chunks: keeps keys and values of runs, with a bound of its own; None: they are read from disk each time.

    A token of SmolLM2, in f16 and chunks of 16 tokens, takes 4,065 bytes: 18 % of its keys and values.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, *, chunks: ChunkCache | None = None) -> None:
        self.max_bytes = max_bytes
        self.chunks = chunks
        self._lock = threading.Lock()  # guards the runs, by their first page's parent and their last page
        self._runs: LRUCache[tuple[bytes, bytes], KnownRun] = LRUCache(max_bytes, lambda known: known.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return int(self._runs.currsize)

    def find(self, heads: list[PageKey]) -> KnownRun | None:
        """What is known of the longest run that `heads` begin with; the file may have another order by now."""
        with self._lock:
            for head in reversed(heads):
                if (key := (heads[0].parent_key, head.key)) in self._runs:
                    return self._runs[key]
        return None

    def keep(self, run: OpenRun, block_heads: BlockHeads, probe_keys: ProbeKeys) -> KnownRun:
        """Keep what was read of a run, in place of what was known of it."""
        keys = probe_keys if run.layout.kv.dtype == "f32" else probe_keys.astype(np.float16)
        known, key = KnownRun(run.header.namespace, block_heads, keys), (run.header.parent_key, run.header.key)
        with self._lock:
            self._runs.pop(key, None)
            if known.num_bytes <= self.max_bytes:
                self._runs[key] = known
        return known

    def discard(self, namespace: bytes | None = None) -> None:
        """Drop the runs of a namespace, or all."""
        with self._lock:
            for key in list(self._runs):
                run = Cache.__getitem__(self._runs, key)  # a look that is no use
                if namespace is None or run.namespace == namespace:
                    del self._runs[key]
