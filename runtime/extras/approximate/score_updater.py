"""Learn from requests that were served with a part of a prefix, so that the order of rows keeps improving.

A use is the attention of the prompt's end to its rows. For missing rows it is the probe's estimate, at most
`MAX_PROBED` of the total, because one KV head's keys stand for all heads there. Scores on disk are changed while the
writer is idle, and runs are rewritten in their order. Prefixes in memory learn by themselves; a use that is waiting
while its prefix is loaded into memory may be lost. Knows rows, scores and the store; not when a part is worth it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...cache.sequence import Sequence as Tokens
from ...cache.sparse_span import SparseSpan
from ...model.batch import Float32Array
from ...prefix.disk_index import StoredPrefix
from ...prefix.disk_writer import DiskWriter
from ...store.page_key import NO_PARENT, PageKey
from ...store.store_state import PutResult
from .attention_scores import DECAY, AttentionScores
from .records.ordered_run import PackProbe
from .records.scores_record import RowScores
from .row_selection import Tokens as Rows
from .row_selection import ranks_to_store, scores_to_store

if TYPE_CHECKING:
    from .records.row_records import RowRecords

MAX_PROBED: Final = 0.25  # share of a use on rows that the request did not have
MAX_WAITING: Final = 16  # prefixes with uses waiting for the writer
MIN_PAGES: Final = 4  # of a run


@dataclass(frozen=True)
class ServedPart:
    """The rows that a request was served with, and its probe's attention."""

    prefix: StoredPrefix
    start: int  # the first partly served page
    run_pages: tuple[int, ...]  # pages of each run after it
    chosen: Rows  # [layers, kv_heads, rows]: the tokens of the rows, counted from `start`
    probed: Float32Array  # [layers, tokens]: the attention by one head's keys; sums to 1

    @property
    def page_keys(self) -> tuple[PageKey, ...]:
        """The keys of the partly served pages."""
        return self.prefix.page_keys[self.start : self.start + sum(self.run_pages)]

    def use(self, attention: Float32Array) -> Float32Array:
        """Return the attention to all tokens, `[layers, kv_heads, tokens]`, from that to the served rows.

        The attention to the other rows is estimated by the probe's.
        """
        shape = *self.chosen.shape[:2], self.probed.shape[1]
        is_there = np.zeros(shape, np.bool_)
        np.put_along_axis(is_there, self.chosen, True, axis=-1)
        missing = np.where(is_there, np.float32(0), self.probed[:, None])
        dropped = missing.sum(axis=-1, keepdims=True)
        share = np.minimum(dropped, np.float32(MAX_PROBED))
        total = attention.sum(axis=-1, keepdims=True)
        use = missing * (share * total / np.maximum(dropped, np.finfo(np.float32).tiny))
        np.put_along_axis(use, self.chosen, attention * (1 - share), axis=-1)
        return np.asarray(use, np.float32)


@dataclass
class _Uses:
    """The uses of one prefix, newest last, as one sum."""

    served: ServedPart  # of the newest use
    history: Float32Array  # [layers, kv_heads, tokens], faded by age
    weight: float = 1.0
    count: int = 1

    def add(self, served: ServedPart, use: Float32Array) -> None:
        """Add one use."""
        self.served, self.history = served, np.float32(DECAY) * self.history + use
        self.weight, self.count = DECAY * self.weight + 1, self.count + 1


@dataclass
class ScoreUpdater:
    """Updates scores on disk from served requests.

    Call `note` with the rows that a request is served with, `used` when its prompt is computed, and `advance` while the
    writer is idle.

    Attributes:
        num_dropped: uses that were dropped, because too many prefixes were waiting.
        num_rewritten: runs that were stored in a better order.
    """

    records: RowRecords
    cache: PrefixCache
    writer: DiskWriter
    scores: AttentionScores
    run_pages: int  # of a run, at most
    probe_head: int
    pack_probe: PackProbe
    num_dropped: int = 0
    num_rewritten: int = 0
    _served: dict[int, ServedPart] = field(default_factory=dict)  # by the id of a live request's span
    _waiting: dict[bytes, _Uses] = field(default_factory=dict)  # by the key of the prefix's last page

    @property
    def has_waiting(self) -> bool:
        """Return whether `advance` has something to do."""
        return bool(self._waiting)

    def note(self, span: SparseSpan, served: ServedPart) -> None:
        """Record that a request is served with the rows of a span."""
        self._served[id(span)] = served
        weakref.finalize(span, self._served.pop, id(span), None)

    def used(self, sequence: Tokens) -> None:
        """Record the use by a prompt that begins with a span of chosen rows, once it is computed."""
        span = sequence.sparse
        served = None if span is None else self._served.pop(id(span), None)
        if span is None or served is None:
            return
        first = span.start // PAGE_SIZE
        pages = list(sequence.page_ids[first : first - (-span.num_rows // PAGE_SIZE)])
        attention = self.scores.attention_to(pages, span.num_rows)
        prefix = served.prefix
        num_in_memory = len(self.cache.tree.find(prefix.namespace, prefix.token_ids).pages)
        if attention is None or num_in_memory > served.start:
            return
        key, use = served.page_keys[-1].key, served.use(attention)
        uses = self._waiting.get(key)
        if uses is not None and uses.served.start == served.start:
            uses.add(served, use)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting[key] = _Uses(served, use)
        else:
            self.num_dropped += 1

    def advance(self) -> None:
        """Update the scores of one prefix on disk, and rewrite its runs if it was used often enough."""
        if self._waiting:
            uses = self._waiting.pop(next(iter(self._waiting)))
            self.writer.submit(lambda _: self._update(uses))

    def close(self) -> None:
        """Hand all waiting uses to the writer."""
        while self._waiting:
            self.advance()

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop the waiting uses of a namespace, or all."""
        for key, uses in list(self._waiting.items()):
            if namespace is None or uses.served.prefix.namespace == namespace:
                del self._waiting[key]
        for span, served in list(self._served.items()):  # in place: spans that end remove themselves
            if namespace is None or served.prefix.namespace == namespace:
                self._served.pop(span, None)

    def _update(self, uses: _Uses) -> PutResult:
        """Update scores and runs on disk, in the writer's thread."""
        page_keys, results = uses.served.page_keys, list[PutResult]()
        for first, stop, scores in _updated_scores(self.records, uses):
            is_due = scores.num_uses >= scores.next_at
            if is_due:
                scores = replace(scores, next_at=2 * scores.num_uses)
            results.append(self.records.scores.put(page_keys[first:stop], scores))
            for start in range(first, stop, self.run_pages) if is_due else ():
                run = slice(start, min(start + self.run_pages, stop))
                is_start = page_keys[start].parent_key == NO_PARENT
                ranked = _order_scores(scores, first, run, is_start=is_start)
                results.append(
                    self.records.rewrite(
                        page_keys[run],
                        ranked,
                        num_ranks=ranks_to_store(ranked.shape[-1], is_start=is_start),
                        probe_head=self.probe_head,
                        pack_probe=self.pack_probe,
                    )
                )
                self.num_rewritten += bool(results[-1].stored)
        return PutResult(evicted=tuple(key for result in results for key in result.evicted))


def _updated_scores(records: RowRecords, uses: _Uses) -> Iterator[tuple[int, int, RowScores]]:
    """Yield the first page, the end and the scores of each part of a prefix, with the new uses added.

    A part is the pages of one record of scores on disk; pages without such a record are divided by run.
    """
    page_keys, (layers, kv_heads, num_tokens) = uses.served.page_keys, uses.history.shape
    known = records.scores.read(page_keys)
    history, first = (np.zeros((layers, kv_heads, num_tokens), np.float32) for _ in range(2))
    weight = np.zeros(num_tokens, np.float32)
    ends = np.cumsum(uses.served.run_pages).tolist()
    owner = np.repeat(np.arange(-len(ends), 0), uses.served.run_pages)  # by page: its record or run
    for number, (start, scores) in enumerate(known):  # the latest record of a page counts
        rows = slice(start * PAGE_SIZE, start * PAGE_SIZE + scores.num_tokens)
        history[..., rows], first[..., rows], weight[rows] = scores.history, scores.first, scores.weight
        owner[start : start + scores.num_tokens // PAGE_SIZE] = number
    faded = np.float32(DECAY**uses.count)
    history, weight = uses.history + faded * history, np.float32(uses.weight) + faded * weight
    bounds = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(page_keys)]
    for start, stop in pairwise(bounds):
        before = known[owner[start]].scores if owner[start] >= 0 else None
        if before is None and stop - start < MIN_PAGES:
            continue
        rows = slice(start * PAGE_SIZE, stop * PAGE_SIZE)
        num_uses, next_at = (0, 1) if before is None else (before.num_uses, before.next_at)
        part = history[..., rows], first[..., rows], weight[rows]
        yield start, stop, RowScores(*part, num_uses + uses.count, next_at)


def _order_scores(
    scores: RowScores, first: int, run: slice, *, is_start: bool
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the scores by which the run of the pages `run` is ordered; `scores` begin at page `first`."""
    rows = slice((run.start - first) * PAGE_SIZE, (run.stop - first) * PAGE_SIZE)
    weight = scores.weight[rows]
    mean = scores.history[..., rows] / np.where(weight > 0, weight, 1) + scores.first[..., rows]
    return scores_to_store(mean, is_start=is_start)
