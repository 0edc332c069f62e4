"""Decide which cached runs make room for others, and take them out: least recently used first, from their ends on.

Knows leaves, when each was used last, and which of their pages no sequence owns. Not what is looked for in the tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import takewhile

from .node_table import NodeTable
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, Node

Leaving = Callable[[Node, int], None]
"""Is told of a run and of how many of its last pages are about to make room for others; they still hold their rows."""


class LeafQueue:
    """The leaves of a tree by when they were used last.

    A heap of entries in which outdated ones stay until they are met: O(log n) amortised. An entry is outdated when its
    node is gone, is no leaf any more, or was used since. `_entry` is the order, on which `Eviction.drop_unused` relies:
    no leaf comes before one that was used earlier.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        """A queue over the leaves of `nodes`, by node id, which the tree changes."""
        self._nodes = nodes
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    def push(self, leaf: Node) -> None:
        """Add a node that became a leaf, or a leaf whose time changed."""
        heapq.heappush(self._heap, _entry(leaf))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [entry for entry in set(self._heap) if self._leaf(entry) is not None]
            heapq.heapify(self._heap)

    def peek(self) -> Node | None:
        """The leaf used longest ago; None if there is none."""
        while self._heap:
            leaf = self._leaf(self._heap[0])
            if leaf is not None:
                return leaf
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Node:
        """Take out the leaf used longest ago; to keep it in the queue, push it again."""
        leaf = self.peek()
        assert leaf is not None, "the pool counts pages to evict, the tree has no leaf left"
        heapq.heappop(self._heap)
        return leaf

    def missing(self) -> list[Node]:
        """Leaves that are not in the queue: none, ever."""
        waiting = set(self._heap)
        leaves = (node for node in self._nodes.values() if not node.children)
        return [leaf for leaf in leaves if _entry(leaf) not in waiting]

    def _leaf(self, entry: tuple[int, int]) -> Node | None:
        node = self._nodes.get(entry[1])
        return None if node is None or node.children or _entry(node) != entry else node


def _entry(leaf: Node) -> tuple[int, int]:
    """The order in which leaves are evicted, least first; and the leaf's node id."""
    return leaf.last_used, leaf.node_id


class Eviction:
    """Frees pages of one tree that no sequence owns.

    Attributes:
        leaves: each leaf is in it; the tree pushes those that it makes or uses.
        leaving: called before `evict` frees pages; must not change the tree. None: nothing wants to know.
        num_evicted_pages: freed so far, for whatever reason.
    """

    def __init__(self, pool: PagePool, table: NodeTable) -> None:
        self._pool = pool
        self._table = table
        self.leaves = LeafQueue(table.nodes)
        self.leaving: Leaving | None = None
        self.num_evicted_pages = 0

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages that no sequence owns: of the leaf used longest ago, its last page first."""
        assert num_pages <= self._pool.num_cached, f"{num_pages} of {self._pool.num_cached} pages"
        owned: list[Node] = []  # leaves whose last page a live sequence owns: at most one each
        while num_pages > 0:
            leaf = self.leaves.pop()
            if self.leaving is not None and (num_leaving := self._num_unused(leaf, num_pages)):
                self.leaving(leaf, num_leaving)
            num_pages -= self.trim(leaf, num_pages)
            if leaf.pages:
                owned.append(leaf)
        for leaf in owned:
            self.leaves.push(leaf)

    def drop_unused(self, since: float) -> int:
        """Free the pages that no sequence owns of runs that were last used before `since`; returns how many."""
        num_dropped = 0
        owned: list[Node] = []
        while (leaf := self.leaves.peek()) is not None and leaf.used_at < since:
            self.leaves.pop()
            num_dropped += self.trim(leaf, len(leaf.pages))
            if leaf.pages:
                owned.append(leaf)
        for leaf in owned:
            self.leaves.push(leaf)
        return num_dropped

    def num_unused(self, since: float) -> int:
        """How many pages `drop_unused` would free; looks at all runs."""
        nodes = [child for root in self._table.roots.values() for child in root.children]
        for node in nodes:
            nodes += node.children
        num_unused, needed = 0, set[int]()  # runs that something goes on from
        for node in reversed(nodes):
            is_newer = node.used_at >= since or node.node_id in needed
            num_pages = 0 if is_newer else self._num_unused(node, len(node.pages))
            num_unused += num_pages
            if num_pages < len(node.pages) and node.parent is not None:
                needed.add(node.parent.node_id)
        return num_unused

    def trim(self, leaf: Node, num_pages: int) -> int:
        """Free up to `num_pages` last pages of a leaf that no sequence owns; returns how many."""
        num_trimmed = self._num_unused(leaf, num_pages)
        if num_trimmed == 0:
            return 0
        start = (len(leaf.pages) - num_trimmed) * PAGE_BYTES
        first_page = bytes(leaf.run[start : start + PAGE_BYTES])
        if num_trimmed < len(leaf.pages):
            self._table.drop_pages(leaf, num_trimmed)
            leaf.evicted.clear()  # they went on from where the run ended before
            leaf.remember_evicted(first_page)
        else:
            assert leaf.parent is not None
            leaf.parent.remember_evicted(first_page)
            self.remove(leaf)
        self.num_evicted_pages += num_trimmed
        return num_trimmed

    def remove(self, leaf: Node) -> None:
        """Take a leaf out of the tree with all its pages; the run before it may be a leaf then."""
        parent = self._table.remove(leaf)
        if parent.children:
            return
        if parent.parent is None:
            self._table.remove_root(parent)
        else:
            self.leaves.push(parent)

    def _num_unused(self, leaf: Node, num_pages: int) -> int:
        """How many of the last `num_pages` pages of a leaf no sequence owns."""
        limit = min(num_pages, len(leaf.pages))
        users = (self._pool.num_users(leaf.pages[-1 - index]) for index in range(limit))
        return sum(1 for _ in takewhile(lambda num_users: num_users == 0, users))
