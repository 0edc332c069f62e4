"""Answer one question over several parts of a prefix at once: a step computes a token of each reply.

Knows a runner, pages and token ids; not texts, nor why rows are selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch

from ..policies import Order
from ..prefix import REGION, Prefix, PrefixModel


@dataclass(frozen=True)
class Part:
    """Rows of a prefix in separate pages, from `first_page` on; a question's rows follow them."""

    first_page: int
    num_rows: int


@dataclass
class _Reply:
    part: Part
    num_rows: int  # written ones, including the question's and the reply's
    ids: list[int]


class Parts:
    """The regions of a model's pages after those that `Prefix` uses, one for each part that is used at once."""

    def __init__(self, model: PrefixModel, prefix: Prefix) -> None:
        self._model, self._prefix = model, prefix

    @property
    def whole(self) -> Part:
        """Return the whole prefix."""
        return Part(0, self._prefix.num_tokens)

    def write(self, region: int, choice: Order) -> Part:
        """Put selected rows into region `region`, from 2 on; region 1 is the probe's."""
        first_page = region * REGION
        self._model.write(first_page, self._prefix.rows.take(choice))
        return Part(first_page, choice.shape[-1])

    def greedy(
        self, parts: Sequence[Part], query: Sequence[int], max_tokens: int, is_done: Callable[[list[int]], bool]
    ) -> list[list[int]]:
        """Return the most likely reply over each part, until it is done or reaches the limit."""
        replies = [_Reply(part, part.num_rows, []) for part in parts]
        at_once = max(1, self._model.max_num_tokens // len(query))
        for start in range(0, len(replies), at_once):
            self._step(replies[start : start + at_once], query)
        for _ in range(max_tokens - 1):
            going = [reply for reply in replies if not is_done(reply.ids)]
            if not going:
                break
            self._step(going, None)
        return [reply.ids for reply in replies]

    def _step(self, replies: Sequence[_Reply], query: Sequence[int] | None) -> None:
        """Feed each reply the query or its own last token, and append its next token."""
        count = 1 if query is None else len(query)
        offsets = np.tile(np.arange(count, dtype=np.int32), len(replies))
        begins = np.repeat([reply.num_rows for reply in replies], count).astype(np.int32)
        skipped = np.repeat([self._prefix.num_tokens - reply.part.num_rows for reply in replies], count)
        first_pages = np.array([reply.part.first_page for reply in replies], np.int32)
        width = max(-(-(reply.num_rows + count) // PAGE_SIZE) for reply in replies)
        rows = begins + offsets
        ids = [reply.ids[-1] for reply in replies] if query is None else list(query) * len(replies)
        batch = Batch(
            token_ids=np.array(ids, np.int32),
            positions=(rows + skipped).astype(np.int32),
            slots=rows + np.repeat(first_pages, count) * np.int32(PAGE_SIZE),
            row_of_token=np.repeat(np.arange(len(replies), dtype=np.int32), count),
            page_table=np.add.outer(first_pages, np.arange(width, dtype=np.int32)),
            kv_lengths=rows + np.int32(1),
            logit_rows=np.arange(1, len(replies) + 1, dtype=np.int32) * np.int32(count) - np.int32(1),
        )
        logits = self._model.runner.forward(batch)
        for reply, token in zip(replies, logits.argmax(axis=-1).tolist(), strict=True):
            reply.num_rows += count
            reply.ids.append(token)
