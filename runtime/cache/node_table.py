"""Hold the nodes of one tree by namespace, id and page, and tell the pool of the pages that they gain and lose.

Knows how nodes grow, split and go. Not what is looked for in them, and not when they go: `eviction.py` decides that.
"""

from __future__ import annotations

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from ..states.state_pool import StatePool
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, TOKEN_BYTES, Key, Node


class NodeTable:
    """The nodes of a tree. A node's pages and its place change here only.

    Attributes:
        roots: by namespace, to be read; each has a child, but for a new one.
        nodes: those below the roots, by id, to be read.
        num_unused_rows: of tails, whose pages are not full.
        version: rises when what can be found changes.
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
        """The node that a page is in; None if it is in none."""
        return self.nodes.get(int(self._node_of_page[page_id])) if page_id < len(self._node_of_page) else None

    def root(self, namespace: bytes) -> Node:
        """Where the namespace's runs begin; a new root, for a child to be added, if it has none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(-1, parent=None, start=0, namespace=namespace)
        return root

    def end_of(self, page_id: int, num_pages: int) -> tuple[Node, int]:
        """The node that a page is in, and how many of its pages the first `num_pages` from the root take, of which it
        is the last."""
        node = self.nodes[int(self._node_of_page[page_id])]
        offset = num_pages - node.start
        assert node.pages[offset - 1] == page_id, f"page {page_id} is elsewhere in the tree"
        return node, offset

    def extend(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> None:
        """Put full pages at the end of a node's run."""
        self._add_pages(page_ids)
        node.run += key
        node.pages += page_ids
        node.generated += generated
        self._node_of_page[page_ids] = node.node_id

    def add_child(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> Node:
        """Put pages into a new node below a root or a node."""
        self._add_pages(page_ids)
        self.num_unused_rows += len(page_ids) * PAGE_SIZE - len(generated)
        start = node.start + len(node.pages)
        child = Node(self._new_id(), node, start, bytearray(key), page_ids, bytearray(generated))
        self.nodes[child.node_id] = child
        self._node_of_page[page_ids] = child.node_id
        node.add(child)
        return child

    def split(self, node: Node, num_pages: int) -> Node:
        """Cut a node after `num_pages` pages; the lower part, which is a node of its own now."""
        lower = node.split(num_pages, self._new_id())
        self.nodes[lower.node_id] = lower
        self._node_of_page[lower.pages] = lower.node_id
        return lower

    def remove(self, leaf: Node, *, is_superseded: bool = False) -> Node:
        """Take out a leaf with all its pages; returns what it was below, perhaps a root without children now.

        Args:
            is_superseded: what takes its place begins with its tokens, so that states within these stay.
        """
        parent, page = leaf.parent, leaf.key
        assert parent is not None and not leaf.children
        parent.remove(leaf)
        self._drop_pages(leaf, len(leaf.pages))
        del self.nodes[leaf.node_id]
        if not is_superseded:
            self.forget_states(parent, len(parent.pages), page)
        return parent

    def remove_root(self, root: Node) -> None:
        """Take out a root without children: the namespace has no run any more."""
        assert not root.children
        del self.roots[root.namespace]
        if self._states is not None:
            self._states.forget([root.namespace])

    def drop_pages(self, node: Node, num_pages: int) -> None:
        """Give up the last pages of a leaf, but not all."""
        left = len(node.pages) - num_pages
        page = bytes(node.run[left * PAGE_BYTES : (left + 1) * PAGE_BYTES])
        self._drop_pages(node, num_pages)
        self.forget_states(node, left, page)

    def forget_states(self, node: Node, num_pages: int, page: bytes) -> None:
        """Drop the states after the first tokens of a page that stood behind the first `num_pages` of a node, and is
        gone, but for those within what else goes on there."""
        if self._states is None:
            return

        def goes_on(rows: bytes) -> bool:
            if num_pages == len(node.pages):
                return node.beginning_with(rows) is not None
            return node.run.startswith(rows, num_pages * PAGE_BYTES)

        self._states.forget_rows(node.pages[num_pages - 1] if num_pages else node.namespace, page, goes_on)

    def _drop_pages(self, node: Node, num_pages: int) -> None:
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

    def _add_pages(self, page_ids: list[int]) -> None:
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
