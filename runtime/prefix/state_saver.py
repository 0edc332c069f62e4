"""Keep on disk, too, the states of a recurrent model that stand at the ends of saved pages.

Knows slots, keys and the writer. The engine's thread owns it. What is not taken is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..cache.prefix_cache import PrefixCache
from ..model.batch import StateIO, UInt8Array
from ..store.page_key import PageKey, StoreIdentity
from ..store.store_state import PutResult
from .disk_index import DiskIndex
from .disk_reader import EngineThread
from .disk_writer import DiskWriter
from .unsaved_pages import head_of

if TYPE_CHECKING:
    from ..store import PageStore


@dataclass
class StateSaver:
    """Stores each snapshot behind a full page once.

    Attributes:
        num_saved, num_dropped: states that the writer took, and that it had no room for.
    """

    cache: PrefixCache
    io: StateIO
    index: DiskIndex
    writer: DiskWriter
    identity: StoreIdentity
    queue: EngineThread
    num_saved: int = 0
    num_dropped: int = 0
    _on_their_way: set[bytes] = field(default_factory=set)  # keys of pages

    def save(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Store the states behind full pages of these tokens, which the writer was given before."""
        states = self.cache.states
        if states is None:
            return
        for number, page_id in enumerate(self.cache.tree.find(namespace, token_ids).pages):
            slot, node = states.at_page_end(page_id), self.cache.tree.node_of(page_id)
            if slot is None or node is None:
                continue
            page = head_of(self.identity, node, number - node.start)
            key = page.key
            if key in self._on_their_way or self.index.has_state(key):
                continue
            if self.writer.room_bytes < self.io.state_bytes:
                self.num_dropped += 1
                continue
            self._on_their_way.add(key)
            self.num_saved += 1
            self.writer.submit(partial(self._put, page, self.io.read_state(slot)), num_bytes=self.io.state_bytes)

    def _put(self, page: PageKey, state: UInt8Array, store: PageStore) -> PutResult:
        """In the writer's thread."""
        result = store.states.put(page, state)
        self.queue.post(partial(self._wrote, page.key, bool(result.stored)))
        return result

    def _wrote(self, key: bytes, is_stored: bool) -> None:
        self._on_their_way.discard(key)
        if is_stored:
            self.index.add_state(key)
