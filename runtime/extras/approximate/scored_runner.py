"""A runner that records the attention to each KV row of its pool: steps with prompts are scored, pure decode is not.

For its callers a runner like any other, with the same numbers to the last bit. Knows batches and page ids; its caller
tells `scores` when a prompt is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from ...errors import EngineError
from ...model.batch import Batch, Float32Array, Forward, Int32Array, PageCopy, PageIO, UInt8Array
from .attention_scores import STRIDE, AttentionScores

MAX_SCORED: Final = 16  # of a question's tokens: all of 64 took 27 % of its time, and taught no more (bench/LOG.md)


def stride_of(num_tokens: int, *, ends_prompt: bool) -> int:
    """One of how many tokens of a step is scored.

    >>> [stride_of(count, ends_prompt=True) for count in (16, 17, 64, 512)], stride_of(16, ends_prompt=False)
    ([1, 2, 4, 8], 8)
    """
    return min(STRIDE, -(-num_tokens // MAX_SCORED)) if ends_prompt else STRIDE


@runtime_checkable
class ScoringRunner(Forward, PageIO, Protocol):
    """What a ScoredRunner wraps: a `ModelRunner` with `keep_scores`."""

    attention_sums: Float32Array | None
    attention_counts: Int32Array | None
    queries: Float32Array | None

    def forward_scored(self, batch: Batch, *, stride: int) -> Float32Array:
        """As `forward`; adds to `attention_sums` and `attention_counts`, of one of `stride` tokens; sets `queries`."""
        ...

    def close(self) -> None:
        """Free it."""
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
        """The same pool, in which what is written are chosen rows of one sequence."""
        return _Apart(self)

    @property
    def queries(self) -> Float32Array | None:
        """Of the last step that was scored, `[layers, max_num_tokens, heads, head_dim]`."""
        return self._runner.queries

    def forward(self, batch: Batch) -> Float32Array:
        """Run a step. It is scored unless each sequence has one token: nearly all such steps only decode, and scoring
        makes decode 10 to 50 % slower (bench/LOG.md). One of `stride_of` its tokens is.
        """
        num_tokens, num_sequences, _, num_logits = batch.shape
        if num_tokens > num_sequences:
            return self._forward_scored(batch, stride_of(num_tokens, ends_prompt=num_logits > 0))
        self.scores.forget_rows(batch.arrays.slots)
        return self._runner.forward(batch)

    def forward_scored(self, batch: Batch) -> Float32Array:
        """Run a step after which `queries` has those of its tokens, however few they are."""
        return self._forward_scored(batch, STRIDE)

    def _forward_scored(self, batch: Batch, stride: int) -> Float32Array:
        arrays = batch.arrays
        self.scores.forget_rows(arrays.slots)
        with self.scores.recording(arrays):
            return self._runner.forward_scored(batch, stride=stride)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Copy rows, with their scores."""
        self._runner.copy_rows(copies)
        self.scores.copy_rows(copies)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Write pages, which begin without scores."""
        self._runner.write_pages(page_ids, pages)
        self.scores.forget_pages(page_ids)


@dataclass(frozen=True)
class _Apart:
    """Writes chosen rows."""

    runner: ScoredRunner

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """As the runner does."""
        self.runner.read_pages(page_ids, out)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Write pages whose attention counts for no other sequence."""
        self.runner.write_pages(page_ids, pages)
        self.runner.scores.set_apart(page_ids)
