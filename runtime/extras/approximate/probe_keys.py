"""What memory keeps of ordered runs on disk: the keys of their probe heads, orders and checksums.

With these, a query ranks the rows of a prefix without the disk, and asks it only for the rows that it picks. Knows runs
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
    """What is kept of one run."""

    namespace: bytes
    tables: RunTables
    probe_keys: PackedKeys
    num_bytes: int  # in memory, once all tables are read


class ProbeKeyCache:
    """Keeps what is known of runs in at most `max_bytes`, and drops the least recently used. Any thread may use it.

    Args:
        dims: which numbers of keys are kept, by `packed_keys.kept_dims` so many that a run takes 4 % of its keys and
            values: 671 bytes for a token of SmolLM2 in k12v8.

    Attributes:
        chunks: keeps keys and values of runs, with a bound of its own; None: they are read from disk each time.
    """

    def __init__(self, dims: Dims, max_bytes: int = DEFAULT_MAX_BYTES, *, chunks: ChunkCache | None = None) -> None:
        self._dims, self.max_bytes = dims, max_bytes
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

    def pack(self, keys: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
        """The bytes that a run on disk has of its probe keys, `[layers, tokens, head_dim]`: a row a layer."""
        return PackedKeys.of(keys, self._dims).encode()

    def keep(self, run: OpenRun, packed: npt.NDArray[np.uint8]) -> KnownRun | None:
        """Keep what was read of a run, the keys as `pack` made them, in place of what was known of it. None if it did
        not make them: then other numbers may be kept of each key."""
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
                run = Cache.__getitem__(self._runs, key)  # a look that is no use
                if namespace is None or run.namespace == namespace:
                    del self._runs[key]
