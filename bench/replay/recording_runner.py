"""Record which ids are passed to `forward`, and which ids the KV that they attend to was computed from.

Uses no information from the cache. For each row of each page it keeps the id that it was computed from, and a hash of
all ids before it; rows are copied when the engine has them copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch, Float32Array, PageCopy, TopLogits

_START, _FACTOR, _MODULUS = 1, 6364136223846793005, 2**61 - 1


class _Runner(Protocol):
    def forward(self, batch: Batch) -> Float32Array: ...
    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits: ...
    def copy_rows(self, copies: Sequence[PageCopy]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Passed:
    """One request: `reused_ids` made the KV that was there, `forwarded_ids` were passed to the model after them."""

    reused_ids: tuple[int, ...]
    forwarded_ids: tuple[int, ...]


class RecordingRunner:
    """A runner that wraps `inside`, for one request at a time; `take` returns what was passed since its last call.

    Attributes:
        ids: the token whose KV each row holds, -1 if none; int64[num_pages * PAGE_SIZE].
        histories: for each row, a hash of the tokens that the model saw when it computed the row.
    """

    def __init__(self, num_pages: int, inside: _Runner) -> None:
        self._inside = inside
        self.ids = np.full(num_pages * PAGE_SIZE, -1, np.int64)
        self.histories = [0] * (num_pages * PAGE_SIZE)
        self._reused: tuple[int, ...] | None = None
        self._forwarded: list[int] = []

    def take(self) -> Passed:
        """Return what was passed for the request that has just ended."""
        passed = Passed(self._reused or (), tuple(self._forwarded))
        self._reused, self._forwarded = None, []
        return passed

    def forward(self, batch: Batch) -> Float32Array:
        arrays = batch.arrays
        assert len(arrays.page_table) == 1, "one request at a time"
        pages, first = arrays.page_table[0], int(arrays.positions[0])
        rows = (pages[:, None].astype(np.int64) * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)
        if self._reused is None:
            self._reused = tuple(self.ids[rows[:first]].tolist())
            self._check_histories(rows[:first].tolist())
        history = self.histories[rows[first - 1]] if first else _START
        assert arrays.positions.tolist() == list(range(first, first + len(arrays.positions)))
        assert arrays.slots.tolist() == rows[first : first + len(arrays.slots)].tolist()
        for token_id, slot in zip(arrays.token_ids.tolist(), arrays.slots.tolist(), strict=True):
            history = _after(history, token_id)
            self.ids[slot], self.histories[slot] = token_id, history
        self._forwarded += arrays.token_ids.tolist()
        return self._inside.forward(batch)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        return self._inside.top_logits(num_rows, vocab_size)

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Copy rows between pages, with the record of the ids that they were computed from."""
        for copy in copies:
            source, target = copy.src_page * PAGE_SIZE, copy.dst_page * PAGE_SIZE
            self.ids[target : target + copy.num_rows] = self.ids[source : source + copy.num_rows]
            self.histories[target : target + copy.num_rows] = self.histories[source : source + copy.num_rows]
        self._inside.copy_rows(copies)

    def close(self) -> None:
        self._inside.close()

    def _check_histories(self, rows: list[int]) -> None:
        """Check that each reused row was computed after the very rows that are before it now."""
        history = _START
        for token_id, row in zip(self._reused or (), rows, strict=True):
            history = _after(history, token_id)
            assert self.histories[row] == history, f"the row of token {token_id} was computed behind other tokens"


def _after(history: int, token_id: int) -> int:
    return (history * _FACTOR + token_id + 1) % _MODULUS
