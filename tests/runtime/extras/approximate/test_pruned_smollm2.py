"""A query over chosen rows of a prefix, by cache, transaction and batch, is the bits of a batch that is made by hand.

Real weights. And all rows in their order are an exact prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.kv_transaction import Reservation
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence as Tokens
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.model.batch import Batch, make_batch
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.tokenizer_fix import Tokenizer

from ...engine.test_law_of_the_row import TEXT

START, STOP, NUM_ROWS = 32, 117, 27  # rows [32, 59): neither they nor the prefix end with a page
NUM_TOKENS = 133


@dataclass
class Bench:
    """A runner, a cache over its pages, and a text whose prefix is computed once."""

    runner: ModelRunner
    cache: PrefixCache
    token_ids: tuple[int, ...]
    rows: KVRows  # of [START, STOP)

    def step(self, parts: Sequence[tuple[Tokens, int]]) -> list[np.ndarray]:
        """The next so many tokens of each sequence, and the logits of the last of each."""
        with self.cache.begin() as step:
            reservations: list[Reservation] = [step.reserve(sequence, count) for sequence, count in parts]
            if step.copies:
                self.runner.copy_rows(step.copies)
            logits = self.runner.forward(make_batch(reservations, [True] * len(parts))).copy()
            step.commit()
        self.cache.check()
        return list(logits)

    def opened(self, order: np.ndarray) -> Tokens:
        """The text with its first pages shared, and the chosen ones of the rows behind them."""
        rows = self.rows.take(order)
        match = self.cache.match(self.token_ids)
        pruned = SparseSpan(START, rows.num_tokens, self.token_ids[:STOP])
        sequence = self.cache.open(match, sparse=pruned, context_length=512)
        self.runner.write_pages(sequence.page_ids[START // PAGE_SIZE :], rows.to_pages())
        return sequence

    def by_hand(self, order: np.ndarray) -> np.ndarray:
        """The logits of every token from STOP on over the first pages and the chosen rows; in pages that are free."""
        rows, count = self.rows.take(order), NUM_TOKENS - STOP
        shared = list(self.cache.match(self.token_ids).pages[: START // PAGE_SIZE])
        used = {page for page in range(self.cache.pool.num_pages) if self.cache.pool.ref_count(page)}
        free = [page for page in range(self.cache.pool.num_pages) if page not in used]
        pages = [*shared, *free[: -(-(rows.num_tokens + count) // PAGE_SIZE)]]
        chosen = rows.to_pages()
        self.runner.write_pages(pages[len(shared) : len(shared) + len(chosen)], chosen)
        offsets = np.arange(count, dtype=np.int32)
        where = offsets + START + rows.num_tokens
        batch = Batch(
            token_ids=np.array(self.token_ids[STOP:], np.int32),
            positions=offsets + np.int32(STOP),
            slots=(np.array(pages)[where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE).astype(np.int32),
            row_of_token=np.zeros(count, np.int32),
            page_table=np.array([pages], np.int32),
            kv_lengths=(where + 1).astype(np.int32),
            logit_rows=offsets,
        )
        return self.runner.forward(batch).copy()


@pytest.fixture(scope="module")
def bench(smollm2_artifact: Path) -> Iterator[Bench]:
    artifact = Artifact.open(smollm2_artifact)
    runner, cache = ModelRunner(artifact, num_pages=64), PrefixCache(PagePool(64))
    token_ids = tuple(Tokenizer(artifact.tokenizer_json).encode(TEXT)[:NUM_TOKENS])
    prefix = cache.open(cache.match(token_ids[: STOP + 1]), context_length=512)
    with cache.begin() as step:
        runner.forward(make_batch([step.reserve(prefix, STOP)], [False]))
        step.commit()
    layout = artifact.manifest.kv
    pages = np.zeros((len(prefix.page_ids), layout.page_bytes), np.uint8)
    runner.read_pages(prefix.page_ids, pages)
    rows = KVRows.of_pages(layout, pages, STOP)
    order = np.broadcast_to(np.arange(START, STOP), (layout.num_layers, layout.num_kv_heads, STOP - START))
    cache.close(prefix)
    yield Bench(runner, cache, token_ids, rows.take(order))
    runner.close()


@pytest.fixture(scope="module")
def order(bench: Bench) -> np.ndarray:
    """Other rows in each layer and head, and in an order of their own."""
    layout = bench.rows.layout
    chances = np.random.default_rng(0).random((layout.num_layers, layout.num_kv_heads, STOP - START))
    return chances.argsort(axis=-1)[..., :NUM_ROWS]


@pytest.mark.parametrize("counts", [[16], [1] * 16, [6, 9, 1]])
def test_chosen_rows_through_the_cache_are_the_bits_of_a_batch_made_by_hand(
    bench: Bench, order: np.ndarray, counts: list[int]
) -> None:
    wanted = bench.by_hand(order)
    sequence = bench.opened(order)
    ends = np.cumsum(counts) - 1
    for count, end in zip(counts, ends.tolist(), strict=True):
        (logits,) = bench.step([(sequence, count)])
        assert (logits == wanted[end]).all()
    bench.cache.close(sequence)


def test_company_changes_nothing_of_a_pruned_sequence_nor_it_of_the_company(bench: Bench, order: np.ndarray) -> None:
    wanted = bench.by_hand(order)
    lonely = bench.cache.open(bench.cache.match(bench.token_ids[:50:-1]), context_length=512)
    alone = [bench.step([(lonely, 7)])[0], bench.step([(lonely, 40)])[0]]
    bench.cache.close(lonely, keep=False)
    other = bench.cache.open(bench.cache.match(bench.token_ids[:50:-1], namespace=b"other"), context_length=512)
    sequence = bench.opened(order)
    for (count, others), end, row in zip([(9, 7), (7, 40)], (8, 15), alone, strict=True):
        first, second = bench.step([(other, others), (sequence, count)])
        assert (second == wanted[end]).all() and (first == row).all()
    bench.cache.close(sequence)
    bench.cache.close(other, keep=False)


def test_all_rows_in_their_order_are_the_bits_of_an_exact_prefix(bench: Bench) -> None:
    layout = bench.rows.layout
    everything = np.broadcast_to(np.arange(STOP - START), (layout.num_layers, layout.num_kv_heads, STOP - START))
    pruned = bench.opened(everything)
    found = [bench.step([(pruned, 1)])[0] for _ in range(NUM_TOKENS - STOP)]
    bench.cache.close(pruned)
    match = bench.cache.match(bench.token_ids)
    assert match.num_tokens == STOP, "something of the pruned sequence can be found"
    exact = bench.cache.open(match, context_length=512)
    for logits in found:
        assert (bench.step([(exact, 1)])[0] == logits).all()
    bench.cache.close(exact, keep=False)


def test_what_is_forked_and_popped_behind_chosen_rows_is_the_same_bits(bench: Bench, order: np.ndarray) -> None:
    wanted = bench.by_hand(order)
    sequence = bench.opened(order)
    bench.step([(sequence, 16)])
    child = bench.cache.fork(sequence, STOP + 6)
    child.append(bench.token_ids[STOP + 6 :])
    sequence.pop(8)
    sequence.append(bench.token_ids[STOP + 8 :])
    first, second = bench.step([(child, 10), (sequence, 8)])
    assert (first == wanted[-1]).all() and (second == wanted[-1]).all()
    bench.cache.close(child)
    bench.cache.close(sequence)
