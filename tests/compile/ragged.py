"""Forwards of a model runner written out by hand: whole prompts, token by token, and several mixed.

Knows pages and `Batch`; takes page ids in an order that no allocator would, so that confusing them shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import NO_ADAPTER, Batch, Forward


@dataclass
class Row:
    """One sequence: its tokens, its pages, its adapter, the number of tokens in the pool, and the slot of its state."""

    token_ids: Sequence[int]
    page_ids: list[int]
    adapter: int = NO_ADAPTER
    num_computed: int = 0
    state: int = 0


@dataclass
class Rows:
    """Sequences that share a runner with `num_pages` pages, and two slots for each where it keeps states.

    A step writes the slot that the one before it did not: it can be repeated.
    """

    runner: Forward
    num_pages: int
    max_num_logits: int = 64
    rows: list[Row] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], adapter: int = NO_ADAPTER) -> int:
        """Give a sequence pages that are far apart; return its number."""
        taken = {page for row in self.rows for page in row.page_ids}
        free = [page * 7 % self.num_pages for page in range(self.num_pages)]
        pages = [page for page in free if page not in taken]
        self.rows.append(Row(token_ids, pages[: -(-len(token_ids) // PAGE_SIZE)], adapter))
        return len(self.rows) - 1

    def step(self, num_tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """Compute the next tokens of some sequences in one forward; logits `[num_tokens, vocab]` of each.

        The forward is repeated where it has more positions than one may ask logits of: the same KV is written
        again.
        """
        batch = self._batch(num_tokens)
        wanted = range(0, batch.shape[0], self.max_num_logits)
        logits = np.concatenate([self._logits(batch, start) for start in wanted])
        found, start = {}, 0
        for number, count in num_tokens.items():
            found[number] = logits[start : start + count]
            self.rows[number].num_computed += count
            self.rows[number].state = self._next_state(number)
            start += count
        return found

    def _logits(self, batch: Batch, start: int) -> np.ndarray:
        stop = min(start + self.max_num_logits, batch.shape[0])
        *arrays, _ = batch.arrays  # the last says which rows' logits are wanted
        more = {"state_in": batch.state_in, "state_out": batch.state_out, "adapters": batch.adapters}
        return self.runner.forward(Batch(*arrays, np.arange(start, stop, dtype=np.int32), **more)).copy()

    def _next_state(self, number: int) -> int:
        return 2 * number + 1 + self.rows[number].state % 2

    def _batch(self, num_tokens: dict[int, int]) -> Batch:
        spans = [
            (row, self.rows[number], np.arange(count) + self.rows[number].num_computed)
            for row, (number, count) in enumerate(num_tokens.items())
        ]
        table = np.zeros((len(spans), max(len(row.page_ids) for _, row, _ in spans)), np.int32)
        for index, row, _ in spans:
            table[index, : len(row.page_ids)] = row.page_ids
        columns = {
            "token_ids": [np.array(row.token_ids)[positions] for _, row, positions in spans],
            "positions": [positions for _, _, positions in spans],
            "slots": [
                np.array(row.page_ids)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
                for _, row, positions in spans
            ],
            "row_of_token": [np.full(len(positions), index) for index, _, positions in spans],
            "kv_lengths": [positions + 1 for _, _, positions in spans],
        }
        arrays = {name: np.concatenate(parts).astype(np.int32) for name, parts in columns.items()}
        states = {
            "state_in": np.array([row.state for _, row, _ in spans], np.int32),
            "state_out": np.array([self._next_state(number) for number in num_tokens], np.int32),
        }
        adapters = np.concatenate([np.full(len(positions), row.adapter, np.int32) for _, row, positions in spans])
        adapted = adapters if (adapters != NO_ADAPTER).any() else None
        return Batch(**arrays, page_table=table, logit_rows=np.zeros(0, np.int32), **states, adapters=adapted)
