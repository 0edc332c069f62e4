"""Cache data of ordered runs on disk: the keys of their probe heads, orders and checksums.

With these, a query ranks the rows of a prefix without the disk, and reads only the rows that it picks. Knows runs
by their keys and the number of their file, not what they are used for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from cachetools import Cache, LRUCache

from .packed_keys import Dims, PackedKeys

if TYPE_CHECKING:
    from ...store.page_key import PageKey
    from .records.chunk_cache import ChunkCache
    from .records.ordered_reader import OpenRun
    from .records.ordered_record import RunTables

DEFAULT_MAX_BYTES: Final = 128 << 20


@dataclass(frozen=True)
class KnownRun:
    """The cached data of one run."""

    namespace: bytes
    tables: RunTables
    probe_keys: PackedKeys
    num_bytes: int  # in memory, once all tables are read


class ProbeKeyCache:
    """Caches data of runs in at most `max_bytes`, and drops the least recently used. For any thread.

    Args:
        dims: kept dimensions of keys; with `packed_keys.kept_dims`, a run takes 4 % of its KV: 671 bytes for a token of
            SmolLM2 in k12v8.

    Attributes:
        chunks: a cache of KV of runs, with its own bound; None: KV is read from disk each time.
    """

    def __init__(self, dims: Dims, max_bytes: int = DEFAULT_MAX_BYTES, *, chunks: ChunkCache | None = None) -> None:
        self._dims, self.max_bytes = dims, max_bytes
        self.chunks = chunks
        self._lock = threading.Lock()  # guards the runs, by their first page's parent and their last page
        self._runs: LRUCache[tuple[bytes, bytes], KnownRun] = LRUCache(max_bytes, lambda known: known.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all cached data."""
        return int(self._runs.currsize)

    def find(self, page_keys: list[PageKey]) -> KnownRun | None:
        """Return the cached data of the longest run that `page_keys` begin with; None if there is none.

        The file of the run may have another order by now.
        """
        with self._lock:
            for page in reversed(page_keys):
                if (key := (page_keys[0].parent_key, page.key)) in self._runs:
                    return self._runs[key]
        return None

    def pack(self, keys: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
        """Return probe keys, `[layers, tokens, head_dim]`, as the bytes of a run on disk, a row for each layer."""
        return PackedKeys.of(keys, self._dims).encode()

    def keep(self, run: OpenRun, packed: npt.NDArray[np.uint8]) -> KnownRun | None:
        """Cache the probe keys and tables of a run, replacing older ones, and return them.

        Returns None, with nothing cached, if `packed` is invalid or has other dimensions of the keys than this cache.
        """
        keys = PackedKeys.decode(packed)
        if keys is None or not np.array_equal(keys.dims, self._dims):
            return None
        known = KnownRun(run.header.namespace, run.tables, keys, keys.nbytes + run.layout.table_bytes)
        key = run.header.parent_key, run.header.key
        with self._lock:
            self._runs.pop(key, None)
            if known.num_bytes <= self.max_bytes:
                self._runs[key] = known
        return known

    def discard(self, namespace: bytes | None = None) -> None:
        """Drop the runs of a namespace, or all."""
        with self._lock:
            for key in list(self._runs):
                run = Cache.__getitem__(self._runs, key)  # does not count as a use
                if namespace is None or run.namespace == namespace:
                    del self._runs[key]
