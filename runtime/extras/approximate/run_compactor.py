"""Have the runs of pages that prompts share rewritten on disk, tokens by attention, when nothing else is to be written.

A node of the tree is rewritten after its 1st use, the 2nd, the 4th, the 8th and so on: each time its order becomes
better and changes less. The node of a chat grows with each turn and keeps its count, so it is not written whole each
time. A run never crosses nodes, or prompts that share one node would have to share both.

What orders a node is stored beside it with its count, so that a process goes on where the one before it ended: with
each run, after some uses between two, and as soon as a prompt is computed, because what that says of its rows is never
learned again. Knows the tree's nodes and the disk's index; reads and writes nothing itself.
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
from .part_teacher import PartTeacher
from .row_selection import ranks_to_store, scores_to_store
from .score_keeper import ScoreKeeper, heads_of

if TYPE_CHECKING:
    from .records.scores_record import FoundScores

MIN_PAGES = 4  # of a node; fewer are read whole as quickly
RUN_BYTES = 64 << 20  # of a run's pages, of which ordering makes a few copies; longer nodes become several runs
MAX_WAITING = 64  # nodes
KEEP_EVERY = 4  # uses of a node after which its scores are stored: so few are lost by a crash
MAX_COUNTED = 4096  # nodes whose uses are remembered


@dataclass
class _Uses:
    """Of a node."""

    count: int = 0
    next_at: int = 1  # the count at which it is rewritten
    waits: bool = False
    is_whole: bool = True  # False: the disk was asked for more, and has not answered
    was_used: bool = False  # since the disk was asked


@dataclass(frozen=True)
class _Run:
    """What the writer is to put in order."""

    heads: tuple[PageKey, ...]
    scores: Float32Array
    is_start: bool  # of a prompt


@dataclass
class RunCompactor:
    """The `Observer` of a tier. Call `computed` when a prompt is done, and `advance` between two steps.

    Args:
        probe_head: the KV head whose keys probe a run.
        wake: called when `is_ready` may have become true by what the disk has told.

    Attributes:
        num_dropped: nodes that were not rewritten, because too many waited; their next use asks again.
    """

    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    scores: AttentionScores
    keeper: ScoreKeeper
    teacher: PartTeacher
    page_bytes: int
    probe_head: int
    wake: Callable[[], None]
    num_dropped: int = 0
    _num_rewritten: int = 0
    _uses: LRUCache[bytes, _Uses] = field(default_factory=lambda: LRUCache(MAX_COUNTED))  # by a node's first page's key
    _waiting: deque[tuple[bytes, Node]] = field(default_factory=deque)
    _runs: deque[_Run] = field(default_factory=deque)  # of one node
    _to_keep: dict[int, tuple[bytes, Node]] = field(default_factory=dict)  # whose scores are to be stored, by node's id

    @property
    def num_rewritten(self) -> int:
        """Runs that the writer has stored."""
        return self._num_rewritten + self.teacher.num_rewritten

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something for the writer, and the writer is idle."""
        has_some = self._waiting or self._runs or self._to_keep or self.teacher.has_waiting
        return bool(has_some) and self.writer.is_idle

    def computed(self, sequence: Tokens, *, num_reused: int) -> None:
        """The prompt of a sequence is done: see `used`, or what teaches a part of a prefix."""
        if sequence.sparse is not None:
            self.used_part(sequence)
        elif sequence.namespace is not None:
            self.used(sequence.namespace, sequence.token_ids[: sequence.num_computed], num_reused=num_reused)

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """A prompt is done: fold its attention scores, and count the nodes whose first page it found, on disk or on
        their way to it."""
        pages = self.cache.tree.find(namespace, token_ids).pages
        self.scores.fold(pages, num_reused=num_reused)
        self.keeper.look_up(namespace, token_ids, lambda read: self._restored(namespace, tuple(token_ids), read))
        keys = self.index.keys(namespace, token_ids[:num_reused])
        for node in self._nodes_of(pages):
            if len(node.pages) < MIN_PAGES:
                continue
            is_on_disk = node.start < len(keys)
            key = keys[node.start] if is_on_disk else heads_of(self.keeper.records.store.identity, node)[0].key
            if node.start < num_reused // PAGE_SIZE:
                self._count(key, node)
            else:
                self._keep(key, node)

    def advance(self) -> None:
        """Hand the writer the next run, or else the next scores, if it is idle."""
        if not self.is_ready:
            return
        if not self._runs and self._waiting:
            key, node = self._waiting.popleft()
            uses = self._uses.get(key, _Uses())
            uses.waits = False
            if not self.keeper.is_awaited(node.pages):  # else it asks again when the disk has answered
                self._runs.extend(self._runs_of(node))
            if self._runs:
                uses.next_at = 2 * uses.count
                self._keep(key, node)
        if self._runs:
            run = self._runs.popleft()
            self.writer.submit(lambda _: self._rewrite(run))
        elif self._to_keep:
            key, node = self._to_keep.pop(next(iter(self._to_keep)))
            if self._heads(node) is not None:
                self._save(key, node)
        else:
            self.teacher.advance()

    def used_part(self, sequence: Tokens) -> None:
        """A prompt is computed that begins with a part of a prefix."""
        self.teacher.used(sequence)

    def leaving(self, node: Node) -> None:
        """Store what was learned of a node before it leaves memory."""
        if self.scores.is_changed[node.pages].any() and len(node.pages) >= MIN_PAGES and not node.is_tail:
            self._save(heads_of(self.keeper.records.store.identity, node)[0].key, node)

    def close(self) -> None:
        """Hand the writer all that was learned and is not stored."""
        for node in self.keeper.changed():
            self.leaving(node)
        self.teacher.close()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        self._runs = deque(run for run in self._runs if run.heads[0].namespace != namespace and namespace is not None)
        waiting, self._waiting = self._waiting, deque()
        to_keep, self._to_keep = self._to_keep, {}
        for key, node in waiting:
            if namespace is None or (node.pages and node.path().namespace == namespace):
                self._uses.pop(key, None)
            else:
                self._waiting.append((key, node))
        for key, node in to_keep.values():
            if namespace is not None and not (node.pages and node.path().namespace == namespace):
                self._keep(key, node)

    def _rewrite(self, run: _Run) -> PutResult:
        """Store a run in order, beside its pages; in the writer's thread."""
        scores = scores_to_store(run.scores, is_start=run.is_start)
        result = self.keeper.records.rewrite(
            run.heads,
            scores,
            num_ranks=ranks_to_store(scores.shape[-1], is_start=run.is_start),
            probe_head=self.probe_head,
            pack_probe=self.teacher.pack_probe,
        )
        self._num_rewritten += bool(result.stored)
        return result

    def _nodes_of(self, pages: Sequence[int]) -> Iterator[Node]:
        """The nodes that hold these pages, from a root down."""
        first = 0
        while first < len(pages):
            node = self.cache.tree.node_of(pages[first])
            assert node is not None, f"page {pages[first]} was found and is in no node"
            yield node
            first = node.start + len(node.pages)

    def _count(self, key: bytes, node: Node) -> None:
        is_awaited = self.keeper.is_awaited(node.pages)
        uses = self._uses[key] = self._uses.get(key) or _Uses(is_whole=not is_awaited)
        uses.count += 1
        uses.was_used = is_awaited
        if not is_awaited:
            self._offer(key, node, uses)

    def _offer(self, key: bytes, node: Node, uses: _Uses) -> None:
        """Have a node rewritten, or its scores stored, if it was used so often."""
        if uses.count < uses.next_at or uses.waits:
            if uses.count % KEEP_EVERY == 0:
                self._keep(key, node)
            return
        if len(self._waiting) == MAX_WAITING:
            self.num_dropped += 1
            return
        uses.waits = True
        self._waiting.append((key, node))

    def _restored(self, namespace: bytes, token_ids: tuple[int, ...], read: Sequence[FoundScores]) -> None:
        """The disk has told what it knows of a prompt's nodes: go on counting from there."""
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
                self._offer(key, node, uses)
        self.wake()

    def _keep(self, key: bytes, node: Node) -> None:
        if len(self._to_keep) < MAX_WAITING:  # else later
            self._to_keep[node.node_id] = key, node

    def _save(self, key: bytes, node: Node) -> None:
        """Store what was learned of a node that is still in memory."""
        if node.pages and self.cache.tree.node_of(node.pages[0]) is node:
            uses = self._uses.get(key, _Uses())
            self.keeper.save(node, num_uses=uses.count, next_at=uses.next_at)

    def _heads(self, node: Node) -> tuple[PageKey, ...] | None:
        """The keys of a node's pages; None if the disk lacks some of it, or memory has it no longer."""
        if not node.pages or self.cache.tree.node_of(node.pages[0]) is not node:
            return None
        path, stop = node.path(), node.start + len(node.pages)
        return self.index.run(path.namespace, tokens_of(path.key), node.start, stop)

    def _runs_of(self, node: Node) -> Iterator[_Run]:
        """The runs of a node as it is now; none if the disk lacks some of it, or memory has it no longer."""
        heads = self._heads(node)
        if heads is None:
            return
        step = max(MIN_PAGES, RUN_BYTES // self.page_bytes)
        for first in range(0, len(heads), step):
            some = slice(first, first + step)
            yield _Run(heads[some], self.scores.of(node.pages[some]), is_start=node.start + first == 0)
