"""Keep the runs of tokens whose KV is in pages, for live and finished sequences alike, and let the unused ones go.

Knows token ids, page ids, and when each run was used last. Not what a token means, nor which sequence shares
a page: the pool counts those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from .eviction_queue import EvictionQueue
from .found_run import FoundRun
from .node_table import NodeTable
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, Node, either, encode_key, num_common_tokens

Leaving = Callable[[Node, int], None]
"""Told of a run and of how many of its last pages are about to make room for others; they still hold their rows."""


class RadixTree:
    """Runs of tokens by prefix, one root a namespace.

    ::

        root -> [page page page] -> [page]            a node is a run of full pages
                                 -> [page page tail)  a tail is a leaf of its own, of one partial page

    A page has one node. A node splits at page boundaries only, so that runs which differ inside a page are
    siblings that begin with the same rows. The rows of a page in the tree never change; whoever wants to
    write after them copies them first. Sequences that own a page own all pages above it, so what no sequence
    owns can go, leaves first.

    Attributes:
        version: rises when what can be found changes.
        leaving: called before `evict` frees pages; must not change the tree. None: nobody wants to know.
    """

    def __init__(
        self, pool: PagePool, *, clock: Callable[[], float] = time.monotonic, kv_log: KVLog | None = None
    ) -> None:
        self._pool = pool
        self._now = clock
        self._roots: dict[bytes, Node] = {}
        self._table = NodeTable(pool, kv_log)
        self._leaves = EvictionQueue(self._table.nodes)
        self._clock = 0
        self.version = 0
        self.leaving: Leaving | None = None
        self.num_evicted_pages = 0

    @property
    def num_nodes(self) -> int:
        """Runs in the tree, roots not counted."""
        return len(self._table.nodes)

    @property
    def num_unused_rows(self) -> int:
        """Rows of tails without a token, because their pages are not full."""
        return self._table.num_unused_rows

    @property
    def namespaces(self) -> list[bytes]:
        """Those that have a run."""
        return list(self._roots)

    def num_pages(self, namespace: bytes) -> int:
        """Pages of a namespace; looks at all its runs."""
        nodes = [*self._roots[namespace].children] if namespace in self._roots else []
        for node in nodes:
            nodes += node.children
        return sum(len(node.pages) for node in nodes)

    def root(self, namespace: bytes | None) -> Node | None:
        """Where the namespace's runs begin, to be read; None if it has none."""
        return None if namespace is None else self._roots.get(namespace)

    def node_of(self, page_id: int) -> Node | None:
        """The run that a page is in, to be read; None if it is in none."""
        return self._table.node_of(page_id)

    def find(self, namespace: bytes | None, token_ids: Sequence[int]) -> FoundRun:
        """The longest run of the namespace that begins like `token_ids`; changes nothing."""
        return FoundRun.below(self.root(namespace), token_ids)

    def insert(
        self,
        namespace: bytes,
        above: Sequence[int],
        token_ids: Sequence[int],
        page_ids: Sequence[int],
        generated: bytes,
    ) -> list[int]:
        """Keep full pages below the pages `above`; the result is the pages that hold these tokens now.

        Where the tree has a page of the same tokens at the same place, that one is in the result and the
        given one stays the caller's alone.
        """
        assert len(token_ids) == PAGE_SIZE * len(page_ids) == len(generated)
        key = encode_key(token_ids)
        node, offset = self._end_of(namespace, above)
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
        self, namespace: bytes, above: Sequence[int], token_ids: Sequence[int], page_id: int, generated: bytes
    ) -> None:
        """Keep the first `len(token_ids)` rows of a partial page below the pages `above`.

        The page stays the caller's alone where the tree has the same rows at the same place.
        """
        assert 0 < len(token_ids) == len(generated) < PAGE_SIZE
        key = encode_key(token_ids)
        node, offset = self._end_of(namespace, above)
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
            self.version += 1
        else:
            longer.mark_generated(0, generated)
        self._touch(longer, 1)

    def touch(self, page_ids: Sequence[int]) -> None:
        """Say that these pages, from a root down, are used now; the rest of their last run is not."""
        if page_ids:
            self._touch(*self._table.end_of(page_ids))

    def evict(self, num_pages: int) -> None:
        """Free `num_pages` pages that no sequence owns: of the leaf used longest ago, its last page first."""
        assert num_pages <= self._pool.num_cached, f"{num_pages} of {self._pool.num_cached} pages"
        owned: list[Node] = []  # leaves whose last page a live sequence owns: at most one each
        while num_pages > 0:
            leaf = self._leaves.pop()
            if self.leaving is not None and (num_leaving := self._num_unused(leaf, num_pages)):
                self.leaving(leaf, num_leaving)
            num_pages -= self._trim(leaf, num_pages)
            if leaf.pages:
                owned.append(leaf)
        for leaf in owned:
            self._leaves.push(leaf)

    def drop_unused(self, since: float) -> int:
        """Free the pages that no sequence owns of runs that were not used since then; how many they were."""
        num_dropped = 0
        owned: list[Node] = []
        while (leaf := self._leaves.peek()) is not None and leaf.used_at < since:
            self._leaves.pop()
            num_dropped += self._trim(leaf, len(leaf.pages))
            if leaf.pages:
                owned.append(leaf)
        for leaf in owned:
            self._leaves.push(leaf)
        return num_dropped

    def remove(self, page_ids: Sequence[int]) -> list[int]:
        """Take pages that no sequence owns out, with everything that goes on from them; all that left.

        Pages that are not in the tree, perhaps because one before them took them along, are passed over.
        """
        removed: list[int] = []
        for page in page_ids:
            node = self.node_of(page)
            if node is not None:
                removed += self._cut(node, node.pages.index(page))
        return removed

    def clear(self, namespace: bytes) -> int:
        """Free the pages of a namespace that no sequence owns, and do not remember them; how many they were."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        nodes, num_freed = [root], 0
        for node in nodes:
            nodes += node.children
        for node in reversed(nodes[1:]):
            if not node.children:
                num_freed += self._trim(node, len(node.pages))
        for node in nodes:
            node.evicted.clear()
        return num_freed

    def paths(self) -> Iterator[tuple[bytes, list[int], list[int]]]:
        """Namespace, tokens and pages from the root to each leaf; slow."""
        for namespace, root in self._roots.items():
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
        assert all(root.children for root in self._roots.values()), "a root without runs"
        self._table.check(self._roots.values())
        assert not self._leaves.missing(), "a leaf that could never be evicted"

    def page_ids(self) -> list[int]:
        """Every page that the tree owns."""
        return [page for node in self._table.nodes.values() for page in node.pages]

    def _end_of(self, namespace: bytes, above: Sequence[int]) -> tuple[Node, int]:
        """The node that the pages `above` end in, and how many of its pages they take."""
        if above:
            return self._table.end_of(above)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(-1, parent=None, start=0, namespace=namespace)
        return root, 0

    def _grow(self, node: Node, key: bytes, page_ids: list[int], generated: bytes) -> Node:
        """Put a run at the end of `node`: into it, if nothing else goes on there, or into a child."""
        generated = self._supersede_tail(node, key, generated)
        self.version += 1
        if node.children or node.evicted or node.parent is None:
            return self._table.add_child(node, key, page_ids, generated)
        self._table.extend(node, key, page_ids, generated)
        return node

    def _supersede_tail(self, node: Node, key: bytes, generated: bytes) -> bytes:
        """Drop a tail that `key` begins with; `generated` with its marks.

        A sequence that was about to copy its rows owns the page alone from here on, and writes to it.
        """
        tail = node.tail_before(key[:PAGE_BYTES])
        if tail is None:
            return generated
        generated = either(generated, bytes(tail.generated) + bytes(len(generated) - len(tail.generated)))
        self._table.remove(tail)
        return generated

    def _split(self, node: Node, num_pages: int) -> None:
        lower = self._table.split(node, num_pages)
        if not lower.children:
            self._leaves.push(lower)

    def _trim(self, node: Node, num_pages: int) -> int:
        """Free up to `num_pages` last pages of a leaf that no sequence owns; how many it were."""
        num_trimmed = self._num_unused(node, num_pages)
        if num_trimmed == 0:
            return 0
        start = (len(node.pages) - num_trimmed) * PAGE_BYTES
        first_page = bytes(node.run[start : start + PAGE_BYTES])
        if num_trimmed < len(node.pages):
            self._table.drop_pages(node, num_trimmed)
            node.evicted.clear()  # they went on from where the run ended before
            node.remember_evicted(first_page)
        else:
            assert node.parent is not None
            node.parent.remember_evicted(first_page)
            self._settle(self._table.remove(node))
        self.version += 1
        self.num_evicted_pages += num_trimmed
        return num_trimmed

    def _cut(self, node: Node, num_kept: int) -> list[int]:
        """Take a run's pages from `num_kept` on and all that is below; which they were."""
        below = [*node.children]
        for child in below:
            below += child.children
        removed = node.pages[num_kept:] + [page for child in below for page in child.pages]
        for child in reversed(below):
            self._table.remove(child)
        node.evicted.clear()  # it was remembered of the run's end, which is another now
        if num_kept:
            self._table.drop_pages(node, len(node.pages) - num_kept)
            self._leaves.push(node)
        else:
            self._settle(self._table.remove(node))
        self.version += 1
        return removed

    def _num_unused(self, leaf: Node, num_pages: int) -> int:
        """How many of the last `num_pages` pages of a leaf no sequence owns."""
        limit = min(num_pages, len(leaf.pages))
        users = (self._pool.num_users(leaf.pages[-1 - index]) for index in range(limit))
        return sum(1 for _ in takewhile(lambda num_users: num_users == 0, users))

    def _settle(self, node: Node) -> None:
        """After a child went: a run without children is a leaf to evict, a root without any goes too."""
        if node.children:
            return
        if node.parent is None:
            del self._roots[node.namespace]
        else:
            self._leaves.push(node)

    def _touch(self, node: Node, num_pages: int) -> None:
        """The first pages of a run are used now; what is below them keeps its own time."""
        if num_pages < len(node.pages):
            self._split(node, num_pages)
        self._clock += 1
        node.last_used, node.used_at = self._clock, self._now()
        if not node.children:
            self._leaves.push(node)
