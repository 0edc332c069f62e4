"""The chunks of one ordered run that are in memory, and how all of its chunks were used.

Books for `chunk_cache.py`, under whose lock they are kept. A chunk is known by its place in the file: block times
number of groups, plus group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .ordered_layout import OrderedLayout
from .ordered_run import UInt8Array

ChunkIds = NDArray[np.int64]


class CachedRun:
    """Chunks of a run of `layout`.

    Uses are added up as the logarithm of a sum that grows with time, `2 ** (time in half lives)` each, instead of one
    that fades: so the order of two chunks changes only when one is used, and nothing is to be brought up to date.

    Args:
        importance: of each chunk, more than 0; None: `1 / (1 + block)`.
        weight: of importance.

    Attributes:
        is_here: by chunk.
        num_here: how many are.
        num_bytes: of those.
        is_gone: the cache has let go of it for ever.
    """

    def __init__(self, layout: OrderedLayout, importance: NDArray[Any] | None, weight: float) -> None:
        self.layout = layout
        num_chunks = layout.num_blocks * layout.num_groups
        if importance is None:
            importance = 1 / (1 + np.arange(num_chunks) // layout.num_groups)
        assert importance.shape == (num_chunks,) and importance.min() > 0
        self.is_here = np.zeros(num_chunks, np.bool_)
        self.num_here = self.num_bytes = 0
        self.is_gone = False
        self._last_bytes = layout.chunk_bytes(layout.num_blocks - 1)
        self._importance = weight * np.log2(importance)
        self._uses = np.full(num_chunks, -np.inf)
        self._checksums = np.zeros(num_chunks, np.uint64)
        self._chunks = np.full(num_chunks, None, object)

    @property
    def books_bytes(self) -> int:
        """Taken without any chunk."""
        arrays = (self.is_here, self._importance, self._uses, self._checksums, self._chunks)
        return sum(array.nbytes for array in arrays)

    def sizes(self, ids: ChunkIds) -> NDArray[np.int64]:
        """Bytes of each."""
        first_of_last = (self.layout.num_blocks - 1) * self.layout.num_groups
        return np.where(ids < first_of_last, self.layout.chunk_bytes(0), self._last_bytes)

    def worth(self, ids: ChunkIds) -> NDArray[np.float64]:
        """The logarithm of what each is worth."""
        worth: NDArray[np.float64] = self._uses[ids] + self._importance[ids]
        return worth

    def use(self, ids: ChunkIds, time: float) -> None:
        """Count a use of each, at a time in half lives."""
        self._uses[ids] = np.logaddexp2(self._uses[ids], time)

    def find(self, ids: ChunkIds, checksums: NDArray[np.uint64]) -> tuple[list[UInt8Array | None], NDArray[np.bool_]]:
        """The chunks that are here with these checksums, and which."""
        is_hit: NDArray[np.bool_] = self.is_here[ids] & (self._checksums[ids] == checksums)
        chunks = self._chunks[ids]
        chunks[~is_hit] = None
        return chunks.tolist(), is_hit

    def keep(self, ids: ChunkIds, checksums: NDArray[np.uint64], chunks: Sequence[UInt8Array]) -> int:
        """Have those here; how many bytes more that are."""
        before = self.num_bytes
        self.let_go(ids[self.is_here[ids]])
        for i, chunk in zip(ids.tolist(), chunks, strict=True):
            self._chunks[i] = chunk
        self._checksums[ids] = checksums
        self.is_here[ids] = True
        self.num_here += len(ids)
        self.num_bytes += int(self.sizes(ids).sum())
        return self.num_bytes - before

    def let_go(self, ids: ChunkIds) -> int:
        """Of those, which are here; how many bytes that are."""
        num_bytes = int(self.sizes(ids).sum())
        self._chunks[ids] = None
        self.is_here[ids] = False
        self.num_here -= len(ids)
        self.num_bytes -= num_bytes
        return num_bytes

    def check(self) -> None:
        """Assert that the books agree."""
        chunks = {i: chunk for i, chunk in enumerate(self._chunks) if chunk is not None}
        assert list(chunks) == np.flatnonzero(self.is_here).tolist() and len(chunks) == self.num_here
        assert sum(chunk.nbytes for chunk in chunks.values()) == self.num_bytes
        assert not self.is_gone
