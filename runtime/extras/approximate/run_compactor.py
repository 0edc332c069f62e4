"""Have the runs of shared pages rewritten on disk, tokens by attention, while the writer is idle.

A node of the tree is rewritten after its 1st use, the 2nd, the 4th, the 8th and so on: each time its order improves
and changes less. The node of a conversation grows with each turn and keeps its count, so it is not written whole each
time. A run never crosses nodes, or prompts that share one node would have to share both.

The scores and counts of a node are stored with it, so that a new process continues where the last one ended: with
each run, after some uses between two runs, and as soon as a prompt is computed, because its own attention is never
measured again. Knows the tree's nodes and the disk's index; reads and writes nothing itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachetools import LRUCache

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...cache.radix_node import Node, tokens_of
from ...cache.sequence import Sequence as Tokens
from ...model.batch import Float32Array
from ...prefix.disk_index import DiskIndex
from ...prefix.disk_writer import DiskWriter
from ...store.page_key import PageKey
from ...store.store_state import PutResult
from .attention_scores import AttentionScores
from .row_selection import ranks_to_store, scores_to_store
from .score_keeper import ScoreKeeper, page_keys_of
from .score_updater import ScoreUpdater

if TYPE_CHECKING:
    from .records.scores_record import FoundScores

MIN_PAGES = 4  # of a node; fewer are read whole as fast
RUN_BYTES = 64 << 20  # of a run's pages, which ordering copies a few times; longer nodes become several runs
MAX_WAITING = 64  # nodes
KEEP_EVERY = 4  # uses of a node after which its scores are stored: a crash loses only these few
MAX_COUNTED = 4096  # nodes whose uses are counted


@dataclass
class _Uses:
    """The uses of a node."""

    count: int = 0
    next_at: int = 1  # the count at which it is rewritten
    waits: bool = False
    is_whole: bool = True  # False: the disk was asked for earlier uses, and has not answered
    was_used: bool = False  # used since the disk was asked


@dataclass(frozen=True)
class _Run:
    """A run for the writer to reorder."""

    page_keys: tuple[PageKey, ...]
    scores: Float32Array
    is_start: bool  # the run begins a prompt


@dataclass
class RunCompactor:
    """Rewrites runs; the `Observer` of a tier. Call `computed` when a prompt is done, and `advance` between two steps.

    Args:
        probe_head: the KV head whose keys probe a run.
        wake: called when `is_ready` may have become true because of data from disk.

    Attributes:
        num_dropped: nodes that were not rewritten, because too many were waiting; their next use tries again.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    scores: AttentionScores
    keeper: ScoreKeeper
    updater: ScoreUpdater
    page_bytes: int
    probe_head: int
    wake: Callable[[], None]
    num_dropped: int = 0
    _num_rewritten: int = 0
    _uses: LRUCache[bytes, _Uses] = field(default_factory=lambda: LRUCache(MAX_COUNTED))  # by a node's first page's key
    _waiting: deque[tuple[bytes, Node]] = field(default_factory=deque)
    _runs: deque[_Run] = field(default_factory=deque)  # of one node
    _to_keep: dict[int, tuple[bytes, Node]] = field(default_factory=dict)  # whose scores must be stored, by node's id

    @property
    def num_rewritten(self) -> int:
        """Number of runs that the writer has stored."""
        return self._num_rewritten + self.updater.num_rewritten

    @property
    def is_ready(self) -> bool:
        """Return whether `advance` has something for the writer, and the writer is idle."""
        has_some = self._waiting or self._runs or self._to_keep or self.updater.has_waiting
        return bool(has_some) and self.writer.is_idle

    def computed(self, sequence: Tokens, *, num_reused: int) -> None:
        """Record that the prompt of a sequence is done: see `used` and `used_part`."""
        if sequence.sparse is not None:
            self.used_part(sequence)
        elif sequence.namespace is not None:
            self.used(sequence.namespace, sequence.token_ids[: sequence.num_computed], num_reused=num_reused)

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """Record a finished prompt: fold its attention scores, and count the nodes whose first page it found, on disk
        or queued for it."""
        pages = self.cache.tree.find(namespace, token_ids).pages
        self.scores.fold(pages, num_reused=num_reused)
        self.keeper.look_up(
            namespace, token_ids, lambda read: self._add_earlier_uses(namespace, tuple(token_ids), read)
        )
        keys = self.index.keys(namespace, token_ids[:num_reused])
        for node in self._nodes_of(pages):
            if len(node.pages) < MIN_PAGES:
                continue
            is_on_disk = node.start < len(keys)
            key = keys[node.start] if is_on_disk else page_keys_of(self.keeper.records.store.identity, node)[0].key
            if node.start < num_reused // PAGE_SIZE:
                self._count_use(key, node)
            else:
                self._queue_scores(key, node)

    def advance(self) -> None:
        """Hand the next run, or else the next scores, to the writer thread, if it is idle."""
        if not self.is_ready:
            return
        if not self._runs and self._waiting:
            key, node = self._waiting.popleft()
            uses = self._uses.get(key, _Uses())
            uses.waits = False
            if not self.keeper.is_awaited(node.pages):  # else it is offered again when the disk has answered
                self._runs.extend(self._runs_of(node))
            if self._runs:
                uses.next_at = 2 * uses.count
                self._queue_scores(key, node)
        if self._runs:
            run = self._runs.popleft()
            self.writer.submit(lambda _: self._rewrite(run))
        elif self._to_keep:
            key, node = self._to_keep.pop(next(iter(self._to_keep)))
            if self._page_keys(node) is not None:
                self._save_scores(key, node)
        else:
            self.updater.advance()

    def used_part(self, sequence: Tokens) -> None:
        """Record a computed prompt that begins with a part of a prefix."""
        self.updater.used(sequence)

    def leaving(self, node: Node) -> None:
        """Store the scores of a node that is about to leave memory."""
        if self.scores.is_changed[node.pages].any() and len(node.pages) >= MIN_PAGES and not node.is_tail:
            self._save_scores(page_keys_of(self.keeper.records.store.identity, node)[0].key, node)

    def close(self) -> None:
        """Hand all scores that are not stored to the writer."""
        for node in self.keeper.changed():
            self.leaving(node)
        self.updater.close()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop the waiting nodes and runs of a namespace, or all."""
        self._runs = deque(
            run for run in self._runs if run.page_keys[0].namespace != namespace and namespace is not None
        )
        waiting, self._waiting = self._waiting, deque()
        to_keep, self._to_keep = self._to_keep, {}
        for key, node in waiting:
            if namespace is None or (node.pages and node.path().namespace == namespace):
                self._uses.pop(key, None)
            else:
                self._waiting.append((key, node))
        for key, node in to_keep.values():
            if namespace is not None and not (node.pages and node.path().namespace == namespace):
                self._queue_scores(key, node)

    def _rewrite(self, run: _Run) -> PutResult:
        """Store an ordered run besides its pages; in the writer's thread."""
        scores = scores_to_store(run.scores, is_start=run.is_start)
        result = self.keeper.records.rewrite(
            run.page_keys,
            scores,
            num_ranks=ranks_to_store(scores.shape[-1], is_start=run.is_start),
            probe_head=self.probe_head,
            pack_probe=self.updater.pack_probe,
        )
        self._num_rewritten += bool(result.stored)
        return result

    def _nodes_of(self, pages: Sequence[int]) -> Iterator[Node]:
        """Yield the nodes that hold these pages, from a root down."""
        first = 0
        while first < len(pages):
            node = self.cache.tree.node_of(pages[first])
            assert node is not None, f"page {pages[first]} was found and is in no node"
            yield node
            first = node.start + len(node.pages)

    def _count_use(self, key: bytes, node: Node) -> None:
        """Count a use of a node; queue work for it, unless its earlier uses are still being read from disk."""
        is_awaited = self.keeper.is_awaited(node.pages)
        uses = self._uses[key] = self._uses.get(key) or _Uses(is_whole=not is_awaited)
        uses.count += 1
        uses.was_used = is_awaited
        if not is_awaited:
            self._queue_if_due(key, node, uses)

    def _queue_if_due(self, key: bytes, node: Node, uses: _Uses) -> None:
        """Queue a node for rewriting, or its scores for storing, if it was used often enough."""
        if uses.count < uses.next_at or uses.waits:
            if uses.count % KEEP_EVERY == 0:
                self._queue_scores(key, node)
            return
        if len(self._waiting) == MAX_WAITING:
            self.num_dropped += 1
            return
        uses.waits = True
        self._waiting.append((key, node))

    def _add_earlier_uses(self, namespace: bytes, token_ids: tuple[int, ...], read: Sequence[FoundScores]) -> None:
        """Add the uses that were read from disk to the counts of a prompt's nodes.

        Work that had to wait for them is queued.
        """
        pages = self.cache.tree.find(namespace, token_ids).pages
        keys = self.index.keys(namespace, token_ids)
        before = {start: scores for start, scores in read}
        for node in self._nodes_of(pages[: len(keys)]):
            if len(node.pages) < MIN_PAGES:
                continue
            key, known = keys[node.start], before.get(node.start)
            uses = self._uses[key] = self._uses.get(key) or _Uses(is_whole=False)
            if known is not None and not uses.is_whole:
                uses.count, uses.next_at = uses.count + known.num_uses, known.next_at
            uses.is_whole = True
            if uses.was_used:
                uses.was_used = False
                self._queue_if_due(key, node, uses)
        self.wake()

    def _queue_scores(self, key: bytes, node: Node) -> None:
        """Queue the scores of a node for storing, unless too many are queued."""
        if len(self._to_keep) < MAX_WAITING:  # else later
            self._to_keep[node.node_id] = key, node

    def _save_scores(self, key: bytes, node: Node) -> None:
        """Store the scores of a node that is still in memory."""
        if node.pages and self.cache.tree.node_of(node.pages[0]) is node:
            uses = self._uses.get(key, _Uses())
            self.keeper.save(node, num_uses=uses.count, next_at=uses.next_at)

    def _page_keys(self, node: Node) -> tuple[PageKey, ...] | None:
        """Return the keys of a node's pages; None if a page is missing on disk, or the node has left memory."""
        if not node.pages or self.cache.tree.node_of(node.pages[0]) is not node:
            return None
        path, stop = node.path(), node.start + len(node.pages)
        return self.index.run(path.namespace, tokens_of(path.key), node.start, stop)

    def _runs_of(self, node: Node) -> Iterator[_Run]:
        """Yield the runs of a node as it is now; none if a page is missing on disk, or the node has left memory."""
        page_keys = self._page_keys(node)
        if page_keys is None:
            return
        step = max(MIN_PAGES, RUN_BYTES // self.page_bytes)
        for first in range(0, len(page_keys), step):
            some = slice(first, first + step)
            yield _Run(page_keys[some], self.scores.of(node.pages[some]), is_start=node.start + first == 0)
