"""What is served in part teaches, as one history with what was known; and what is asked for often becomes whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.extras.approximate import promoter
from radixlm.runtime.extras.approximate.attention_scores import DECAY
from radixlm.runtime.extras.approximate.promoter import PROMOTE_AT
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.records.scores_record import FoundScores, RowScores
from radixlm.runtime.extras.approximate.score_keeper import ScoreKeeper
from radixlm.runtime.extras.approximate.score_updater import (
    MAX_PROBED,
    ScoreUpdater,
    ServedPart,
    _updated_scores,
    _Uses,
)
from radixlm.runtime.prefix.disk_index import StoredPrefix

from ...store.pages import chain
from .eager_parts import choose_always

WAIT_S = 30.0  # only a hang takes that long
PREFIX = [5 + i * i % 200 for i in range(192)]  # twelve pages
PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
LAYERS, HEADS = 2, 3

Open = Callable[..., Engine]


def look_of(num_pages: int, num_rows: int, rng: np.random.Generator, runs: tuple[int, ...] | None = None) -> ServedPart:
    num_tokens = num_pages * PAGE_SIZE
    order = rng.permuted(np.broadcast_to(np.arange(num_tokens), (LAYERS, HEADS, num_tokens)), axis=-1)
    probed = rng.random((LAYERS, num_tokens), np.float32) ** 4
    prefix = StoredPrefix(b"", (), b"", tuple(chain(num_pages)))
    chosen = np.sort(order[..., :num_rows], axis=-1)
    return ServedPart(prefix, 0, runs or (num_pages,), chosen, probed / probed.sum(axis=-1, keepdims=True))


@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 48))
def test_a_use_is_the_attention_to_what_was_there_and_a_bounded_guess_of_the_rest(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    look = look_of(3, num_rows, rng)
    attention = rng.random((LAYERS, HEADS, num_rows), np.float32)
    use = look.use(attention)
    np.testing.assert_allclose(use.sum(axis=-1), attention.sum(axis=-1), rtol=1e-4)
    for layer, head in np.ndindex(LAYERS, HEADS):
        chosen = look.chosen[layer, head]
        others = np.setdiff1d(np.arange(48), chosen)
        guessed = use[layer, head, others].sum() / use[layer, head].sum()
        wanted = min(MAX_PROBED, look.probed[layer, others].sum())
        assert guessed == pytest.approx(wanted, abs=1e-5)
        np.testing.assert_allclose(use[layer, head, chosen], attention[layer, head] * (1 - wanted), rtol=1e-4)
        rest = look.probed[layer, others]
        if others.size:
            np.testing.assert_allclose(
                use[layer, head, others] * rest.sum(), rest * use[layer, head, others].sum(), 1e-3
            )


class FakeStore:
    """Has some scores."""

    def __init__(self, known: list[FoundScores]) -> None:
        self.known = known
        self.scores = self

    def read(self, heads: object) -> list[FoundScores]:
        return self.known


def test_uses_that_waited_are_one_history_with_what_was_known() -> None:
    rng = np.random.default_rng(0)
    look = look_of(15, 40, rng, runs=(5, 10))
    tokens = 15 * PAGE_SIZE
    uses = [rng.random((LAYERS, HEADS, tokens), np.float32) for _ in range(4)]

    def scores(num_pages: int, num_uses: int) -> RowScores:
        shape = LAYERS, HEADS, num_pages * PAGE_SIZE
        numbers = rng.random(shape, np.float32), rng.random(shape, np.float32), rng.random(shape[2], np.float32) * 5
        return RowScores(*numbers, num_uses, next_at=8)

    older, newer = scores(5, 3), scores(4, 7)
    waited = _Uses(look, uses[0])
    for use in uses[1:]:
        waited.add(look, use)
    store: Any = FakeStore([FoundScores(3, older), FoundScores(6, newer)])
    parts = list(_updated_scores(store, waited))
    assert [(start, stop) for start, stop, _ in parts] == [(3, 6), (6, 10), (10, 15)], "three pages are too few"
    history = np.zeros((LAYERS, HEADS, tokens), np.float32)
    first, weight = history.copy(), np.zeros(tokens, np.float32)
    for start, known in ((3, older), (6, newer)):
        rows = slice(start * PAGE_SIZE, start * PAGE_SIZE + known.num_tokens)
        history[..., rows], first[..., rows], weight[rows] = known.history, known.first, known.weight
    for use in uses:  # one after the other
        history, weight = DECAY * history + use, DECAY * weight + 1
    for start, stop, part in parts:
        rows = slice(start * PAGE_SIZE, stop * PAGE_SIZE)
        np.testing.assert_allclose(part.history, history[..., rows], rtol=1e-4)
        np.testing.assert_allclose(part.weight, weight[rows], rtol=1e-4)
        np.testing.assert_array_equal(part.first, first[..., rows])
    assert [(part.num_uses, part.next_at) for _, _, part in parts] == [(7, 8), (11, 8), (4, 1)]


def asked(number: int) -> list[int]:
    return [*PREFIX, *(7 + (number * 31 + i * 11) % 150 for i in range(9))]


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine over one store, and closes the one before it."""
    choose_always(monkeypatch)
    opened: list[Engine] = []

    def open_again(**options: Any) -> Engine:
        if opened:
            opened[-1].close()
        settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "store": tmp_path / "store", **options}
        settings = {"kv_budget": 0.5, "store_bytes": 64 << 20, "num_threads": 1, "idle_work": False} | settings
        opened.append(Engine(tiny_artifact, **settings))
        return opened[-1]

    yield open_again
    opened[-1].close()


def wait(engine: Engine, is_done: Callable[[Any], bool]) -> None:
    """Until the tier is; the question is asked between two steps."""
    deadline = time.monotonic() + WAIT_S
    while not engine._loop.call(lambda core: is_done(core.tier)):
        assert time.monotonic() < deadline, "it is never done"
        time.sleep(0.01)


def settle(engine: Engine) -> None:
    wait(engine, lambda tier: tier.writer.is_idle and not tier.saver.has_pending and not tier.extra.observer.is_ready)


def learn(engine: Engine) -> None:
    """Have the prefix computed, found, and stored in order."""
    for number in range(3):
        engine.generate(asked(number), PARAMS, kv_budget=1.0)
        settle(engine)
    assert tier_of(engine).extra.observer.num_rewritten


def tier_of(engine: Engine) -> Any:
    return engine._core.tier


def stored(engine: Engine) -> tuple[np.ndarray, RowScores]:
    """The order and the scores of the prefix on disk."""
    tier = tier_of(engine)
    [namespace] = {head.namespace for head in tier.store.page_keys()}
    heads = tier.index.run(namespace, tuple(PREFIX), 0, len(PREFIX) // PAGE_SIZE)
    run, known = RowRecords.of(tier.store).open_ordered(heads), RowRecords.of(tier.store).scores.read(heads)
    order = run.order()
    run.close()
    return order, known[-1].scores


def test_an_order_under_a_budget_goes_on_improving_and_a_restart_keeps_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "PROMOTE_AT", 1000)
    engine = open_engine()
    learn(engine)
    order, before = stored(engine)
    for opened in range(2):
        engine = open_engine()
        for number in range(8):
            assert engine.generate(asked(9), PARAMS).usage.pruning is not None
            settle(engine)
            after = stored(engine)[1]
            assert after.num_uses == before.num_uses + 8 * opened + number + 1, "each is counted"
        assert tier_of(engine).extra.observer.num_rewritten >= 1
        np.testing.assert_array_equal(after.first, before.first)
    assert after.weight.max() == pytest.approx(1 / (1 - DECAY), rel=0.1)
    assert (stored(engine)[0] != order).any(), "where the ninth looks"


def test_rows_are_taught_what_fell_on_them(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())
    taught: list[tuple[ServedPart, np.ndarray]] = []
    use = ServedPart.use

    def note(look: ServedPart, attention: np.ndarray) -> np.ndarray:
        taught.append((look, attention))
        return use(look, attention)

    monkeypatch.setattr(ServedPart, "use", note)
    monkeypatch.setattr(ScoreKeeper, "look_up", lambda *_: None)
    assert open_engine().generate(asked(9), PARAMS).usage.pruning is not None
    engine = open_engine()
    assert engine.generate(asked(9), PARAMS, kv_budget=1.0).usage.pruning is None
    pages = tier_of(engine).cache.tree.find(*path_of(engine)).pages[: len(PREFIX) // PAGE_SIZE]
    seen = tier_of(engine).extra.observer.scores._history[:, :, pages].reshape(3, -1, len(PREFIX))
    [(look, attention)] = taught
    assert attention.shape == look.chosen.shape and look.chosen.shape[-1] == len(PREFIX) // 2
    for head in range(seen.shape[1]):  # the first layer's queries are those of all rows
        whole = seen[0, head, look.chosen[0, head]]
        assert np.corrcoef(attention[0, head], whole)[0, 1] > 0.98
        assert attention[0, head].sum() > whole.sum(), "what would fall on the others falls on these"


def path_of(engine: Engine) -> tuple[bytes, list[int]]:
    [namespace] = {head.namespace for head in tier_of(engine).store.page_keys()}
    return namespace, PREFIX


def test_a_prefix_that_is_asked_for_often_becomes_exact(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    for number in range(PROMOTE_AT):
        usage = engine.generate(asked(number), PARAMS).usage
        assert usage.pruning is not None
    wait(engine, lambda tier: tier.stats().extra.num_promoted == 1)
    usage = engine.generate(asked(9), PARAMS).usage
    assert usage.pruning is None and usage.cached_tokens == len(PREFIX) and not usage.disk_tokens_by_kind
    engine.check()


def test_without_room_for_it_nothing_is_promoted(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())
    monkeypatch.setattr(promoter, "FREE_SHARE", 0.999)
    engine = open_engine()
    for number in range(2 * PROMOTE_AT):
        assert engine.generate(asked(number), PARAMS).usage.pruning is not None
        settle(engine)
    assert tier_of(engine).stats().extra.num_promoted == 0


def fill(engine: Engine) -> None:
    """Have the pool full of what others asked for: no quarter is free."""
    pool, number = tier_of(engine).cache.pool, 0
    while pool.num_free > pool.num_pages / 8:
        engine.generate([5 + (number * 13 + i * 7) % 211 for i in range(400)], PARAMS, kv_budget=1.0)
        settle(engine)
        number += 1


@pytest.mark.parametrize("is_older", [True, False])
def test_a_prefix_takes_the_place_of_what_was_not_used_since_it_was_asked_for(
    open_engine: Open, is_older: bool
) -> None:
    learn(open_engine())
    engine = open_engine()
    if is_older:
        fill(engine)
    for number in range(PROMOTE_AT):
        engine.generate(asked(number), PARAMS)
        settle(engine)
        if number == 0:
            fill(engine)  # unless it is
    wait(engine, lambda tier: not tier.extra.sources.promoter._wanted)
    assert tier_of(engine).stats().extra.num_promoted == is_older
    assert (engine.generate(asked(9), PARAMS).usage.pruning is None) == is_older
    engine.check()


def test_nothing_of_a_namespace_is_taught_or_promoted_after_it_was_forgotten(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()

    def forget(core: Any) -> None:
        order, sources = core.tier.extra.observer, core.tier.extra.sources
        order.forget(b"")
        sources.forget(b"")
        assert not order.updater.has_waiting and not sources.promoter._wanted and not order.updater._served

    for number in range(PROMOTE_AT):
        engine.generate(asked(number), PARAMS)
    engine._loop.call(forget)
    time.sleep(0.1)
    assert tier_of(engine).stats().extra.num_promoted == 0 or engine.generate(asked(9), PARAMS).usage.pruning is None


def test_a_request_that_ended_is_never_taken_for_another() -> None:
    """Its place in memory, by which its rows are known, may be another's."""
    none: Any = None
    updater = ScoreUpdater(none, none, none, none, 4, 0, none)
    look = look_of(3, 8, np.random.default_rng(0))
    for is_forgotten in (False, True):
        span = SparseSpan(0, 8, tuple(range(48)))
        if is_forgotten:
            updater.forget(b"another")
        updater.note(span, look)
        updater.forget(b"another")
        assert len(updater._served) == 1
        del span
        assert not updater._served
