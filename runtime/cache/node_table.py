"""Hold the nodes of one tree by namespace, id and page, and report to the pool the pages that they gain and lose.

Knows how nodes grow, split and are removed. Not how they are matched, and not when they go: `eviction.py` decides that.
"""

from __future__ import annotations

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from ..states.state_pool import StatePool
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, TOKEN_BYTES, Key, Node


class NodeTable:
    """The nodes of a tree. Only this table changes a node's pages and its position in the tree.

    Attributes:
        roots: by namespace; read only. Each has a child, except a new one.
        nodes: all nodes below the roots, by id; read only.
        num_unused_rows: rows without a token, in the partial pages of tails.
        version: increases when matches can change.
        num_dropped: pages that left the tree so far.
    """

    def __init__(self, pool: PagePool, kv_log: KVLog | None, states: StatePool | None = None) -> None:
        self._pool, self._states = pool, states
        self._kv_log = kv_log
        self.roots: dict[bytes, Node] = {}
        self.nodes: dict[int, Node] = {}
        self.num_unused_rows = 0
        self.version = self.num_dropped = 0
        self._node_of_page = np.full(0, -1, np.int64)  # grows with the pages that were ever in the tree
        self._next_id = 0

    def node_of(self, page_id: int) -> Node | None:
        """Return the node that contains a page; None if none does."""
        return self.nodes.get(int(self._node_of_page[page_id])) if page_id < len(self._node_of_page) else None

    def root(self, namespace: bytes) -> Node:
        """Return the root of a namespace; a new one, for a child to be added, if it has none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(-1, parent=None, start=0, namespace=namespace)
        return root

    def end_of(self, page_id: int, num_pages: int) -> tuple[Node, int]:
        """Return the node that contains a page, and the number of its pages up to and including this one.

        The page is the last of the first `num_pages` pages from the root.
        """
        node = self.nodes[int(self._node_of_page[page_id])]
        offset = num_pages - node.start
        assert node.pages[offset - 1] == page_id, f"page {page_id} is elsewhere in the tree"
        return node, offset

    def extend(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> None:
        """Append full pages to a node's run."""
        self._register_pages(page_ids)
        node.run += key
        node.pages += page_ids
        node.generated += generated
        self._node_of_page[page_ids] = node.node_id

    def add_child(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> Node:
        """Put pages into a new node below a root or a node."""
        self._register_pages(page_ids)
        self.num_unused_rows += len(page_ids) * PAGE_SIZE - len(generated)
        start = node.start + len(node.pages)
        child = Node(self._new_id(), node, start, bytearray(key), page_ids, bytearray(generated))
        self.nodes[child.node_id] = child
        self._node_of_page[page_ids] = child.node_id
        node.add(child)
        return child

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after `num_pages` pages; return the lower part, a new node."""
        lower = node.split(num_pages, self._new_id())
        self.nodes[lower.node_id] = lower
        self._node_of_page[lower.pages] = lower.node_id
        return lower

    def remove(self, leaf: Node, *, is_superseded: bool = False) -> Node:
        """Remove a leaf with all its pages; return its parent, perhaps a root that has no children now.

        Args:
            is_superseded: a node that begins with the leaf's tokens replaces it, so that states within these stay.
        """
        parent, page = leaf.parent, leaf.key
        assert parent is not None and not leaf.children
        parent.remove(leaf)
        self._forget_pages(leaf, len(leaf.pages))
        del self.nodes[leaf.node_id]
        if not is_superseded:
            self.forget_states(parent, len(parent.pages), page)
        return parent

    def remove_root(self, root: Node) -> None:
        """Remove a root without children: its namespace has no run any more."""
        assert not root.children
        del self.roots[root.namespace]
        if self._states is not None:
            self._states.forget([root.namespace])

    def drop_pages(self, node: Node, num_pages: int) -> None:
        """Remove the last pages of a leaf, but not all of them."""
        left = len(node.pages) - num_pages
        page = bytes(node.run[left * PAGE_BYTES : (left + 1) * PAGE_BYTES])
        self._forget_pages(node, num_pages)
        self.forget_states(node, left, page)

    def forget_states(self, node: Node, num_pages: int, page: bytes) -> None:
        """Drop the states at tokens within a page that was removed, unless another continuation has the same tokens.

        Args:
            node, num_pages: the removed page came after the first `num_pages` pages of this node.
            page: the tokens of the removed page, as a key.
        """
        if self._states is None:
            return

        def goes_on(rows: bytes) -> bool:
            if num_pages == len(node.pages):
                return node.beginning_with(rows) is not None
            return node.run.startswith(rows, num_pages * PAGE_BYTES)

        self._states.forget_rows(node.pages[num_pages - 1] if num_pages else node.namespace, page, goes_on)

    def _forget_pages(self, node: Node, num_pages: int) -> None:
        """Cut the last `num_pages` pages off a node: they are no longer the tree's. Tells pool, states and log."""
        self.version += 1
        self.num_dropped += num_pages
        left = len(node.pages) - num_pages
        page_ids = node.pages[left:]
        self.num_unused_rows -= num_pages * PAGE_SIZE - (len(node.generated) - left * PAGE_SIZE)
        self._node_of_page[page_ids] = -1
        num_free = self._pool.num_free
        self._pool.remove_from_tree(page_ids)
        if self._states is not None:
            self._states.forget(page_ids)
        if self._kv_log is not None:
            self._kv_log.write("evict", pages=page_ids, free=[num_free, self._pool.num_free])
        del node.pages[left:], node.run[left * PAGE_BYTES :], node.generated[left * PAGE_SIZE :], node.disk_keys[left:]

    def check(self) -> None:
        """Raise AssertionError unless every node is whole, reachable, in order and known by its pages."""
        assert all(root.children for root in self.roots.values()), "a root without runs"
        reached: dict[int, Node] = {}
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert node.keys == sorted(set(node.keys)) == [child.key for child in node.children]
            for child in node.children:
                assert child.parent is node and child.start == node.start + len(node.pages)
                assert child.pages and len(child.generated) * TOKEN_BYTES == len(child.run)
                assert -(-len(child.run) // PAGE_BYTES) == len(child.pages)
                assert len(child.disk_keys) <= len(child.run) // PAGE_BYTES
                assert not child.is_tail or (len(child.pages) == 1 and not child.children), "a tail is a leaf"
                assert (self._node_of_page[child.pages] == child.node_id).all()
                num_users = [self._pool.num_users(page) for page in node.pages[-1:] + child.pages]
                assert num_users == sorted(num_users, reverse=True), "a page has users that its prefix lacks"
                reached[child.node_id] = child
            stack += node.children
        assert reached == self.nodes, "an orphan"
        unused = sum(len(node.pages) * PAGE_SIZE - len(node.generated) for node in reached.values())
        assert self.num_unused_rows == unused, f"{unused} rows are unused, {self.num_unused_rows} counted"
        assert int((self._node_of_page >= 0).sum()) == sum(len(node.pages) for node in reached.values())

    def _register_pages(self, page_ids: list[int]) -> None:
        """Make the tree an owner of pages that a node gained. Tells pool and log."""
        self.version += 1
        self._pool.add_to_tree(page_ids)
        size = len(self._node_of_page)
        if (num_missing := max(page_ids) + 1 - size) > 0:
            self._node_of_page = np.concatenate([self._node_of_page, np.full(max(num_missing, size), -1, np.int64)])
        if self._kv_log is not None:
            self._kv_log.write("keep", pages=page_ids)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
