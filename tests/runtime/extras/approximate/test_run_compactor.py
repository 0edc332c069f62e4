"""What prompts find is rewritten on disk by where they looked: now and then, when nothing else is to be written."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.engine_queue import WorkQueue
from radixlm.runtime.extras.approximate import run_compactor
from radixlm.runtime.extras.approximate.approximate_tier import ApproximateTier
from radixlm.runtime.extras.approximate.attention_scores import ScoredRunner
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration
from radixlm.runtime.extras.approximate.probe_forward import ProbeForward
from radixlm.runtime.extras.approximate.probe_keys import ProbeKeyCache
from radixlm.runtime.extras.approximate.records.ordered_reader import OpenRun
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.row_selection import ranks_to_store, scores_to_store
from radixlm.runtime.model.batch import make_batch
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.store import PageKey, PageStore

from ...fake_model import VOCAB_SIZE
from .fake_scored_model import NUM_HEADS, NUM_LAYERS, WEIGHTS, FakeScoredModel
from .records.runs import identity_of, is_of_pages, kv_of

KV = kv_of("f16", layers=NUM_LAYERS, heads=NUM_HEADS, head_dim=2)
IDENTITY = identity_of(KV)
WAIT_S = 30.0  # only a hang takes that long
DIMS = np.array([[0, 1]] * NUM_LAYERS)
CALIBRATION = Calibration(1, "", NUM_HEADS - 1, 1.0, 1.0, 0, {}, [])
SYSTEM = [3 * i * i % 37 for i in range(6 * PAGE_SIZE)]  # six pages


class Asked:
    """Prompts computed one by one over a store; nothing is decoded."""

    def __init__(self, directory: Path, num_pages: int = 64) -> None:
        self.store = PageStore.open(directory, IDENTITY, max_bytes=4 << 20)
        self.runner = ScoredRunner(FakeScoredModel(num_pages))
        self.cache = PrefixCache(PagePool(num_pages))
        self.queue = WorkQueue(clock=lambda: 0.0)
        probe = ProbeForward(self.cache, self.runner, max_num_tokens=0, group_size=1)
        self.tier = DiskTier(
            self.store,
            self.cache,
            self.runner,
            self.queue,
            clock=lambda: 0.0,
            make_extra=lambda tier: ApproximateTier(
                tier, self.runner.scores, probe, CALIBRATION, ProbeKeyCache(DIMS), clock=lambda: 0.0
            ),
        )

    def ask(self, ids: Sequence[int], namespace: bytes = b"", *, writes: bool = True) -> None:
        """Compute what is not there of a prompt, and write what is to be written, or leave it for the next one."""
        match = self.cache.match(ids, namespace=namespace)
        sequence = self.cache.open(match, context_length=len(ids) + 1)
        with self.cache.begin() as step:
            reservation = step.reserve(sequence, sequence.num_uncomputed)
            self.runner.copy_rows(step.copies)
            self.runner.forward(make_batch([reservation], [True]))
            step.commit()
        self.tier.saver.save(namespace, ids)
        self.used(namespace, ids, num_reused=match.num_tokens)
        self.cache.close(sequence)
        if writes:
            self.settle()

    def used(self, namespace: bytes, ids: Sequence[int], *, num_reused: int) -> None:
        """What the tier does when a prompt is computed, of which nothing else is to be saved."""
        self.tier._note(lambda observer: observer.used(namespace, ids, num_reused=num_reused))

    def settle(self) -> None:
        """Until nothing is left to be done."""
        deadline = time.monotonic() + WAIT_S
        while len(self.queue) or not self.tier.writer.is_idle:
            self.queue.run()
            time.sleep(0.0005)
            assert time.monotonic() < deadline, "writing does not end"

    def heads(self, ids: Sequence[int], namespace: bytes = b"") -> tuple[PageKey, ...]:
        num_pages = len(ids) // PAGE_SIZE
        heads = self.tier.index.run(namespace, tuple(ids), 0, num_pages)
        assert heads is not None
        return heads

    def run(self, heads: Sequence[PageKey]) -> OpenRun:
        run = RowRecords.of(self.store).open_ordered(heads)
        assert run is not None
        return run

    @property
    def num_rewritten(self) -> int:
        return self.tier.stats().extra.num_rewritten_runs

    def close(self) -> None:
        self.tier.shut_down(WAIT_S)


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    asked = Asked(tmp_path / "store")
    yield asked
    asked.close()


def query(number: int) -> list[int]:
    return [number % VOCAB_SIZE, (7 * number + 5) % VOCAB_SIZE, 11]


def test_a_second_prompt_counts_that_came_before_the_first_was_written(asked: Asked) -> None:
    """Two questions at once behind a prefix left it without an order: when the second found it, the disk had not."""
    asked.ask([*SYSTEM, *query(0)], writes=False)
    asked.ask([*SYSTEM, *query(1)])
    assert asked.num_rewritten == 1
    asked.run(asked.heads(SYSTEM))


def test_what_a_second_prompt_finds_is_put_in_the_order_in_which_it_looked(asked: Asked) -> None:
    asked.ask([*SYSTEM, *query(0)])
    assert asked.num_rewritten == 0, "nobody has used it yet"
    asked.ask([*SYSTEM, *query(1)])
    assert asked.num_rewritten == 1
    heads = asked.heads(SYSTEM)
    run = asked.run(heads)
    scores = asked.runner.scores.of(asked.cache.tree.find(b"", SYSTEM).pages)
    wanted = np.argsort(-scores_to_store(scores, is_start=True), axis=-1, kind="stable")
    order = run.order()
    assert order is not None and (order == wanted[..., : ranks_to_store(len(SYSTEM), is_start=True)]).all()
    looked = WEIGHTS[:, :, query(1)][..., SYSTEM].sum(axis=2)
    ranked = np.take_along_axis(looked, wanted[..., 20:32], axis=-1)  # behind those that are always first
    assert (ranked.mean(axis=-1) > looked.mean(axis=-1)).all()
    exact = np.empty((6, KV.page_bytes), np.uint8)
    assert asked.store.read(heads, exact) == 6
    assert is_of_pages(run, exact), "what is read is what was computed"
    run.close()


def test_a_node_is_rewritten_after_ever_more_uses(asked: Asked) -> None:
    asked.ask([*SYSTEM, 1])
    counts = []
    for use in range(1, 10):
        asked.ask([*SYSTEM, use, 2, 3])
        counts.append(asked.num_rewritten)
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4]


def test_runs_end_where_prompts_part_and_short_ones_stay_as_they_are(asked: Asked) -> None:
    branches = [[*SYSTEM, *([branch] * 5 * PAGE_SIZE)] for branch in (7, 8)]
    short = [*SYSTEM, *([9] * 3 * PAGE_SIZE)]
    for last in range(2):
        for prompt in (*branches, short):
            asked.ask([*prompt, last])
    lengths = {}
    for name, prompt in (("left", branches[0]), ("right", branches[1]), ("short", short)):
        heads = asked.heads(prompt)
        system, rest = asked.run(heads), RowRecords.of(asked.store).open_ordered(heads[6:])
        lengths[name] = (system.header.num_pages, None if rest is None else rest.header.num_pages)
        for run in (system, rest):
            if run is not None:
                run.close()
    assert lengths == {"left": (6, 5), "right": (6, 5), "short": (6, None)}


def test_pages_are_written_before_any_run(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.ask([*SYSTEM, 1])
    put, may_put = asked.store.put, threading.Event()
    order: list[str] = []

    def slow_put(heads, payload):  # type: ignore[no-untyped-def]
        assert may_put.wait(WAIT_S)
        order.append("pages")
        return put(heads, payload)

    monkeypatch.setattr(asked.store, "put", slow_put)
    put_ordered = RowRecords.of(asked.store).put_ordered
    monkeypatch.setattr(
        RowRecords.of(asked.store),
        "put_ordered",
        lambda *args, **options: order.append("run") or put_ordered(*args, **options),
    )
    asked.tier.saver.save(b"", _computed(asked, [*SYSTEM, *range(2 * PAGE_SIZE)]))
    asked.queue.run()
    asked.used(b"", [*SYSTEM, 2], num_reused=len(SYSTEM))
    for _ in range(5):
        asked.queue.run()
    assert asked.tier.writer.queued_bytes and not order and not len(asked.queue)
    may_put.set()
    asked.settle()
    assert order == ["pages", "run"]


def _computed(asked: Asked, ids: list[int]) -> list[int]:
    """Compute a prompt and leave it in the tree."""
    match = asked.cache.match([*ids, 0])
    sequence = asked.cache.open(match, context_length=len(ids) + 2)
    with asked.cache.begin() as step:
        reservation = step.reserve(sequence, sequence.num_uncomputed)
        asked.runner.copy_rows(step.copies)
        asked.runner.forward(make_batch([reservation], [True]))
        step.commit()
    asked.cache.close(sequence)
    return ids


def test_too_many_that_wait_are_counted_and_asked_for_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_compactor, "MAX_WAITING", 1)
    prompts = [[*([number] * 5 * PAGE_SIZE), 1] for number in range(3)]
    for prompt in prompts:
        asked.ask(prompt)
    for prompt in prompts:
        asked.used(b"", prompt, num_reused=5 * PAGE_SIZE)
    assert asked.tier.stats().extra.num_dropped_rewrites == 2
    asked.settle()
    assert asked.num_rewritten == 1
    for prompt in prompts[1:]:
        asked.used(b"", prompt, num_reused=5 * PAGE_SIZE)
        asked.settle()
    assert asked.num_rewritten == 3


def test_what_made_room_or_is_not_on_disk_is_left_alone(asked: Asked) -> None:
    asked.ask([*SYSTEM, 1])
    asked.used(b"", [*SYSTEM, 1], num_reused=len(SYSTEM))
    asked.cache.tree.eviction.evict(asked.cache.pool.num_cached)
    asked.settle()
    assert asked.num_rewritten == 0
    asked.ask([*SYSTEM, 1])
    asked.used(b"", [*SYSTEM, 2], num_reused=len(SYSTEM))
    asked.tier._forget([asked.heads(SYSTEM)[3].key])
    asked.settle()
    assert asked.num_rewritten == 0
    asked.ask([*SYSTEM, 3])  # the pages are saved again
    asked.ask([*SYSTEM, 4])
    assert asked.num_rewritten == 1


def test_a_namespace_that_is_discarded_takes_its_runs_along(asked: Asked) -> None:
    for namespace in (b"ours", b"theirs"):
        asked.ask([*SYSTEM, 1], namespace)
        asked.ask([*SYSTEM, 2], namespace)
    for namespace in (b"ours", b"theirs"):
        asked.used(namespace, [*SYSTEM, 3], num_reused=len(SYSTEM))
    ours, theirs = asked.heads(SYSTEM, b"ours"), asked.heads(SYSTEM, b"theirs")
    asked.cache.clear(b"ours")
    (done,) = asked.tier.forget(b"ours").pending
    asked.settle()
    assert done.done() and asked.num_rewritten == 3
    assert RowRecords.of(asked.store).open_ordered(ours) is None
    asked.run(theirs).close()


def test_a_long_node_is_several_runs(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_compactor, "RUN_BYTES", 5 * KV.page_bytes)
    long = [*SYSTEM, *SYSTEM]  # twelve pages
    asked.ask([*long, 1])
    asked.ask([*long, 2])
    assert asked.num_rewritten == 3
    heads = asked.heads(long)
    for first, num_pages in ((0, 5), (5, 5), (10, 2)):
        run = asked.run(heads[first:])
        assert run.header.num_pages == num_pages
        run.close()


def test_a_chat_that_grows_is_not_written_whole_with_every_turn(asked: Asked) -> None:
    turns = [*SYSTEM, 1]
    for turn in range(8):
        asked.ask(turns)
        turns = [*turns, *([turn] * 2 * PAGE_SIZE)]
    assert asked.num_rewritten == 3, "after the first use of a turn's prompt, the second and the fourth"
