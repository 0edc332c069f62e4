"""Have runs of the tree that prompts use rewritten on disk in the order of importance, when nothing else is to be done.

A node of the tree is rewritten after its 1st use, the 2nd, the 4th, the 8th after that and so on: its order becomes
better with each and changes less. A chat's node grows with every turn and keeps its count, so that it is not written
whole each time. Never across nodes, or prompts that share one would have to share both. Knows the tree's nodes and the
disk's index; reads and writes nothing itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.radix_node import Node, tokens_of
from ..model.batch import Float32Array
from ..prefix.disk_index import DiskIndex
from ..prefix.disk_writer import DiskWriter
from ..store.page_key import PageKey
from ..store.page_store import PageStore
from ..store.rewriting import rewrite
from ..store.store_state import PutResult
from .importance import Importance
from .row_selection import scores_to_store

MIN_PAGES = 4  # of a node; fewer are read whole as quickly
RUN_BYTES = 64 << 20  # of a run's pages: a few copies are in memory while it is ordered. Longer nodes have more runs
MAX_JOBS = 64  # nodes that wait
MAX_COUNTED = 4096  # nodes whose uses are remembered
PROBE_HEAD = 2  # the KV head by whose keys a query looks, or the last: of SmolLM2's three the best (bench/LOG.md)


@dataclass
class _Uses:
    """Of a node."""

    count: int = 0
    next_at: int = 1  # it is rewritten at that many
    waits: bool = False


@dataclass(frozen=True)
class _Run:
    """What the writer is to put in order."""

    heads: tuple[PageKey, ...]
    scores: Float32Array
    is_start: bool  # of a prompt


@dataclass
class RunRewriter:
    """`used` by a prompt that is done, and `advance` between two steps.

    Attributes:
        num_dropped: nodes that were not rewritten, because too many waited; their next use asks again.
        num_rewritten: runs that the writer has stored.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    importance: Importance
    page_bytes: int
    num_dropped: int = 0
    num_rewritten: int = 0
    _uses: OrderedDict[bytes, _Uses] = field(default_factory=OrderedDict)  # by the key of the first page, latest last
    _waiting: deque[tuple[bytes, Node]] = field(default_factory=deque)
    _runs: deque[_Run] = field(default_factory=deque)  # of one node

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would get on: something waits, and the writer has nothing to do."""
        return bool(self._waiting or self._runs) and self.writer.is_idle

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """A prompt is done: fold what it looked at, and count the nodes that it found, their first page at least, of
        which the disk has that."""
        pages = self.cache.tree.find(namespace, token_ids).pages
        self.importance.fold(pages, num_reused=num_reused)
        keys = self.index.keys(namespace, token_ids[:num_reused])
        for node in self._nodes_of(pages[: min(num_reused // PAGE_SIZE, len(keys))]):
            if len(node.pages) >= MIN_PAGES:
                self._count(keys[node.start], node)

    def advance(self) -> None:
        """Hand the writer the next run, if it has nothing to do."""
        if not self.is_ready:
            return
        if not self._runs:
            key, node = self._waiting.popleft()
            uses = self._uses.get(key, _Uses())
            uses.waits = False
            self._runs.extend(self._runs_of(node))
            if self._runs:
                uses.next_at = 2 * uses.count
        if self._runs:
            run = self._runs.popleft()
            self.writer.submit(lambda store: self._rewrite(store, run))

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        self._runs = deque(run for run in self._runs if run.heads[0].namespace != namespace and namespace is not None)
        waiting, self._waiting = self._waiting, deque()
        for key, node in waiting:
            if namespace is None or (node.pages and node.path().namespace == namespace):
                self._uses.pop(key, None)
            else:
                self._waiting.append((key, node))

    def _rewrite(self, store: PageStore, run: _Run) -> PutResult:
        """In the writer's thread: store a run that is on disk in the order of its scores, too."""
        probe_head = min(PROBE_HEAD, run.scores.shape[1] - 1)
        scores = scores_to_store(run.scores, is_start=run.is_start)
        result = rewrite(store, run.heads, scores, probe_head=probe_head)
        self.num_rewritten += bool(result.stored)
        return result

    def _nodes_of(self, pages: Sequence[int]) -> Iterator[Node]:
        """The nodes that these pages, from a root down, are in."""
        first = 0
        while first < len(pages):
            node = self.cache.tree.node_of(pages[first])
            assert node is not None, f"page {pages[first]} was found and is in no node"
            yield node
            first = node.start + len(node.pages)

    def _count(self, key: bytes, node: Node) -> None:
        uses = self._uses.setdefault(key, _Uses())
        self._uses.move_to_end(key)
        if len(self._uses) > MAX_COUNTED:
            self._uses.popitem(last=False)
        uses.count += 1
        if uses.count < uses.next_at or uses.waits:
            return
        if len(self._waiting) == MAX_JOBS:
            self.num_dropped += 1
            return
        uses.waits = True
        self._waiting.append((key, node))

    def _runs_of(self, node: Node) -> Iterator[_Run]:
        """A node as it is now; nothing if the disk has not all of it, or memory has it no more."""
        if not node.pages or self.cache.tree.node_of(node.pages[0]) is not node:
            return
        path, stop = node.path(), node.start + len(node.pages)
        heads = self.index.run(path.namespace, tokens_of(path.key), node.start, stop)
        if heads is None:
            return
        step = max(MIN_PAGES, RUN_BYTES // self.page_bytes)
        for first in range(0, len(heads), step):
            some = slice(first, first + step)
            scores = self.importance.scores(node.pages[some])
            yield _Run(heads[some], scores, is_start=node.start + first == 0)
