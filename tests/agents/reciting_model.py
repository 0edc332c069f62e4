"""A model that says what a script says to whoever asks: its KV rows are the ids of tokens.

So it knows each request's whole text from the pages that it is given, however they were found: a wrong page would be a
wrong text. Any number of requests at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE, TOP_LOGITS
from radixlm.runtime.model.batch import Batch, Float32Array, Int32Array, PageCopy, TopLogits, UInt8Array

_SURE = 1e4  # a logit beside which the others are nothing at any temperature
_ROW_BYTES = 4


class RecitingModel:
    """Implements `Runner` and `PageIO`.

    Args:
        reply_to: the ids to say, given those of a prompt; after them, `end` is said.
        opens_reply: the ids that a prompt ends with, and that stand nowhere else but before replies.
        row_s: seconds that it takes for a token.

    Attributes:
        num_rows: tokens that it was handed so far.
    """

    def __init__(
        self,
        num_pages: int,
        vocab_size: int,
        *,
        reply_to: Callable[[tuple[int, ...]], Sequence[int]],
        opens_reply: Sequence[int],
        end: int,
        row_s: float = 0.0,
    ) -> None:
        self.num_rows, self._row_s = 0, row_s
        self._kv: Int32Array = np.full((num_pages, PAGE_SIZE), -1, np.int32)
        self._vocab_size, self._reply_to, self._end = vocab_size, reply_to, end
        self._opens_reply = tuple(opens_reply)
        self._said: list[int] = []  # by the last forward
        self._replies: dict[bytes, list[int]] = {}

    def forward(self, batch: Batch) -> Float32Array:
        """Logits `[R, vocab_size]` that leave no choice."""
        arrays = batch.arrays
        self.num_rows += len(arrays.token_ids)
        time.sleep(self._row_s * len(arrays.token_ids))
        self._kv.reshape(-1)[arrays.slots] = arrays.token_ids
        self._said = []
        for row in arrays.logit_rows:
            pages = arrays.page_table[arrays.row_of_token[row]]
            ids = self._kv[pages].reshape(-1)[: arrays.kv_lengths[row]]
            assert (ids >= 0).all(), "a page was never written"
            self._said.append(self._next(ids))
        logits = np.zeros((len(self._said), self._vocab_size), np.float32)
        logits[np.arange(len(self._said)), self._said] = _SURE
        return logits

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """The id that is said, and the first of all others."""
        ids = np.empty((num_rows, TOP_LOGITS), np.int32)
        for row, said in enumerate(self._said[:num_rows]):
            others = np.arange(TOP_LOGITS, dtype=np.int32)
            ids[row] = [said, *others[others != said][: TOP_LOGITS - 1]]
        values = np.zeros_like(ids, np.float32)
        values[:, 0] = _SURE
        return TopLogits(values, ids, np.ones(num_rows, np.int32))

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies."""
        for copy in copies:
            self._kv[copy.dst_page, : copy.num_rows] = self._kv[copy.src_page, : copy.num_rows]

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """Pages as bytes; what a page has more is zeros."""
        out[: len(page_ids)] = 0
        out[: len(page_ids), : PAGE_SIZE * _ROW_BYTES] = self._kv[list(page_ids)].view(np.uint8)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Pages from bytes."""
        self._kv[list(page_ids)] = np.ascontiguousarray(pages[:, : PAGE_SIZE * _ROW_BYTES]).view(np.int32)

    def close(self) -> None:
        """Nothing."""

    def _next(self, ids: Int32Array) -> int:
        """What follows ids: behind a prompt, or some of its reply."""
        begins = np.flatnonzero(ids == self._opens_reply[0])
        opened = len(self._opens_reply)
        starts = [int(at) + opened for at in begins if tuple(ids[at : at + opened]) == self._opens_reply]
        if not starts:
            return self._end  # measured, or not of a chat
        prompt, num_said = ids[: starts[-1]], len(ids) - starts[-1]
        key = prompt.tobytes()
        if key not in self._replies:
            self._replies[key] = [*self._reply_to(tuple(prompt.tolist())), self._end]
        reply = self._replies[key]
        return reply[min(num_said, len(reply) - 1)]
