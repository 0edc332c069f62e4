"""Copy pages out of the pool to the disk: those of prompts and replies that are done, and those about to make room.

Knows which pages are on disk, or on their way. A little is copied at a time, between two steps; no page is held for it:
what makes room before its turn is copied then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.radix_node import Node, tokens_of
from ..model.batch import PageIO
from ..store.page_key import NO_PARENT, PageKey, StoreIdentity
from .disk_index import DiskIndex
from .disk_writer import DiskWriter

PORTION_BYTES = 4 << 20  # copied between two steps: a millisecond or two
MAX_CHAINS = 256  # that wait for their turn


@dataclass
class _Chain:
    """The full pages of a prompt; those before `num_done` are on disk, on their way, or given up."""

    namespace: bytes
    token_ids: tuple[int, ...]
    generated: bytes
    num_done: int = 0
    parent_key: bytes = NO_PARENT

    @property
    def num_pages(self) -> int:
        """Full pages."""
        return len(self.token_ids) // PAGE_SIZE

    def head(self, identity: StoreIdentity) -> PageKey:
        """Of the first page that is not done."""
        tokens = slice(self.num_done * PAGE_SIZE, (self.num_done + 1) * PAGE_SIZE)
        return PageKey.of(identity, self.namespace, self.parent_key, self.token_ids[tokens], self.generated[tokens])

    def advance(self, key: bytes) -> None:
        """The first page that is not done has this key, and is done."""
        self.num_done, self.parent_key = self.num_done + 1, key


@dataclass
class PageSaver:
    """Saves by `save` and `save_leaving`; `advance` does the next portion.

    Attributes:
        num_dropped_pages: that were to be saved and were not, because too much waited.
        num_saved_pages: handed to the writer.

    Args:
        touched: told of the keys of pages that are on disk and were used in memory.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    io: PageIO
    identity: StoreIdentity
    touched: Callable[[Sequence[bytes]], None]
    num_saved_pages: int = 0
    num_dropped_pages: int = 0
    _chains: deque[_Chain] = field(default_factory=deque)
    _on_their_way: set[bytes] = field(default_factory=set)  # keys that the writer has

    @property
    def has_pending(self) -> bool:
        """Whether anything waits."""
        return bool(self._chains)

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would get on: something waits, and the writer takes it."""
        return self.has_pending and self.writer.room_bytes >= self._portion_pages * self.identity.page_bytes

    def save(self, namespace: bytes, token_ids: Sequence[int], generated: bytes) -> None:
        """Have the full pages of these tokens saved, which are in the tree; when there is time."""
        chain = _Chain(namespace, tuple(token_ids), generated)
        if chain.num_pages == 0:
            return
        if len(self._chains) == MAX_CHAINS:
            dropped = self._chains.popleft()
            self.num_dropped_pages += dropped.num_pages - dropped.num_done
        self._chains.append(chain)

    def save_leaving(self, node: Node, num_leaving: int) -> None:
        """Save now what is about to make room, as much of it as the writer takes: a `Leaving` of the tree."""
        if node.is_tail:
            return
        path = node.path()
        chain = _Chain(path.namespace, tokens_of(path.key), path.generated)
        self._skip(chain)
        num_left = chain.num_pages - chain.num_done
        if num_left > 0:
            num_taken = min(num_left, self.writer.room_bytes // self.identity.page_bytes)
            self._write(chain, path.page_ids, num_taken)
            self.num_dropped_pages += min(num_leaving, chain.num_pages - chain.num_done)

    def advance(self) -> None:
        """Save the next portion, if the writer takes it."""
        if not self.is_ready:
            return
        chain = self._chains[0]
        self._skip(chain)
        if chain.num_done < chain.num_pages:
            found = self.cache.tree.find(chain.namespace, chain.token_ids)
            self._write(chain, found.pages, self._portion_pages)
            if chain.num_done < min(len(found.pages), chain.num_pages):
                return
        self._chains.popleft()  # saved, or the rest made room meanwhile

    def settle(self, heads: Sequence[PageKey]) -> None:
        """The writer is done with pages: they are not on their way any more."""
        self._on_their_way.difference_update(head.key for head in heads)

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        self._chains = deque(c for c in self._chains if namespace is not None and c.namespace != namespace)

    @property
    def _portion_pages(self) -> int:
        return max(1, min(PORTION_BYTES, self.writer.max_bytes) // self.identity.page_bytes)

    def _skip(self, chain: _Chain) -> None:
        """Pass over first pages that are on disk, or on their way."""
        if chain.num_done == 0 and (stored := self.index.keys(chain.namespace, chain.token_ids)):
            chain.num_done, chain.parent_key = len(stored), stored[-1]
            self.touched(stored)
        while chain.num_done < chain.num_pages:
            key = chain.head(self.identity).key
            if key not in self._on_their_way and key not in self.index:
                return
            chain.advance(key)

    def _write(self, chain: _Chain, page_ids: Sequence[int], num_pages: int) -> None:
        """Hand the next pages of a chain to the writer, as far as they are in the pool."""
        start = chain.num_done
        stop = min(start + num_pages, chain.num_pages, len(page_ids))
        heads: list[PageKey] = []
        while chain.num_done < stop:
            heads.append(chain.head(self.identity))
            chain.advance(heads[-1].key)
        if not heads:
            return
        pages = np.empty((len(heads), self.identity.page_bytes), np.uint8)
        self.io.read_pages(list(page_ids[start:stop]), pages)
        if self.writer.write(heads, pages):
            self._on_their_way.update(head.key for head in heads)
            self.num_saved_pages += len(heads)
        else:
            self.num_dropped_pages += len(heads)
