"""Save pages from the pool to disk: those of completed prompts and replies, and those about to be evicted.

Knows which pages are on disk or queued for it. A small portion is copied at a time, between two steps. No page is held
for it: a page that is evicted before its turn is copied then.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.radix_node import Node
from ..chat.tools.tool_calls import ToolCall
from ..model.batch import PageIO
from ..store.page_key import PageKey, StoreIdentity
from .disk_index import DiskIndex
from .disk_reader import EngineThread
from .disk_writer import DiskWriter, remaining_s
from .small_record_saver import ReplyTokens, SmallRecordSaver, StateSaver, keep_call
from .tier_hooks import Observer
from .unsaved_pages import UnsavedFinder, UnsavedPages, note_keys

_LOGGER = logging.getLogger(__name__)

PORTION_BYTES = 4 << 20  # copied between two steps: a millisecond or two
MAX_CHAINS = 256  # waiting for their turn


@dataclass
class _Chain:
    """The full pages of a prompt. Those before `num_done` are on disk, queued, or given up."""

    namespace: bytes
    token_ids: tuple[int, ...]
    num_done: int = 0
    is_begun: bool = False
    end: tuple[Node, int] | None = None  # the node with its last page in the tree, and its number of pages there

    @property
    def num_pages(self) -> int:
        """Number of full pages."""
        return len(self.token_ids) // PAGE_SIZE


@dataclass
class PageSaver:
    """Saves the pages passed to `save` and `save_leaving`, a portion between two steps.

    Attributes:
        num_dropped_pages: pages that were not saved, because too many were queued or the store is off.
        num_saved_pages: pages passed to the writer.

    Args:
        touched: called with the keys of pages on disk that were used in memory.
        aliases, calls: saved after the pages that they belong to.
        observer: stores its observations when nothing else waits to be saved.
        states: saves the states of a recurrent model, after their pages.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    io: PageIO
    identity: StoreIdentity
    touched: Callable[[Sequence[bytes]], None]
    aliases: SmallRecordSaver
    calls: SmallRecordSaver
    queue: EngineThread
    observer: Observer | None = None
    states: StateSaver | None = None
    num_saved_pages: int = 0
    num_dropped_pages: int = 0
    _finder: UnsavedFinder = field(init=False)
    _chains: deque[_Chain] = field(default_factory=deque)
    _in_flight: set[bytes] = field(default_factory=set)  # keys of pages in the writer's queue
    _is_posted: bool = False  # whether `_write_on` is queued

    def __post_init__(self) -> None:
        self._finder = UnsavedFinder(self.identity, self._is_saved, lambda page: self.cache.pool.is_whole(page))

    @property
    def has_pending(self) -> bool:
        """Return whether anything waits to be saved."""
        return bool(self._chains)

    def save(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Queue the full pages of these tokens, which are in the tree, to be saved between steps."""
        chain = _Chain(namespace, tuple(token_ids))
        if chain.num_pages == 0:
            return
        self._chains.append(chain)
        while len(self._chains) > (0 if self.writer.is_off else MAX_CHAINS):
            self._drop(self._chains.popleft())
        self.go_on()

    def save_leaving(self, node: Node, num_leaving: int) -> None:
        """Save pages that are about to be evicted, as many as the writer accepts. The tree calls this."""
        if self.writer.is_off:
            self.num_dropped_pages += num_leaving
        if node.is_tail or self.writer.is_off:
            return
        num_left = num_leaving
        try:
            num_pages, room = len(node.pages), self.writer.room_bytes // self.identity.page_bytes
            unsaved = self._finder.find(node, num_pages, most=room)
            if unsaved.num_before:
                self.touched([unsaved.parent_key])
            self._write(unsaved)
            num_left = node.start + num_pages - unsaved.num_before - len(unsaved.page_keys)
            if self.observer is not None:
                self.observer.leaving(node)
        except Exception:  # pages that are not saved are computed again
            _LOGGER.exception("pages that make room could not be saved")
        self.num_dropped_pages += min(num_leaving, num_left)

    def save_rows_leaving(self, page_ids: Sequence[int]) -> None:
        """Save pages that are about to lose rows of sliding windows, as many as the writer accepts."""
        ends: dict[int, tuple[Node, int]] = {}
        for page in page_ids:
            node = self.cache.tree.node_of(page)
            if node is not None and not node.is_tail:
                _, stop = ends.get(node.node_id, (node, 0))
                ends[node.node_id] = node, max(stop, node.pages.index(page) + 1)
        if self.writer.is_off:
            return
        try:
            for node, stop in ends.values():
                room = self.writer.room_bytes // self.identity.page_bytes
                self._write(self._finder.find(node, stop, most=room))
        except Exception:  # pages that are not saved are computed again
            _LOGGER.exception("pages that lose rows could not be saved")

    def go_on(self) -> None:
        """Schedule the next portion before the next step, if something waits and the writer accepts it."""
        if not self._is_posted and (self._is_ready if self._chains else self._has_learned):
            self._is_posted = True
            self.queue.post(self._write_on)

    def advance(self) -> None:
        """Save the next portion, if the writer accepts it."""
        if not self._is_ready:
            return
        if self.writer.is_off:
            self._drop(self._chains.popleft())
            return
        chain = self._chains[0]
        end = self._end_of(chain)
        if not chain.is_begun:
            self._begin(chain, end)
        if end is not None and chain.num_done < end[0].start + end[1]:
            most = self._portion_pages
            unsaved = self._finder.find(*end, most=most, num_done=chain.num_done)
            self._write(unsaved)
            chain.num_done = unsaved.num_before + len(unsaved.page_keys)
            if chain.num_done < end[0].start + end[1]:
                if len(unsaved.page_keys) == most:
                    return
                self.num_dropped_pages += chain.num_pages - chain.num_done  # a page lacks rows
        self._chains.popleft()  # saved, or the rest was evicted in the meantime
        if self.states is not None:
            self.states.save(chain.namespace, chain.token_ids)

    def settle(self, page_keys: Sequence[PageKey]) -> None:
        """Record that the writer has finished with these pages."""
        self._in_flight.difference_update(page.key for page in page_keys)
        self.go_on()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits to be saved, of a namespace or all."""
        self._chains = deque(c for c in self._chains if namespace is not None and c.namespace != namespace)
        self.aliases.forget(namespace)
        self.calls.forget(namespace)
        if self.observer is not None:
            self.observer.forget(namespace)

    def close(self, deadline: float) -> None:
        """Pass everything that waits to the writer, until `deadline` of `time.monotonic`."""
        try:
            while self._chains and remaining_s(deadline):
                if not self._is_ready:
                    time.sleep(0.01)  # until the writer has room
                self.advance()
            self._save_small()
            if self.observer is not None:
                self.observer.close()
        except Exception:
            _LOGGER.exception("what was computed last could not be saved")

    def keep_call(self, namespace: bytes, call: ToolCall, reply_tokens: ReplyTokens) -> None:
        """Save a tool call after the pages of its reply."""
        keep_call(self.calls, namespace, call, reply_tokens)
        if not self._chains:
            self.calls.save()

    def _save_small(self) -> None:
        self.aliases.save()
        self.calls.save()

    @property
    def _is_ready(self) -> bool:
        """Return whether something waits, and the writer accepts it."""
        return self.has_pending and self.writer.room_bytes >= self._portion_pages * self.identity.page_bytes

    @property
    def _has_learned(self) -> bool:
        return self.observer is not None and self.observer.is_ready

    def _write_on(self) -> None:
        """Save the next portion; when all is saved, store observations."""
        self._is_posted = False
        try:
            if self._chains:
                self.advance()
                if not self._chains:
                    self._save_small()
            elif self.observer is not None:
                self.observer.advance()
        except Exception:  # pages that are not saved are computed again
            _LOGGER.exception("what was computed could not be saved")
            self.forget()
        self.go_on()

    @property
    def _portion_pages(self) -> int:
        return max(1, min(PORTION_BYTES, self.writer.max_bytes) // self.identity.page_bytes)

    def _drop(self, chain: _Chain) -> None:
        self.num_dropped_pages += chain.num_pages - chain.num_done

    def _begin(self, chain: _Chain, end: tuple[Node, int] | None) -> None:
        """Skip the first pages that are on disk, and record their use."""
        chain.is_begun = True
        if stored := self.index.keys(chain.namespace, chain.token_ids):
            chain.num_done = len(stored)
            self.touched(stored[-1:])
            if end is not None:
                note_keys(*end, stored)

    def _is_saved(self, key: bytes) -> bool:
        """Return whether a page is on disk, or in the writer's queue."""
        return key in self._in_flight or key in self.index

    def _end_of(self, chain: _Chain) -> tuple[Node, int] | None:
        """Return the node with the last page of a chain that is in the tree, and the chain's number of pages there.

        None if no page is. The tree is searched from the root only if the page is no longer in the node of the last
        call.
        """
        tree = self.cache.tree
        if chain.end is not None:
            node, stop = chain.end
            if stop <= len(node.pages) and tree.node_of(node.pages[stop - 1]) is node:
                return chain.end
        pages = tree.find(chain.namespace, chain.token_ids).pages
        node_of_last = tree.node_of(pages[-1]) if pages else None
        chain.end = None if node_of_last is None else (node_of_last, len(pages) - node_of_last.start)
        return chain.end

    def _write(self, unsaved: UnsavedPages) -> None:
        """Pass pages to the writer."""
        page_keys = unsaved.page_keys
        if not page_keys:
            return
        pages = np.empty((len(page_keys), self.identity.page_bytes), np.uint8)
        self.io.read_pages(unsaved.page_ids, pages)
        if self.writer.write(page_keys, pages):
            self._in_flight.update(page.key for page in page_keys)
            self.num_saved_pages += len(page_keys)
        else:
            self.num_dropped_pages += len(page_keys)
