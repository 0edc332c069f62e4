"""Order the leaves of the tree by when they were used last.

Knows nodes and their times. Not pages, and not whether a leaf may go: the tree decides that.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from .radix_node import Node


class EvictionQueue:
    """A heap of `(last_used, node_id)` in which outdated entries stay until they are met: O(log n) amortised.

    An entry is outdated when its node is gone, is no leaf any more, or was used since.
    """

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        """A queue over the leaves of `nodes`, by node id, which the tree changes."""
        self._nodes = nodes
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    def push(self, leaf: Node) -> None:
        """Note a node that became a leaf, or a leaf whose time changed."""
        heapq.heappush(self._heap, (leaf.last_used, leaf.node_id))
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
        """Take out the leaf used longest ago; who keeps it must push it again."""
        leaf = self.peek()
        assert leaf is not None, "the pool counts pages to evict, the tree has no leaf left"
        heapq.heappop(self._heap)
        return leaf

    def missing(self) -> list[Node]:
        """Leaves that are not waiting: none, ever."""
        waiting = set(self._heap)
        leaves = (node for node in self._nodes.values() if not node.children)
        return [leaf for leaf in leaves if (leaf.last_used, leaf.node_id) not in waiting]

    def _leaf(self, entry: tuple[int, int]) -> Node | None:
        last_used, node_id = entry
        node = self._nodes.get(node_id)
        return None if node is None or node.children or node.last_used != last_used else node
