"""A process that was restarted learns on from where it ended: as if it had never ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate import score_keeper
from radixlm.runtime.extras.approximate.attention_scores import DECAY, AttentionScores
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.prefix.transfer import PageInserter

from .fake_scored_model import FakeScoredModel
from .test_run_compactor import SYSTEM, WAIT_S, Asked, query

NUM_PAGES = len(SYSTEM) // PAGE_SIZE


class Process(Asked):
    """One that finds prompts on disk, too, as they were computed."""

    def ask(self, ids: Sequence[int], namespace: bytes = b"") -> None:
        stored = len(self.tier.index.keys(namespace, ids))
        prefix = self.tier.index.prefix(namespace, tuple(ids), stored)
        pages = np.empty((stored, self.store.identity.page_bytes), np.uint8)
        assert self.store.read(prefix.page_keys, pages) == stored
        PageInserter(self.cache, self.runner).insert(prefix, 0, pages)
        model = self.runner._runner
        assert isinstance(model, FakeScoredModel)
        found = self.cache.tree.find(namespace, ids).pages
        for page, start in zip(found, range(0, stored * PAGE_SIZE, PAGE_SIZE), strict=False):
            model.tokens.reshape(-1, PAGE_SIZE)[page] = ids[start : start + PAGE_SIZE]
        super().ask(ids, namespace)

    def settle(self) -> None:
        """Until the disk has answered, too."""
        super().settle()
        deadline = time.monotonic() + WAIT_S
        while (self.runner.scores.lookups > 0).any():
            assert time.monotonic() < deadline, "the disk does not answer"
            super().settle()
        super().settle()

    def order(self) -> np.ndarray:
        """In which the system prompt lies on disk."""
        run = self.run(self.heads(SYSTEM))
        order = run.order()
        run.close()
        assert order is not None
        return order

    def learned(self) -> np.ndarray:
        """The scores of the system prompt in memory."""
        return self.runner.scores.of(self.cache.tree.find(b"", SYSTEM).pages)


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def begun(processes: ExitStack, directory: Path) -> Process:
    process = Process(directory)
    processes.callback(process.close)
    return process


@pytest.mark.parametrize("num_before", [1, 3, 9])
def test_a_process_that_was_restarted_orders_as_one_that_was_not(
    tmp_path: Path, processes: ExitStack, num_before: int
) -> None:
    one, other = (begun(processes, tmp_path / name) for name in ("one", "other"))
    for number in range(num_before):
        one.ask([*SYSTEM, *query(number)])
        other.ask([*SYSTEM, *query(number)])
    other.close()
    other = begun(processes, tmp_path / "other")
    num_rewritten = one.num_rewritten
    for number in range(num_before, num_before + 9):
        one.ask([*SYSTEM, *query(number)])
        other.ask([*SYSTEM, *query(number)])
        np.testing.assert_allclose(other.learned(), one.learned(), rtol=1e-5)
        assert other.num_rewritten == one.num_rewritten - num_rewritten, "a run is rewritten after as many uses"
        if number:
            np.testing.assert_array_equal(other.order(), one.order())


def test_the_prompt_that_computed_a_row_is_not_forgotten_before_anybody_asks_again(
    tmp_path: Path, processes: ExitStack
) -> None:
    process = begun(processes, tmp_path)
    process.ask([*SYSTEM, 1])
    first = process.learned()
    assert first.max() > 0
    process.close()
    process = begun(processes, tmp_path)
    process.ask([*SYSTEM, 2])
    again = process.runner.scores.learned(process.cache.tree.find(b"", SYSTEM).pages)
    np.testing.assert_array_equal(again.first.reshape(first.shape), first)


def test_pages_that_left_memory_are_known_when_they_come_back(tmp_path: Path, processes: ExitStack) -> None:
    process = begun(processes, tmp_path)
    for number in range(6):
        process.ask([*SYSTEM, *query(number)])
    before, num_rewritten = process.learned(), process.num_rewritten
    process.cache.tree.eviction.evict(process.cache.pool.num_cached)
    process.settle()
    assert process.cache.tree.find(b"", SYSTEM).pages == []
    process.ask([*SYSTEM, *query(6)])
    pages = process.cache.tree.find(b"", SYSTEM).pages
    learned = process.runner.scores.learned(pages)
    np.testing.assert_allclose(learned.weight, sum(DECAY**age for age in range(6)), rtol=1e-5)
    assert np.corrcoef(before.ravel(), process.learned().ravel())[0, 1] > 0.9
    assert process.num_rewritten == num_rewritten, "the sixth use: the count went on, too"


def test_scores_that_broke_are_a_miss_and_learning_begins_anew(tmp_path: Path, processes: ExitStack) -> None:
    process = begun(processes, tmp_path)
    for number in range(3):
        process.ask([*SYSTEM, *query(number)])
    process.close()
    for path in tmp_path.glob("segment-*.run"):
        content = bytearray(path.read_bytes())
        content[-4000] ^= 1
        path.write_bytes(content)
    process = begun(processes, tmp_path)
    process.ask([*SYSTEM, *query(3)])
    assert process.store.stats().misses.get("payload")
    weight = process.runner.scores.learned(process.cache.tree.find(b"", SYSTEM).pages).weight
    np.testing.assert_array_equal(weight, 1)
    process.ask([*SYSTEM, *query(4)])
    assert process.num_rewritten == 2, "after the first use and the second, as in a new store"


def test_what_is_discarded_leaves_no_scores(tmp_path: Path, processes: ExitStack) -> None:
    process = begun(processes, tmp_path)
    for namespace in (b"ours", b"theirs"):
        for number in range(2):
            process.ask([*SYSTEM, *query(number)], namespace)
    ours, theirs = process.heads(SYSTEM, b"ours"), process.heads(SYSTEM, b"theirs")
    assert RowRecords.of(process.store).scores.read(ours) and RowRecords.of(process.store).scores.read(theirs)
    process.cache.clear(b"ours")
    process.tier.forget(b"ours")
    process.settle()
    assert not RowRecords.of(process.store).scores.read(ours) and RowRecords.of(process.store).scores.read(theirs)


def test_a_growing_chat_keeps_one_record_of_scores(tmp_path: Path, processes: ExitStack) -> None:
    process = begun(processes, tmp_path)
    turns = [*SYSTEM, 1]
    for turn in range(6):
        process.ask(turns)
        turns = [*turns, *([turn] * 2 * PAGE_SIZE)]
    process.close()
    process = begun(processes, tmp_path)
    stop = len(turns) // PAGE_SIZE - 2
    assert len(RowRecords.of(process.store).scores.read(process.heads(turns[: stop * PAGE_SIZE]))) <= 2


def test_scores_wait_for_the_writer_up_to_a_bound(
    tmp_path: Path, processes: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_keeper, "MAX_QUEUED_BYTES", 0)
    process = begun(processes, tmp_path)
    for first in (5, 6, 7):
        process.ask([*([first] * 5 * PAGE_SIZE), 1])
    process.runner.scores.is_changed[:] = True
    process.tier.extra.observer.close()  # type: ignore[union-attr]
    assert process.tier.extra.observer.keeper.num_dropped >= 1  # type: ignore[union-attr]


def test_what_is_added_later_is_as_if_it_had_been_there_before() -> None:
    rng = np.random.default_rng(0)

    def pool() -> tuple[AttentionScores, np.ndarray]:
        sums = np.zeros((2, 2, 8, PAGE_SIZE), np.float32)
        return AttentionScores(sums, np.zeros((8, PAGE_SIZE), np.int32)), sums

    def use(scores: AttentionScores, sums: np.ndarray, pages: list[int], looks: np.ndarray, num_reused: int) -> None:
        sums[:, :, pages] = looks
        scores._num_queries[pages] = 3
        scores.fold(pages, num_reused=num_reused)

    looks = rng.random((9, 2, 2, 2, PAGE_SIZE), np.float32)
    whole, whole_sums = pool()
    before, before_sums = pool()
    after, after_sums = pool()
    use(whole, whole_sums, [0, 1], looks[0], 0)
    use(before, before_sums, [0, 1], looks[0], 0)
    for number in range(1, 9):
        use(whole, whole_sums, [0, 1], looks[number], 2 * PAGE_SIZE)
        some, sums, pages = (before, before_sums, [0, 1]) if number < 5 else (after, after_sums, [4, 2])
        use(some, sums, pages, looks[number], 2 * PAGE_SIZE)
    after.add_learned([4, 2], before.learned([0, 1]))
    np.testing.assert_allclose(after.of([4, 2]), whole.of([0, 1]), rtol=1e-5)
