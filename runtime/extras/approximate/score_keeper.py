"""Store the scores of rows on disk with their pages, and restore them when the pages come back to memory.

Scores are looked up when a prompt has found pages whose rows have none, and arrive some time later; uses in between
count as later ones. They are stored while the writer is idle, when their pages leave memory, and at the end. Knows
nodes of the tree and the store, not when a node is worth it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...cache.radix_node import Node
from ...prefix.disk_index import DiskIndex
from ...prefix.disk_reader import DiskReader, Read
from ...prefix.disk_writer import DiskWriter
from ...prefix.unsaved_pages import UnsavedFinder
from ...store.page_key import PageKey, StoreIdentity
from .attention_scores import AttentionScores
from .records.scores_record import RowScores

if TYPE_CHECKING:
    from .records.row_records import RowRecords
    from .records.scores_record import FoundScores

MAX_QUEUED_BYTES: Final = 64 << 20  # of scores waiting for the writer; more are dropped
_IS_KNOWN: Final = -1  # in `AttentionScores.lookups`: the disk has no more about the page than memory


@dataclass
class ScoreKeeper:
    """Saves and restores scores. The engine's thread owns it.

    Attributes:
        num_dropped: nodes whose scores were dropped, because too many were waiting for the writer.
    """

    records: RowRecords
    cache: PrefixCache
    index: DiskIndex
    writer: DiskWriter
    reader: DiskReader
    scores: AttentionScores
    num_dropped: int = 0
    _num_lookups: int = 0
    _queued: list[tuple[Future[None], int]] = field(default_factory=list)  # with their bytes

    def look_up(
        self, namespace: bytes, token_ids: Sequence[int], found: Callable[[Sequence[FoundScores]], None]
    ) -> None:
        """Look up the scores of a prompt's pages on disk, if some have none in memory, and add them.

        Args:
            found: called with the scores after they were added; not called if nothing is looked up.
        """
        pages = np.array(self.cache.tree.find(namespace, token_ids).pages, np.int64)
        unknown = np.flatnonzero(self.scores.lookups[pages] == 0)
        if not unknown.size:
            return
        num_stored = min(len(self.index.keys(namespace, token_ids)), len(pages))
        self.scores.lookups[pages[unknown[unknown >= num_stored]]] = _IS_KNOWN  # without pages on disk, no scores
        if not (unknown := unknown[unknown < num_stored]).size:
            return
        token_ids = tuple(token_ids[: (int(unknown[-1]) + 1) * PAGE_SIZE])
        page_keys = self.index.run(namespace, token_ids, 0, len(token_ids) // PAGE_SIZE)
        assert page_keys is not None, "its keys were found"
        self._num_lookups += 1
        self.scores.lookups[pages[unknown]] = number = self._num_lookups
        read: list[FoundScores] = []

        def work() -> bool:
            read.extend(self.records.scores.read(page_keys))
            return True

        def done(_: Read) -> None:
            self._add(namespace, token_ids, read, number)
            found(read)

        self.reader.run(work, done)

    def is_awaited(self, page_ids: Sequence[int]) -> bool:
        """Return whether the disk was asked for scores of one of these pages, and has not answered."""
        return bool((self.scores.lookups[list(page_ids)] > 0).any())

    def save(self, node: Node, *, num_uses: int, next_at: int) -> None:
        """Queue the scores of a node's pages for the writer, if they have changed."""
        if node.is_tail or not node.pages or not self.scores.is_changed[node.pages].any():
            return
        if self.is_awaited(node.pages):  # the stored scores are worth more
            return
        learned = self.scores.learned(node.pages)
        num_bytes = 2 * learned.history.nbytes
        self._queued = [(future, size) for future, size in self._queued if not future.done()]
        if self._queued and sum(size for _, size in self._queued) + num_bytes > MAX_QUEUED_BYTES:
            self.num_dropped += 1
            return
        kept = RowScores(learned.history, learned.first, learned.weight, num_uses, next_at)
        page_keys = page_keys_of(self.records.store.identity, node)
        self.scores.is_changed[node.pages] = False
        self._queued.append((self.writer.submit(lambda _: self.records.scores.put(page_keys, kept)), num_bytes))

    def changed(self) -> list[Node]:
        """Return the nodes whose scores have changed since they were stored."""
        pages = np.flatnonzero(self.scores.is_changed).tolist()
        nodes = {id(node): node for page in pages if (node := self.cache.tree.node_of(page)) is not None}
        return list(nodes.values())

    def _add(self, namespace: bytes, token_ids: tuple[int, ...], read: Sequence[FoundScores], number: int) -> None:
        """Add scores that were read, to pages of this lookup that are still in memory."""
        pages = np.array(self.cache.tree.find(namespace, token_ids).pages, np.int64)
        is_asked = self.scores.lookups[pages] == number
        latest = np.full(len(pages), -1)
        for i, (start, scores) in enumerate(read):
            latest[start : start + scores.num_tokens // PAGE_SIZE] = i
        for i, (start, scores) in enumerate(read):
            which = np.flatnonzero((latest == i) & is_asked)
            if which.size:
                rows = ((which - start)[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
                part = RowScores(scores.history[..., rows], scores.first[..., rows], scores.weight[rows])
                self.scores.add_learned(pages[which].tolist(), part)
        self.scores.lookups[pages[is_asked]] = _IS_KNOWN


def page_keys_of(identity: StoreIdentity, node: Node) -> list[PageKey]:
    """Return the keys of a node's pages."""
    num_pages = len(node.pages)
    finder = UnsavedFinder(identity, is_saved=lambda key: False)
    return finder.find(node, num_pages, most=num_pages, num_done=node.start).page_keys
