"""Choose cached runs to evict and free their pages: least recently used first, from their ends.

Knows leaves, when each was last used, and which of their pages no sequence owns. Not how prefixes are matched.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from itertools import takewhile

from .node_table import NodeTable
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, Node

BeforeEvict = Callable[[Node, int], None]
"""Called with a run and the number of its last pages that are about to be evicted. Their rows are still valid."""


class LeafQueue:
    """The leaves of a tree, ordered by last use.

    A heap whose outdated entries stay until they are reached: O(log n) amortised. An entry is outdated when its node is
    gone, is no longer a leaf, or was used since. `_entry` gives the order, on which `Eviction.drop_unused` relies: no
    leaf comes before one that was used earlier.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        """Create a queue over the leaves of `nodes`, by node id; the tree changes that mapping."""
        self._nodes = nodes
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap)

    def push(self, leaf: Node) -> None:
        """Add a node that became a leaf, or a leaf whose last use changed."""
        heapq.heappush(self._heap, _entry(leaf))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [entry for entry in set(self._heap) if self._leaf(entry) is not None]
            heapq.heapify(self._heap)

    def peek(self) -> Node | None:
        """Return the least recently used leaf; None if there is none."""
        while self._heap:
            leaf = self._leaf(self._heap[0])
            if leaf is not None:
                return leaf
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Node:
        """Remove and return the least recently used leaf; to keep it in the queue, push it again."""
        leaf = self.peek()
        assert leaf is not None, "the pool counts pages to evict, the tree has no leaf left"
        heapq.heappop(self._heap)
        return leaf

    def missing(self) -> list[Node]:
        """Return the leaves that are not in the queue. A correct queue has none."""
        waiting = set(self._heap)
        leaves = (node for node in self._nodes.values() if not node.children)
        return [leaf for leaf in leaves if _entry(leaf) not in waiting]

    def _leaf(self, entry: tuple[int, int]) -> Node | None:
        node = self._nodes.get(entry[1])
        return None if node is None or node.children or _entry(node) != entry else node


def _entry(leaf: Node) -> tuple[int, int]:
    """Return the sort key of a leaf, its last use and its node id. The least is evicted first."""
    return leaf.last_used, leaf.node_id


class Eviction:
    """Frees pages of one tree that no sequence owns.

    Attributes:
        leaves: every leaf of the tree; the tree pushes those that it makes or uses.
        before_evict: called before `evict` frees pages; must not change the tree. None if nothing listens.
        num_evicted_pages: freed so far, for any reason.
    """

    def __init__(self, pool: PagePool, table: NodeTable) -> None:
        self._pool = pool
        self._table = table
        self.leaves = LeafQueue(table.nodes)
        self.before_evict: BeforeEvict | None = None
        self.num_evicted_pages = 0

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages that no sequence owns, from the least recently used leaves, last page first."""
        assert num_pages <= self._pool.num_cached, f"{num_pages} of {self._pool.num_cached} pages"
        owned: list[Node] = []  # leaves whose last page a live sequence owns: at most one each
        while num_pages > 0:
            leaf = self.leaves.pop()
            if self.before_evict is not None and (num_leaving := self._count_unused(leaf, num_pages)):
                self.before_evict(leaf, num_leaving)
            num_pages -= self.trim(leaf, num_pages)
            if leaf.pages:
                owned.append(leaf)
        for leaf in owned:
            self.leaves.push(leaf)

    def drop_unused(self, since: float) -> int:
        """Free all unowned pages of runs that were last used before `since`; return their number."""
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
        """Return how many pages `drop_unused` would free. Visits all runs."""
        nodes = [child for root in self._table.roots.values() for child in root.children]
        for node in nodes:
            nodes += node.children
        num_unused, needed = 0, set[int]()  # runs with a child that stays
        for node in reversed(nodes):
            is_newer = node.used_at >= since or node.node_id in needed
            num_pages = 0 if is_newer else self._count_unused(node, len(node.pages))
            num_unused += num_pages
            if num_pages < len(node.pages) and node.parent is not None:
                needed.add(node.parent.node_id)
        return num_unused

    def trim(self, leaf: Node, num_pages: int) -> int:
        """Free up to `num_pages` last pages of a leaf that no sequence owns; return their number."""
        num_trimmed = self._count_unused(leaf, num_pages)
        if num_trimmed == 0:
            return 0
        start = (len(leaf.pages) - num_trimmed) * PAGE_BYTES
        first_page = bytes(leaf.run[start : start + PAGE_BYTES])
        if num_trimmed < len(leaf.pages):
            self._table.drop_pages(leaf, num_trimmed)
            leaf.evicted.clear()  # those continued the old end of the run
            leaf.remember_evicted(first_page)
        else:
            assert leaf.parent is not None
            leaf.parent.remember_evicted(first_page)
            self.remove(leaf)
        self.num_evicted_pages += num_trimmed
        return num_trimmed

    def remove(self, leaf: Node) -> None:
        """Remove a leaf from the tree with all its pages; the run before it can become a leaf."""
        parent = self._table.remove(leaf)
        if parent.children:
            return
        if parent.parent is None:
            self._table.remove_root(parent)
        else:
            self.leaves.push(parent)

    def _count_unused(self, leaf: Node, num_pages: int) -> int:
        """Return how many pages at the end of a leaf no sequence owns, `num_pages` at most."""
        limit = min(num_pages, len(leaf.pages))
        users = (self._pool.num_users(leaf.pages[-1 - index]) for index in range(limit))
        return sum(1 for _ in takewhile(lambda num_users: num_users == 0, users))
