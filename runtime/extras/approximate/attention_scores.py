"""Record how much attention each KV row of the pool gets: a history over prompts, which ranks the tokens of pages.

A use is the attention of one prompt's new tokens to a row that was cached before. It is the mean over the tokens that
came after the row, so that a long prompt counts as much as a short one, and an early row as much as a late one. Each
use weighs `DECAY` times as much as the one after it: 0.8 covers about five uses.

The prompt that computes a row is counted separately and never fades. Its sum is divided as if `PASS_RUN_UP` more tokens
had come after the row, or the last rows would rank first: this prompt says less than later ones about rows that are
used again, and more about rows that nothing has used yet. By both, a quarter of the rows loses less than half of the
attention that the first and the recent rows lose, on all texts of bench/LOG.md.

One in `STRIDE` tokens of a long prompt is scored, and steps that only decode are not. Of sequences with a sparse span
only the chosen rows count, separately, because attention that belongs to missing rows goes to others. Knows
pages and batches, not requests, trees or disks. The engine's thread owns it.

`ScoredRunner` is a runner like any other, with bit-identical logits; it records the
attention. Its caller tells `scores` when a prompt is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ...artifact.manifest import PAGE_SIZE
from ...errors import EngineError
from ...model.batch import Batch, BatchArrays, Float32Array, Forward, Int32Array, PageCopy, PageIO, UInt8Array
from .records.scores_record import RowScores

DECAY = 0.8
STRIDE = 8  # one in this many tokens of a long prompt is scored: all of them take 11 to 42 % of its time (bench/LOG.md)
PASS_RUN_UP = 512 // STRIDE  # scored tokens
_NO_PAGES: Int32Array = np.zeros(0, np.int32)


class AttentionScores:
    """The scores of the rows of a pool.

    >>> sums, counts = np.zeros((1, 1, 2, 16), np.float32), np.zeros((2, 16), np.int32)
    >>> scores = AttentionScores(sums, counts)
    >>> with scores.recording(batch.arrays):  # doctest: +SKIP
    ...     runner.forward_scored(batch, stride=STRIDE)  # adds to both
    >>> scores.fold([0], num_reused=0)
    >>> scores.of([0]).shape
    (1, 1, 16)

    Args:
        sums: float32 `[layers, kv_heads, num_pages, PAGE_SIZE]`, to which a forward adds the attention of tokens;
            reset here.
        counts: int32 `[num_pages, PAGE_SIZE]`, to which it adds how many of these tokens see each row; reset here.

    Attributes:
        is_changed: `[num_pages]`, pages whose scores have changed since their owner reset this.
        lookups: int32 `[num_pages]`, for the owner to record where it looked for scores of a page; 0 once the page
            is cleared.
    """

    def __init__(self, sums: Float32Array, counts: Int32Array) -> None:
        self._sums, self._num_queries = sums, counts
        num_pages = sums.shape[2]
        self._history = np.zeros_like(sums)  # of uses
        self._weight = np.zeros((num_pages, PAGE_SIZE), np.float32)  # of the uses in the history
        self._pass = np.zeros_like(sums)  # attention of the prompt that computed the row
        self.is_changed = np.zeros(num_pages, np.bool_)
        self.lookups = np.zeros(num_pages, np.int32)
        self._is_apart = np.zeros(num_pages, np.bool_)

    def forget_rows(self, slots: Int32Array) -> None:
        """Clear the scores of rows whose KV is about to be computed; `slots` are their places in the pool."""
        pages, rows = np.divmod(slots, PAGE_SIZE)
        self._clear(pages, rows)
        self._is_apart[pages[rows == 0]] = False  # the page belongs to another sequence now

    def forget_pages(self, page_ids: Sequence[int]) -> None:
        """Clear the scores of pages whose KV is replaced by loaded KV."""
        self._clear_pages(np.array(page_ids, np.int64))

    def set_apart(self, page_ids: Sequence[int]) -> None:
        """Mark pages that hold chosen rows of one sequence only, until they are cleared."""
        self._is_apart[list(page_ids)] = True

    def attention_to(self, page_ids: Sequence[int], num_rows: int) -> Float32Array | None:
        """Return the attention to the first rows of pages that were set apart, `[layers, kv_heads, num_rows]`.

        It is the mean over the tokens since then, summed over the queries of a KV head. None without tokens, or if
        numbers are not finite.
        """
        pages = np.array(page_ids, np.int64)
        sums = self._sums[:, :, pages].reshape(*self._sums.shape[:2], -1)[..., :num_rows]
        num_queries = self._num_queries[pages].reshape(-1)[:num_rows]
        if not self._is_apart[pages].all() or not num_queries.all() or not np.isfinite(sums).all():
            return None
        return np.asarray(sums / num_queries, np.float32)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Copy the scores of rows that were copied to other pages, without attention since the last `fold`."""
        for copy in copies:
            self.forget_pages([copy.dst_page])
            for array in (self._history, self._pass, self._weight):
                array[..., copy.dst_page, : copy.num_rows] = array[..., copy.src_page, : copy.num_rows]

    @contextmanager
    def recording(self, arrays: BatchArrays) -> Iterator[None]:
        """Surround a forward that adds to `sums` and `counts`.

        The pages of a sequence with a sparse span are not changed, unless they are set apart.
        """
        hidden = np.unique(np.concatenate([_NO_PAGES, *_sparse_pages(arrays)]))
        hidden = hidden[~self._is_apart[hidden]]
        sums, num_queries = self._sums[:, :, hidden], self._num_queries[hidden]
        yield
        if hidden.size:
            self._sums[:, :, hidden] = sums
            self._num_queries[hidden] = num_queries

    def fold(self, page_ids: Sequence[int], *, num_reused: int) -> None:
        """Add the attention since the last fold to the history, as one use, when a prompt is done.

        Args:
            page_ids: pages of the prompt, from its first token.
            num_reused: number of first tokens that were cached before.
        """
        pages = np.array(page_ids, np.int64)
        sums, num_queries = self._sums[:, :, pages], self._num_queries[pages]
        self._sums[:, :, pages] = self._num_queries[pages] = 0
        if not np.isfinite(sums).all():  # the step's numbers were wrong: all of it is dropped
            return
        is_reused = (np.arange(pages.size * PAGE_SIZE) < num_reused).reshape(-1, PAGE_SIZE)
        is_use = is_reused & (num_queries > 0)
        decay = np.where(is_use, np.float32(DECAY), np.float32(1))
        self._history[:, :, pages] *= decay
        self._history[:, :, pages] += np.where(is_use, sums / np.maximum(num_queries, 1), np.float32(0))
        self._weight[pages] = decay * self._weight[pages] + is_use
        self._pass[:, :, pages] += np.where(is_reused, np.float32(0), sums / (num_queries + PASS_RUN_UP))
        self.is_changed[pages] |= num_queries.any(axis=1)

    def of(self, page_ids: Sequence[int]) -> Float32Array:
        """Return the scores of each row of pages, `[layers, kv_heads, PAGE_SIZE * len(page_ids)]`, as a copy.

        A score is the share of a later token's attention that the row gets, summed over the queries of its KV head, and
        something for the prompt that computed it; 0 for rows that no token attended to.
        """
        pages = np.array(page_ids, np.int64)
        weight = self._weight[pages]
        scores = self._history[:, :, pages] / np.where(weight > 0, weight, 1) + self._pass[:, :, pages]
        return np.asarray(scores.reshape(*scores.shape[:2], -1))

    def learned(self, page_ids: Sequence[int]) -> RowScores:
        """Return all scores of pages, so that `add_learned` can restore them after they were cleared. A copy."""
        pages = np.array(page_ids, np.int64)
        history, first = (a[:, :, pages].reshape(*a.shape[:2], -1) for a in (self._history, self._pass))
        return RowScores(history, first, self._weight[pages].reshape(-1))

    def add_learned(self, page_ids: Sequence[int], before: RowScores) -> None:
        """Add the scores of pages from before they were cleared.

        Later uses count as later, so the result is that of one history. The first prompt that computed a row counts.
        """
        pages = np.array(page_ids, np.int64)
        shape = *self._history.shape[:2], len(pages), PAGE_SIZE
        # after n later uses, a row has the weight (1 - DECAY ** n) / (1 - DECAY)
        faded = 1 - (1 - np.float32(DECAY)) * self._weight[pages]
        self._history[:, :, pages] += faded * before.history.reshape(shape)
        self._weight[pages] += faded * before.weight.reshape(shape[2:])
        first = before.first.reshape(shape)
        self._pass[:, :, pages] = np.where(first > 0, first, self._pass[:, :, pages])

    def _clear(self, pages: npt.NDArray[Any], rows: npt.NDArray[Any] | slice = slice(None)) -> None:
        """Set all scores of pages, or of `rows` of them, to zero."""
        for scores in (self._sums, self._history, self._pass):
            scores[:, :, pages, rows] = 0
        self._weight[pages, rows] = self._num_queries[pages, rows] = 0
        self.is_changed[pages] = False
        self.lookups[pages] = 0

    def _clear_pages(self, pages: npt.NDArray[Any]) -> None:
        """Set all scores of pages to zero; they are no longer set apart."""
        self._clear(pages)
        self._is_apart[pages] = False


def _sparse_pages(arrays: BatchArrays) -> Iterator[Int32Array]:
    """Yield the pages of each sequence of a batch whose tokens see fewer rows than there are positions."""
    num_tokens = np.bincount(arrays.row_of_token, minlength=len(arrays.page_table))
    last = np.cumsum(num_tokens) - 1
    lengths = arrays.kv_lengths[last]
    for sequence in np.flatnonzero((num_tokens > 0) & (lengths != arrays.positions[last] + 1)):
        yield arrays.page_table[sequence, : -(-int(lengths[sequence]) // PAGE_SIZE)]


MAX_SCORED: Final = 16  # of a question's tokens: all of 64 took 27 % of its time, and taught no more (bench/LOG.md)


def stride_of(num_tokens: int, *, ends_prompt: bool) -> int:
    """Return the stride of scored tokens in a step.

    >>> [stride_of(count, ends_prompt=True) for count in (16, 17, 64, 512)], stride_of(16, ends_prompt=False)
    ([1, 2, 4, 8], 8)
    """
    return min(STRIDE, -(-num_tokens // MAX_SCORED)) if ends_prompt else STRIDE


@runtime_checkable
class ScoringRunner(Forward, PageIO, Protocol):
    """A runner that a ScoredRunner can wrap: a `ModelRunner` with `keep_scores`."""

    attention_sums: Float32Array | None
    attention_counts: Int32Array | None
    queries: Float32Array | None

    def forward_scored(self, batch: Batch, *, stride: int) -> Float32Array:
        """Run `forward`; add one in `stride` tokens to `attention_sums` and `attention_counts`, and set `queries`."""
        ...

    def close(self) -> None:
        """Free the runner."""
        ...


class ScoredRunner:
    """A runner with `scores`, which follow rows wherever they are written, copied and loaded.

    Each method has the effect of the runner's own.

    Raises:
        EngineError: the runner keeps no attention scores.
    """

    def __init__(self, runner: ScoringRunner) -> None:
        if runner.attention_sums is None or runner.attention_counts is None:
            raise EngineError("this runner keeps no attention scores; make it with keep_scores=True")
        self._runner = runner
        self.scores = AttentionScores(runner.attention_sums, runner.attention_counts)
        self.top_logits, self.read_pages, self.close = runner.top_logits, runner.read_pages, runner.close

    @property
    def apart(self) -> PageIO:
        """The same pool, for writing chosen rows of one sequence."""
        return _SetApartPages(self)

    @property
    def queries(self) -> Float32Array | None:
        """The queries of the last scored step, `[layers, max_num_tokens, heads, head_dim]`."""
        return self._runner.queries

    def forward(self, batch: Batch) -> Float32Array:
        """Run a step, and score one in `stride_of` its tokens unless each sequence has one token.

        Nearly all such steps only decode, and scoring makes decode 10 to 50 % slower (bench/LOG.md).
        """
        num_tokens, num_sequences, _, num_logits = batch.shape
        if num_tokens > num_sequences:
            return self._forward_and_score(batch, stride_of(num_tokens, ends_prompt=num_logits > 0))
        self.scores.forget_rows(batch.arrays.slots)
        return self._runner.forward(batch)

    def forward_scored(self, batch: Batch) -> Float32Array:
        """Run a step and score it, however few its tokens are, so that `queries` has theirs."""
        return self._forward_and_score(batch, STRIDE)

    def _forward_and_score(self, batch: Batch, stride: int) -> Float32Array:
        """Run a step and return its logits; add the attention weights of one in `stride` of its tokens to `scores`."""
        arrays = batch.arrays
        self.scores.forget_rows(arrays.slots)
        with self.scores.recording(arrays):
            return self._runner.forward_scored(batch, stride=stride)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Copy rows, with their scores."""
        self._runner.copy_rows(copies)
        self.scores.copy_rows(copies)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Write pages, without scores at first."""
        self._runner.write_pages(page_ids, pages)
        self.scores.forget_pages(page_ids)


@dataclass(frozen=True)
class _SetApartPages:
    """Writes pages that hold chosen rows of one sequence only."""

    runner: ScoredRunner

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """Read pages like the runner."""
        self.runner.read_pages(page_ids, out)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Write pages whose attention counts for no other sequence."""
        self.runner.write_pages(page_ids, pages)
        self.runner.scores.set_apart(page_ids)
