"""Keep the runs of tokens whose KV is in pages, for live and finished sequences alike.

Knows token ids, page ids, and when each run was last used. Not the meaning of tokens, nor which sequence shares a page,
which the pool counts; and not which run is evicted first, which `eviction.py` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from ..states.state_pool import NO_STATE, FoundState, StatePool
from .eviction import Eviction
from .found_run import FoundRun
from .node_table import NodeTable
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, Key, Node, either, encode_key, num_common_tokens


class RadixTree:
    """The cached runs of tokens as a radix tree, with one root per namespace.

    ::

        root -> [page page page] -> [page]            a node is a run of full pages
                                 -> [page page tail)  a tail is a leaf of its own, of one partial page

    A page belongs to one node. A node splits at page boundaries only, so runs that differ inside a page are siblings
    that begin with the same rows. The rows of a page in the tree never change: to write after them, copy them first. A
    sequence that owns a page owns all pages above it, so unowned pages can be evicted, leaves first.

    Attributes:
        eviction: frees pages that no sequence owns.
        states: recurrent models: the state snapshots in the tree; None for all others.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        clock: Callable[[], float] = time.monotonic,
        kv_log: KVLog | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._pool, self._now = pool, clock
        self._kv_log = kv_log
        self.states = states
        self._table = NodeTable(pool, kv_log, states)
        self.eviction = Eviction(pool, self._table)
        self._clock = 0

    def emptied(self, pool: PagePool, states: StatePool | None = None) -> RadixTree:
        """Return a tree without runs over other pools.

        Its version is newer than this one's, and its counts continue.
        """
        tree = RadixTree(pool, clock=self._now, kv_log=self._kv_log, states=states)
        tree._table.version = self.version + 1
        tree._table.num_dropped = self.num_dropped + 1
        tree.eviction.before_evict = self.eviction.before_evict
        tree.eviction.num_evicted_pages = self.eviction.num_evicted_pages
        return tree

    @property
    def version(self) -> int:
        """Number that increases when matches can change: by pages, rows of sliding windows, or recurrent states."""
        others = (self.states, self._pool.windows)
        return self._table.version + sum(other.version for other in others if other is not None)

    @property
    def num_dropped(self) -> int:
        """Number of pages that left the tree so far.

        While it is unchanged, every page that was in the tree still is.
        """
        return self._table.num_dropped

    @property
    def num_nodes(self) -> int:
        """Number of runs in the tree, roots not counted."""
        return len(self._table.nodes)

    @property
    def num_unused_rows(self) -> int:
        """Number of rows without a token in the partial pages of tails."""
        return self._table.num_unused_rows

    @property
    def namespaces(self) -> list[bytes]:
        """Namespaces that have a run."""
        return list(self._table.roots)

    def num_pages(self, namespace: bytes) -> int:
        """Return the number of pages of a namespace. Visits all its runs."""
        root = self.root(namespace)
        nodes = [] if root is None else [*root.children]
        for node in nodes:
            nodes += node.children
        return sum(len(node.pages) for node in nodes)

    def root(self, namespace: bytes | None) -> Node | None:
        """Return the root of a namespace, read only; None if it has no runs."""
        return None if namespace is None else self._table.roots.get(namespace)

    def node_of(self, page_id: int) -> Node | None:
        """Return the run that contains a page, read only; None if none does."""
        return self._table.node_of(page_id)

    def find(self, namespace: bytes | None, token_ids: Sequence[int]) -> FoundRun:
        """Return the longest run of the namespace that begins like `token_ids`; changes nothing."""
        return self.find_key(namespace, encode_key(token_ids))

    def find_key(self, namespace: bytes | None, key: bytes) -> FoundRun:
        """Return the result of `find` for the tokens of a key."""
        return FoundRun.below(self.root(namespace), key)

    def find_resumable(self, namespace: bytes | None, key: bytes) -> FoundRun:
        """Return the part of `find_key` after which a sequence can resume.

        With a recurrent model it ends at a state. If rows of sliding windows were dropped, it ends where they are kept.
        """
        found = self.find_key(namespace, key)
        if (windows := self._pool.windows) is not None:
            pages = found.pages if found.partial_page is None else [*found.pages, found.partial_page]
            return found.up_to(FoundState(windows.resumable(pages, found.num_tokens), NO_STATE))
        if self.states is None or namespace is None:
            return found
        return found.up_to(self.states.find(namespace, found.pages, key, found.num_tokens))

    def ahead(self, namespace: bytes, above: Sequence[int], token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that follow the pages `above` and then `token_ids`, in the runs used last.

        Changes nothing.
        """
        if self.root(namespace) is None:
            return ()
        node, offset = self._end_of(namespace, above[-1] if above else None, len(above))
        return node.ahead(encode_key(token_ids), most, offset * PAGE_SIZE)

    def insert_after(
        self,
        namespace: bytes,
        last_above: int | None,
        num_above: int,
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        generated: Key,
    ) -> list[int]:
        """Keep full pages below `num_above` others; return the pages that hold these tokens now.

        If the tree already has a page of the same tokens at the same position, the result contains that page. The given
        page then stays the caller's alone.

        Args:
            last_above: the last of the pages above; None if there are none.
        """
        assert len(token_ids) == PAGE_SIZE * len(page_ids) == len(generated)
        key = encode_key(token_ids)
        node, offset = self._end_of(namespace, last_above, num_above)
        kept: list[int] = []
        while len(kept) < len(page_ids):
            if offset < len(node.pages):
                start = len(kept)
                common = num_common_tokens(node.run, key, offset * PAGE_BYTES, start * PAGE_BYTES)
                common //= PAGE_SIZE
                marks = generated[start * PAGE_SIZE : (start + common) * PAGE_SIZE]
                node.mark_generated(offset * PAGE_SIZE, marks)
                kept += node.pages[offset : offset + common]
                offset += common
                if offset < len(node.pages) and len(kept) < len(page_ids):
                    self._split(node, offset)
                continue
            start = len(kept)
            child = node.child(key[start * PAGE_BYTES : (start + 1) * PAGE_BYTES])
            if child is None:
                rest = list(page_ids[start:])
                node = self._grow(node, key[start * PAGE_BYTES :], rest, generated[start * PAGE_SIZE :])
                offset = len(node.pages)
                kept += rest
            else:
                node, offset = child, 0
        self._touch(node, offset)
        return kept

    def insert_tail(
        self, namespace: bytes, above: Sequence[int], token_ids: Sequence[int], page_id: int, generated: Key
    ) -> None:
        """Keep the first `len(token_ids)` rows of a partial page below the pages `above`.

        The page stays the caller's alone if the tree has the same rows at the same position.
        """
        assert 0 < len(token_ids) == len(generated) < PAGE_SIZE
        key = encode_key(token_ids)
        node, offset = self._end_of(namespace, above[-1] if above else None, len(above))
        if offset < len(node.pages):
            run = node.run[offset * PAGE_BYTES : (offset + 1) * PAGE_BYTES]
            if run.startswith(key):
                node.mark_generated(offset * PAGE_SIZE, generated)
                self._touch(node, offset + 1)
                return
            self._split(node, offset)
        longer = node.beginning_with(key)
        if longer is None:
            generated = self._supersede_tail(node, key, generated)
            longer = self._table.add_child(node, key, [page_id], generated)
        else:
            longer.mark_generated(0, generated)
        self._touch(longer, 1)

    def touch(self, page_ids: Sequence[int]) -> None:
        """Mark these pages, listed from a root down, as used now; the rest of their last run is not."""
        if page_ids:
            self._touch(*self._table.end_of(page_ids[-1], len(page_ids)))

    def remove(self, page_ids: Sequence[int]) -> list[int]:
        """Remove unowned pages and everything that continues them; return all removed pages.

        Pages that are not in the tree, perhaps because they were below another of `page_ids`, are skipped.
        """
        removed: list[int] = []
        for page in page_ids:
            node = self.node_of(page)
            if node is not None:
                removed += self._cut(node, node.pages.index(page))
        return removed

    def clear(self, namespace: bytes) -> int:
        """Free the pages of a namespace that no sequence owns, and do not remember them; return their number."""
        if self.states is not None:
            self.states.forget([namespace])
        root = self.root(namespace)
        if root is None:
            return 0
        nodes, num_freed = [root], 0
        for node in nodes:
            nodes += node.children
        for node in reversed(nodes[1:]):
            if not node.children:
                num_freed += self.eviction.trim(node, len(node.pages))
        for node in nodes:
            node.evicted.clear()
        return num_freed

    def forget_states(self, namespace: bytes, above: Sequence[int], token_ids: Sequence[int]) -> None:
        """Drop the states within a partial page of these tokens, unless another run has the same rows.

        The page comes after the pages `above`.
        """
        if self.states is not None and self.root(namespace) is not None:
            end = self._end_of(namespace, above[-1] if above else None, len(above))
            self._table.forget_states(*end, encode_key(token_ids))

    def paths(self) -> Iterator[tuple[bytes, list[int], list[int]]]:
        """Yield namespace, tokens and pages from the root to each leaf; slow."""
        for namespace, root in self._table.roots.items():
            stack: list[tuple[Node, list[int], list[int]]] = [(root, [], [])]
            while stack:
                node, token_ids, pages = stack.pop()
                token_ids = token_ids + np.frombuffer(bytes(node.run), ">u4").tolist()
                pages = pages + node.pages
                if not node.children:
                    yield namespace, token_ids, pages
                stack += [(child, token_ids, pages) for child in node.children]

    def check(self) -> None:
        """Raise AssertionError unless every node is whole, reachable, in order and known by its pages."""
        self._table.check()
        assert not self.eviction.leaves.missing(), "a leaf that could never be evicted"

    def page_ids(self) -> list[int]:
        """Return every page that the tree owns."""
        return [page for node in self._table.nodes.values() for page in node.pages]

    def _end_of(self, namespace: bytes, last_above: int | None, num_above: int) -> tuple[Node, int]:
        """Return the node in which `num_above` pages end, and its number of pages among them; the root for 0 pages."""
        return (self._table.root(namespace), 0) if last_above is None else self._table.end_of(last_above, num_above)

    def _grow(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> Node:
        """Append pages of tokens after `node`, and return the node that holds them: `node` itself, or a new child.

        A node without children is extended. A root, and a node from which a continuation was evicted, gets a child.

        Args:
            generated: one byte a token, 1 if a model generated it.
        """
        generated = self._supersede_tail(node, key, generated)
        if node.children or node.evicted or node.parent is None:
            return self._table.add_child(node, key, page_ids, generated)
        self._table.extend(node, key, page_ids, generated)
        return node

    def _supersede_tail(self, node: Node, key: bytes, generated: Key) -> Key:
        """Drop a tail that `key` begins with; return `generated` with the tail's marks added.

        A sequence that was about to copy its rows is the page's only owner from here on, and writes to it.
        """
        tail = node.tail_before(key[:PAGE_BYTES])
        if tail is None:
            return generated
        generated = either(generated, bytes(tail.generated) + bytes(len(generated) - len(tail.generated)))
        self._table.remove(tail, is_superseded=True)
        return generated

    def _split(self, node: Node, num_pages: int) -> None:
        """Cut a run after `num_pages` pages; the lower part becomes its child, and a leaf if it has no children."""
        lower = self._table.split(node, num_pages)
        if not lower.children:
            self.eviction.leaves.push(lower)

    def _cut(self, node: Node, num_kept: int) -> list[int]:
        """Remove a run's pages from `num_kept` on and everything below it; return all removed pages."""
        below = [*node.children]
        for child in below:
            below += child.children
        removed = node.pages[num_kept:] + [page for child in below for page in child.pages]
        for child in reversed(below):
            self._table.remove(child)
        node.evicted.clear()  # those continued the old end of the run
        if num_kept:
            self._table.drop_pages(node, len(node.pages) - num_kept)
            self.eviction.leaves.push(node)
        else:
            self.eviction.remove(node)
        return removed

    def _touch(self, node: Node, num_pages: int) -> None:
        """Mark the first pages of a run as used now; the pages below them keep their own time."""
        if num_pages < len(node.pages):
            self._split(node, num_pages)
        self._clock += 1
        node.last_used, node.used_at = self._clock, self._now()
        if not node.children:
            self.eviction.leaves.push(node)
