"""Copy pages out of the pool to the disk: those of prompts and replies that are done, and those about to make room.

Knows which pages are on disk, or on their way. A little is copied at a time, between two steps; no page is held for it:
what makes room before its turn is copied then.
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
from .beside_saver import BesideSaver, MadeBy, StateSaver, keep_call
from .disk_index import DiskIndex
from .disk_reader import EngineThread
from .disk_writer import DiskWriter, remaining_s
from .tier_hooks import Observer
from .unsaved_pages import UnsavedFinder, UnsavedPages, note_keys

_LOGGER = logging.getLogger(__name__)

PORTION_BYTES = 4 << 20  # copied between two steps: a millisecond or two
MAX_CHAINS = 256  # that wait for their turn


@dataclass
class _Chain:
    """The full pages of a prompt; those before `num_done` are on disk, on their way, or given up."""

    namespace: bytes
    token_ids: tuple[int, ...]
    num_done: int = 0
    is_begun: bool = False
    end: tuple[Node, int] | None = None  # the node that has its last page in the tree, and how many pages lead there

    @property
    def num_pages(self) -> int:
        """Full pages."""
        return len(self.token_ids) // PAGE_SIZE


@dataclass
class PageSaver:
    """Saves by `save` and `save_leaving`, a portion between two steps.

    Attributes:
        num_dropped_pages: that were to be saved and were not, because too much waited or the store is off.
        num_saved_pages: handed to the writer.

    Args:
        touched: told of the keys of pages that are on disk and were used in memory.
        aliases, calls: are saved after the pages that they belong to.
        observer: has stored what it learned when nothing waits to be saved.
        states: saves those of a recurrent model, after their pages.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    io: PageIO
    identity: StoreIdentity
    touched: Callable[[Sequence[bytes]], None]
    aliases: BesideSaver
    calls: BesideSaver
    queue: EngineThread
    observer: Observer | None = None
    states: StateSaver | None = None
    num_saved_pages: int = 0
    num_dropped_pages: int = 0
    _finder: UnsavedFinder = field(init=False)
    _chains: deque[_Chain] = field(default_factory=deque)
    _on_their_way: set[bytes] = field(default_factory=set)  # keys that the writer has
    _is_posted: bool = False  # `_write_on`

    def __post_init__(self) -> None:
        self._finder = UnsavedFinder(self.identity, self._is_saved)

    @property
    def has_pending(self) -> bool:
        """Whether anything waits."""
        return bool(self._chains)

    def save(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Have the full pages of these tokens saved, which are in the tree; when there is time."""
        chain = _Chain(namespace, tuple(token_ids))
        if chain.num_pages == 0:
            return
        self._chains.append(chain)
        while len(self._chains) > (0 if self.writer.is_off else MAX_CHAINS):
            self._drop(self._chains.popleft())
        self.go_on()

    def save_leaving(self, node: Node, num_leaving: int) -> None:
        """Save now what is about to make room, as much of it as the writer takes: a `Leaving` of the tree."""
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
            num_left = node.start + num_pages - unsaved.num_before - len(unsaved.heads)
            if self.observer is not None:
                self.observer.leaving(node)
        except Exception:  # what is not saved is computed again
            _LOGGER.exception("pages that make room could not be saved")
        self.num_dropped_pages += min(num_leaving, num_left)

    def go_on(self) -> None:
        """Write on before the next step, if something waits and the writer takes it."""
        if not self._is_posted and (self._is_ready if self._chains else self._has_learned):
            self._is_posted = True
            self.queue.post(self._write_on)

    def advance(self) -> None:
        """Save the next portion, if the writer takes it."""
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
            unsaved = self._finder.find(*end, most=self._portion_pages, num_done=chain.num_done)
            self._write(unsaved)
            chain.num_done = unsaved.num_before + len(unsaved.heads)
            if chain.num_done < end[0].start + end[1]:
                return
        self._chains.popleft()  # saved, or the rest made room meanwhile
        if self.states is not None:
            self.states.save(chain.namespace, chain.token_ids)

    def settle(self, heads: Sequence[PageKey]) -> None:
        """The writer is done with pages: they are not on their way any more."""
        self._on_their_way.difference_update(head.key for head in heads)
        self.go_on()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        self._chains = deque(c for c in self._chains if namespace is not None and c.namespace != namespace)
        self.aliases.forget(namespace)
        self.calls.forget(namespace)
        if self.observer is not None:
            self.observer.forget(namespace)

    def close(self, deadline: float) -> None:
        """Hand all that waits to the writer, until `deadline` of `time.monotonic`."""
        try:
            while self._chains and remaining_s(deadline):
                if not self._is_ready:
                    time.sleep(0.01)  # for the writer to make room
                self.advance()
            self._save_small()
            if self.observer is not None:
                self.observer.close()
        except Exception:
            _LOGGER.exception("what was computed last could not be saved")

    def keep_call(self, namespace: bytes, call: ToolCall, made_by: MadeBy) -> None:
        """Have a call saved after the pages of its reply."""
        keep_call(self.calls, namespace, call, made_by)
        if not self._chains:
            self.calls.save()

    def _save_small(self) -> None:
        self.aliases.save()
        self.calls.save()

    @property
    def _is_ready(self) -> bool:
        """Whether something waits, and the writer takes it."""
        return self.has_pending and self.writer.room_bytes >= self._portion_pages * self.identity.page_bytes

    @property
    def _has_learned(self) -> bool:
        return self.observer is not None and self.observer.is_ready

    def _write_on(self) -> None:
        """Save a little more; when all is saved, store what was learned."""
        self._is_posted = False
        try:
            if self._chains:
                self.advance()
                if not self._chains:
                    self._save_small()
            elif self.observer is not None:
                self.observer.advance()
        except Exception:  # what is not saved is computed again
            _LOGGER.exception("what was computed could not be saved")
            self.forget()
        self.go_on()

    @property
    def _portion_pages(self) -> int:
        return max(1, min(PORTION_BYTES, self.writer.max_bytes) // self.identity.page_bytes)

    def _drop(self, chain: _Chain) -> None:
        self.num_dropped_pages += chain.num_pages - chain.num_done

    def _begin(self, chain: _Chain, end: tuple[Node, int] | None) -> None:
        """Pass over the first pages that are on disk; they count as used."""
        chain.is_begun = True
        if stored := self.index.keys(chain.namespace, chain.token_ids):
            chain.num_done = len(stored)
            self.touched(stored[-1:])
            if end is not None:
                note_keys(*end, stored)

    def _is_saved(self, key: bytes) -> bool:
        """Whether a page is on disk, or on its way."""
        return key in self._on_their_way or key in self.index

    def _end_of(self, chain: _Chain) -> tuple[Node, int] | None:
        """The node with the last page of a chain that is in the tree, and how many of its pages lead there; None if
        none is. It is looked for from the root only if it is not where it was."""
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
        """Hand pages to the writer."""
        heads = unsaved.heads
        if not heads:
            return
        pages = np.empty((len(heads), self.identity.page_bytes), np.uint8)
        self.io.read_pages(unsaved.page_ids, pages)
        if self.writer.write(heads, pages):
            self._on_their_way.update(head.key for head in heads)
            self.num_saved_pages += len(heads)
        else:
            self.num_dropped_pages += len(heads)
