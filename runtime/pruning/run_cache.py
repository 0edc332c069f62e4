"""What is kept in memory of ordered runs on disk: the keys of their probe heads, and which token lies where.

Knows runs by their keys and their file's number, not what they are for. With it a query that reads a part of a prefix
asks the disk for that part alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..store.chunk_cache import ChunkCache
    from ..store.ordered_reader import BlockHeads, OpenRun
    from ..store.page_key import PageKey

DEFAULT_MAX_BYTES: Final = 128 << 20
ProbeKeys = npt.NDArray[np.floating[Any]]  # [layers, tokens, head_dim]


@dataclass(frozen=True)
class KnownRun:
    """One run's. The keys are in 16 bits unless the pool has 32: a probe needs no more."""

    namespace: bytes
    num_pages: int
    block_heads: BlockHeads
    probe_keys: ProbeKeys

    @property
    def num_bytes(self) -> int:
        """In memory."""
        heads = [head for head in self.block_heads.by_block if head is not None]
        return self.probe_keys.nbytes + sum(head.order.nbytes + head.checksums.nbytes for head in heads)


class RunCache:
    """At most `max_bytes` of what is known of runs; those used longest ago go first. Any thread may use it.

    Attributes:
        chunks: of keys and values, those that are wanted most, with a bound of their own; None: all come from disk.

    Of SmolLM2 in f16 and chunks of 16 tokens a token takes 4,065 bytes, 0.0039 MiB: 18 % of its keys and values.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, *, chunks: ChunkCache | None = None) -> None:
        self.max_bytes = max_bytes
        self.chunks = chunks
        self._lock = threading.Lock()  # of all below
        self._runs: OrderedDict[tuple[bytes, bytes], KnownRun] = OrderedDict()  # by what is before, and its last page
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of all that is kept."""
        return self._num_bytes

    def find(self, heads: list[PageKey]) -> KnownRun | None:
        """What is known of the longest run that `heads` begin with, which may have been written again since."""
        with self._lock:
            for head in reversed(heads):
                known = self._runs.get(key := (heads[0].parent_key, head.key))
                if known is not None:
                    self._runs.move_to_end(key)
                    return known
        return None

    def keep(self, run: OpenRun, block_heads: BlockHeads, probe_keys: ProbeKeys) -> KnownRun:
        """Note what was read of a run, in place of what was known of it before."""
        keys = probe_keys if run.layout.kv.dtype == "f32" else probe_keys.astype(np.float16)
        known = KnownRun(run.header.namespace, run.header.num_pages, block_heads, keys)
        with self._lock:
            self._remove((run.header.parent_key, run.header.key))
            self._runs[run.header.parent_key, run.header.key] = known
            self._num_bytes += known.num_bytes
            while self._num_bytes > self.max_bytes:
                self._remove(next(iter(self._runs)))
        return known

    def discard(self, namespace: bytes) -> None:
        """Forget all runs of a namespace."""
        with self._lock:
            for key in [key for key, known in self._runs.items() if known.namespace == namespace]:
                self._remove(key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._runs.clear()
            self._num_bytes = 0

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        if (known := self._runs.pop(key, None)) is not None:
            self._num_bytes -= known.num_bytes
