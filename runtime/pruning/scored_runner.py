"""A runner that keeps the history of attention of its pool: steps that hold prompts are scored, decode alone is not.

To its callers a runner like any, with the same numbers to the last bit. Knows batches and page ids; what a use is, its
caller says to `importance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..errors import EngineError
from ..model.batch import Batch, Float32Array, PageCopy, TopLogits, UInt8Array
from .importance import Importance


@runtime_checkable
class ScoringRunner(Protocol):
    """What it takes; `ModelRunner` with `keep_mass`."""

    mass: Float32Array | None
    queries: Float32Array | None

    def forward(self, batch: Batch) -> Float32Array: ...
    def forward_scored(self, batch: Batch) -> Float32Array: ...
    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits: ...
    def copy_rows(self, copies: Sequence[PageCopy]) -> None: ...
    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None: ...
    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None: ...
    def close(self) -> None: ...


class ScoredRunner:
    """A runner with `importance`, which follows rows wherever they are written, copied and read back.

    Raises:
        EngineError: the runner keeps no mass.
    """

    def __init__(self, runner: ScoringRunner) -> None:
        if runner.mass is None:
            raise EngineError("this runner keeps no mass; make it with keep_mass=True")
        self._runner = runner
        self.importance = Importance(runner.mass)

    @property
    def queries(self) -> Float32Array | None:
        """As the runner's, of the last step that was scored."""
        return self._runner.queries

    def forward(self, batch: Batch) -> Float32Array:
        """As the runner's. A step in which each sequence has one token is not scored: nearly all such steps are decode,
        which scoring makes 10 to 50 % slower (bench/LOG.md).
        """
        num_tokens, num_sequences, _, _ = batch.shape
        if num_tokens > num_sequences:
            return self.forward_scored(batch)
        self.importance.forget_rows(batch.arrays.slots)
        return self._runner.forward(batch)

    def forward_scored(self, batch: Batch) -> Float32Array:
        """The same; scored, and with `queries`, whatever the batch is."""
        arrays = batch.arrays
        self.importance.forget_rows(arrays.slots)
        with self.importance.looking(arrays):
            return self._runner.forward_scored(batch)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """As the runner's."""
        return self._runner.top_logits(num_rows, vocab_size)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """As the runner's; scores go along."""
        self._runner.copy_rows(copies)
        self.importance.copy_rows(copies)

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """As the runner's."""
        self._runner.read_pages(page_ids, out)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """As the runner's; what comes from disk starts without scores."""
        self._runner.write_pages(page_ids, pages)
        self.importance.forget_pages(page_ids)

    def close(self) -> None:
        """As the runner's."""
        self._runner.close()
