"""Keep the runs of tokens whose KV is in pages, for live and finished sequences alike.

Knows token ids, page ids, and when each run was used last. Not what a token means, nor which sequence shares a page:
the pool counts those; and not which run goes first: `eviction.py` decides that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..kv_log.log import KVLog
from ..states.state_pool import StatePool
from .eviction import Eviction
from .found_run import FoundRun
from .node_table import NodeTable
from .page_pool import PagePool
from .radix_node import PAGE_BYTES, Key, Node, either, encode_key, num_common_tokens


class RadixTree:
    """Runs of tokens by prefix, one root a namespace.

    ::

        root -> [page page page] -> [page]            a node is a run of full pages
                                 -> [page page tail)  a tail is a leaf of its own, of one partial page

    A page has one node. A node splits at page boundaries only, so that runs which differ inside a page are
    siblings that begin with the same rows. The rows of a page in the tree never change; to write after them, copy
    them first. Sequences that own a page own all pages above it, so what no sequence owns can go, leaves first.

    Attributes:
        eviction: frees pages that no sequence owns.
        states: of a recurrent model, the snapshots that stand in the tree; None: it needs none.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        clock: Callable[[], float] = time.monotonic,
        kv_log: KVLog | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._now = clock
        self._kv_log = kv_log
        self.states = states
        self._table = NodeTable(pool, kv_log, states)
        self.eviction = Eviction(pool, self._table)
        self._clock = 0

    def emptied(self, pool: PagePool, states: StatePool | None = None) -> RadixTree:
        """A tree over other pools, without runs: what was found here is outdated there, and counts go on."""
        tree = RadixTree(pool, clock=self._now, kv_log=self._kv_log, states=states)
        tree._table.version = self.version + 1
        tree._table.num_dropped = self.num_dropped + 1
        tree.eviction.leaving = self.eviction.leaving
        tree.eviction.num_evicted_pages = self.eviction.num_evicted_pages
        return tree

    @property
    def version(self) -> int:
        """Rises when what can be found changes: pages, or of a recurrent model states."""
        return self._table.version + (0 if self.states is None else self.states.version)

    @property
    def num_dropped(self) -> int:
        """Pages that left the tree so far: while it stays the same, each page that was in it still is."""
        return self._table.num_dropped

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
        return list(self._table.roots)

    def num_pages(self, namespace: bytes) -> int:
        """Pages of a namespace; looks at all its runs."""
        root = self.root(namespace)
        nodes = [] if root is None else [*root.children]
        for node in nodes:
            nodes += node.children
        return sum(len(node.pages) for node in nodes)

    def root(self, namespace: bytes | None) -> Node | None:
        """Where the namespace's runs begin, to be read; None if it has none."""
        return None if namespace is None else self._table.roots.get(namespace)

    def node_of(self, page_id: int) -> Node | None:
        """The run that a page is in, to be read; None if it is in none."""
        return self._table.node_of(page_id)

    def find(self, namespace: bytes | None, token_ids: Sequence[int]) -> FoundRun:
        """The longest run of the namespace that begins like `token_ids`; changes nothing."""
        return self.find_key(namespace, encode_key(token_ids))

    def find_key(self, namespace: bytes | None, key: bytes) -> FoundRun:
        """`find` the tokens of a key."""
        return FoundRun.below(self.root(namespace), key)

    def find_resumable(self, namespace: bytes | None, key: bytes) -> FoundRun:
        """What of `find_key` a sequence can go on from: of a recurrent model, what ends at a state."""
        found = self.find_key(namespace, key)
        if self.states is None or namespace is None:
            return found
        return found.up_to(self.states.find(namespace, found.pages, key, found.num_tokens))

    def ahead(self, namespace: bytes, above: Sequence[int], token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens that the namespace has behind the pages `above` and all of `token_ids` after these, in
        the runs used last; changes nothing.
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
        """Keep full pages below `num_above` others; the result is the pages that hold these tokens now.

        Where the tree has a page of the same tokens at the same place, that one is in the result and the
        given one stays the caller's alone.

        Args:
            last_above: the last of the pages above; None: there is none.
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

        The page stays the caller's alone where the tree has the same rows at the same place.
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
        """Say that these pages, from a root down, are used now; the rest of their last run is not."""
        if page_ids:
            self._touch(*self._table.end_of(page_ids[-1], len(page_ids)))

    def remove(self, page_ids: Sequence[int]) -> list[int]:
        """Take out pages that no sequence owns, with everything that goes on from them; returns all that left.

        Pages that are not in the tree, perhaps because one before them took them along, are passed over.
        """
        removed: list[int] = []
        for page in page_ids:
            node = self.node_of(page)
            if node is not None:
                removed += self._cut(node, node.pages.index(page))
        return removed

    def clear(self, namespace: bytes) -> int:
        """Free the pages of a namespace that no sequence owns, and do not remember them; returns how many."""
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
        """Drop the states within a partial page of these tokens that stood behind the pages `above`, and of which no
        other has the same."""
        if self.states is not None and self.root(namespace) is not None:
            end = self._end_of(namespace, above[-1] if above else None, len(above))
            self._table.forget_states(*end, encode_key(token_ids))

    def paths(self) -> Iterator[tuple[bytes, list[int], list[int]]]:
        """Namespace, tokens and pages from the root to each leaf; slow."""
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
        """Every page that the tree owns."""
        return [page for node in self._table.nodes.values() for page in node.pages]

    def _end_of(self, namespace: bytes, last_above: int | None, num_above: int) -> tuple[Node, int]:
        """The node that `num_above` pages end in, and how many of its pages they take; without any, the root."""
        return (self._table.root(namespace), 0) if last_above is None else self._table.end_of(last_above, num_above)

    def _grow(self, node: Node, key: bytes, page_ids: list[int], generated: Key) -> Node:
        """Put a run at the end of `node`: into it, if nothing else goes on there, or into a child."""
        generated = self._supersede_tail(node, key, generated)
        if node.children or node.evicted or node.parent is None:
            return self._table.add_child(node, key, page_ids, generated)
        self._table.extend(node, key, page_ids, generated)
        return node

    def _supersede_tail(self, node: Node, key: bytes, generated: Key) -> Key:
        """Drop a tail that `key` begins with; `generated` with its marks.

        A sequence that was about to copy its rows owns the page alone from here on, and writes to it.
        """
        tail = node.tail_before(key[:PAGE_BYTES])
        if tail is None:
            return generated
        generated = either(generated, bytes(tail.generated) + bytes(len(generated) - len(tail.generated)))
        self._table.remove(tail, is_superseded=True)
        return generated

    def _split(self, node: Node, num_pages: int) -> None:
        lower = self._table.split(node, num_pages)
        if not lower.children:
            self.eviction.leaves.push(lower)

    def _cut(self, node: Node, num_kept: int) -> list[int]:
        """Take out a run's pages from `num_kept` on and all that is below; returns all that left."""
        below = [*node.children]
        for child in below:
            below += child.children
        removed = node.pages[num_kept:] + [page for child in below for page in child.pages]
        for child in reversed(below):
            self._table.remove(child)
        node.evicted.clear()  # it was remembered of the run's end, which is another now
        if num_kept:
            self._table.drop_pages(node, len(node.pages) - num_kept)
            self.eviction.leaves.push(node)
        else:
            self.eviction.remove(node)
        return removed

    def _touch(self, node: Node, num_pages: int) -> None:
        """The first pages of a run are used now; what is below them keeps its own time."""
        if num_pages < len(node.pages):
            self._split(node, num_pages)
        self._clock += 1
        node.last_used, node.used_at = self._clock, self._now()
        if not node.children:
            self.eviction.leaves.push(node)
