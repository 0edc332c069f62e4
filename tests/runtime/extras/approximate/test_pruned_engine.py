"""On a real compiled model: a part of a prefix is labelled and its request's own; whatever fails is served exactly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.prefix_match import PrefixMatch
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.extras.approximate import chosen_loader
from radixlm.runtime.extras.approximate.approximate_tier import ApproximateTier
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration
from radixlm.runtime.extras.approximate.probe_forward import ProbeForward
from radixlm.runtime.extras.approximate.promoter import Promoter
from radixlm.runtime.extras.approximate.pruned_prefix import PrunedPrefix
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.row_rates import RowRates
from radixlm.runtime.extras.approximate.score_updater import ScoreUpdater
from radixlm.runtime.model.batch import Float32Array
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.loaded_prefix import FindPrefix, LoadedPrefix, LoadedRows, PrefixLookup
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.prefix.tier_hooks import TierStats

from .eager_parts import choose_always

WAIT_S = 30.0  # only a hang takes that long
PREFIX = [5 + i * i % 200 for i in range(192)]  # twelve pages
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=3, ignore_eos=True)

Open = Callable[..., Engine]


def asked(number: int) -> list[int]:
    return [*PREFIX, *(7 + (number * 31 + i * 11) % 150 for i in range(9))]


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine over one store, and closes the one before it. Loads are always worth it, and parts more so. Parts
    teach nothing and are never promoted, so that the same part comes again: `test_score_updater.py` has the rest.
    """
    choose_always(monkeypatch)
    monkeypatch.setattr(ScoreUpdater, "used", lambda *_: None)
    monkeypatch.setattr(Promoter, "used", lambda *_: None)
    opened: list[Engine] = []

    def open_again(**options: object) -> Engine:
        if opened:
            opened[-1].close()
        settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "store": tmp_path / "store", **options}
        settings = {"kv_budget": 0.5, **settings}
        opened.append(Engine(tiny_artifact, store_bytes=64 << 20, num_threads=1, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield open_again
    opened[-1].close()


def tier_of(engine: Engine) -> TierStats:
    tier = engine.stats().tier
    assert tier is not None
    return tier


def learn(engine: Engine) -> None:
    """Ask until the prefix is stored in the order of importance, too."""
    deadline, number = time.monotonic() + WAIT_S, 0
    while tier_of(engine).extra.num_rewritten_runs == 0:
        assert time.monotonic() < deadline, "nothing is rewritten"
        engine.generate(asked(number % 3), replace(PARAMS, max_tokens=1), kv_budget=1.0)
        number += 1


def bits(completion: Completion) -> tuple[object, object]:
    return completion.token_ids, completion.logprobs


def exact(engine: Engine, ids: list[int]) -> Completion:
    """Computed from nothing, and no other request finds it."""
    reply = engine.generate(ids, PARAMS, namespace=b"nobody's", kv_budget=1.0)
    engine.clear_cache(b"nobody's")
    assert reply.usage.cached_tokens == 0
    return reply


def test_a_part_is_labelled_and_what_it_led_to_is_never_found_again(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    part = engine.generate(asked(7), PARAMS)
    pruning = part.usage.pruning
    assert pruning is not None and pruning.loaded == 0.5 and 0 < pruning.dropped_mass < 0.5
    assert part.usage.cached_tokens == 192 and part.usage.disk_tokens_by_kind == {"exact": 192}
    assert bits(part) != bits(exact(engine, asked(7))), "half of the prefix is not the prefix"
    assert engine.stats().num_computed_tokens == (9 + 19) + (192 + 9 + 19), "looks are nobody's tokens"
    whole = engine.generate([*asked(7), *part.token_ids, 3], PARAMS, kv_budget=1.0)
    assert whole.usage.pruning is None and whole.usage.cached_tokens == 192, "nothing behind the prefix is kept"
    assert bits(whole) == bits(exact(engine, [*asked(7), *part.token_ids, 3]))
    engine = open_engine()
    assert bits(engine.generate(asked(7), PARAMS, kv_budget=1.0)) == bits(exact(engine, asked(7)))
    assert (tier_of(engine).extra.chosen.num_loaded, tier_of(engine).extra.chosen.num_broken) == (0, 0)


def test_what_is_wanted_again_is_read_from_memory(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    replies, read = [], []
    for _ in range(2):
        replies.append(engine.generate(asked(7), PARAMS))
        read.append(tier_of(engine).num_read_bytes)
    assert bits(replies[0]) == bits(replies[1]) and tier_of(engine).extra.chosen.num_loaded == 2
    assert 0 < read[1] - read[0] < read[0] / 4, "headers only"


def test_the_same_part_gives_the_same_reply_in_company_too(open_engine: Open) -> None:
    learn(open_engine())
    alone = [open_engine().generate(asked(number), PARAMS) for number in range(5, 8)]
    engine = open_engine()
    streams = [engine.stream(asked(number), PARAMS) for number in range(5, 8)]
    together = [stream.result() for stream in streams]
    assert [bits(reply) for reply in together] == [bits(reply) for reply in alone]
    assert tier_of(engine).extra.chosen.num_loaded == 3 and all(reply.usage.pruning for reply in together)


def test_where_memory_has_a_part_of_a_run_the_run_is_read_from_its_start(open_engine: Open) -> None:
    learn(open_engine())
    alone = open_engine().generate(asked(7), PARAMS)
    engine = open_engine()
    engine.generate(PREFIX[:100], replace(PARAMS, max_tokens=1), kv_budget=1.0)
    reply = engine.generate(asked(7), PARAMS)
    assert reply.usage.pruning == alone.usage.pruning and bits(reply) == bits(alone)


def test_what_memory_has_is_not_pruned(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    engine.generate(asked(6), PARAMS, kv_budget=1.0)
    reply = engine.generate(asked(7), PARAMS)
    assert reply.usage.pruning is None and reply.usage.disk_tokens_by_kind == {}
    assert bits(reply) == bits(exact(engine, asked(7)))


def spoil(directory: Path) -> None:
    paths = list(directory.glob("segment-*.run"))
    assert paths, "a run, and scores"
    for path in paths:
        content = bytearray(path.read_bytes())
        for at in range(len(content) // 3, len(content), 4096):
            content[at] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("fault", ["no order", "spoiled", "disagrees", "late"])
def test_whatever_fails_is_served_exactly(
    open_engine: Open, tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no order":
        open_engine(kv_budget=None).generate(asked(0), PARAMS)
    else:
        learn(open_engine())
    if fault == "spoiled":
        open_engine().close()
        spoil(tmp_path / "store")
    if fault == "disagrees":
        strict = Calibration.of(Artifact.open(tiny_artifact).manifest, probe_head=0, max_dropped_attention=1e-6)
        monkeypatch.setattr(Calibration, "read", lambda *_: strict)
    if fault == "late":
        monkeypatch.setattr(Rates, "compute_s", lambda *args: -1.0)
    engine = open_engine()
    reply = engine.generate(asked(7), PARAMS)
    assert reply.usage.pruning is None and bits(reply) == bits(exact(engine, asked(7)))
    assert reply.usage.disk_tokens_by_kind == {"exact": 192}, "the exact pages did"
    tier = tier_of(engine)
    counted = {"disagrees": tier.extra.chosen.num_disagreed, "late": tier.extra.chosen.num_late}.get(
        fault, tier.extra.chosen.num_broken
    )
    assert (tier.extra.chosen.num_loaded, counted) == (0, 1)


@pytest.mark.parametrize(("least", "loaded"), [(0.25, 0.5), (0.75, 0.75), (1.0, None)])
def test_no_request_gets_less_than_the_calibration_found_enough(
    open_engine: Open, tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, least: float, loaded: float | None
) -> None:
    learn(open_engine())
    manifest = Artifact.open(tiny_artifact).manifest
    found = Calibration.of(manifest, probe_head=0, max_dropped_attention=1.0, least_budget=least)
    monkeypatch.setattr(Calibration, "read", lambda *_: found)
    engine = open_engine()
    pruning = engine.generate(asked(7), PARAMS, kv_budget=0.5).usage.pruning
    assert (None if pruning is None else pruning.loaded) == loaded
    assert tier_of(engine).num_read_bytes > 0 and tier_of(engine).extra.chosen.num_disagreed == 0


def test_who_leaves_while_a_part_is_read_leaves_nothing_behind(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    for number in range(6):
        with engine.stream(asked(number), PARAMS):
            time.sleep(0.001 * number)
    assert engine.generate(asked(7), PARAMS).usage.pruning is not None
    deadline = time.monotonic() + WAIT_S
    while engine.stats().num_running or engine.stats().num_waiting:
        assert time.monotonic() < deadline, "somebody is still there"
    assert tier_of(engine).num_waiting == 0
    engine._loop.call(lambda core: core.check())


def test_a_share_is_above_nothing_and_only_where_the_engine_allows_it(open_engine: Open) -> None:
    engine = open_engine()
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(InvalidParameter, match="above 0 and at most 1"):
            engine.generate(PREFIX, PARAMS, kv_budget=share)
    with pytest.raises(InvalidParameter, match="above 0 and at most 1"):
        open_engine(kv_budget=0.0)
    engine = open_engine(kv_budget=None)
    with pytest.raises(InvalidParameter, match="--kv-budget"):
        engine.generate(PREFIX, PARAMS, kv_budget=0.5)
    assert engine.generate(PREFIX, PARAMS, kv_budget=1.0).usage.pruning is None


def find(cache: PrefixCache) -> PrefixMatch:
    return cache.match(asked(7))


@dataclass
class Asking:
    """Requests that a share of the rows is enough for, and the rows with which they went on: in the engine's thread."""

    tier: DiskTier
    gone: dict[str, LoadedRows | None] = field(default_factory=dict)

    def ask(self, name: str, *, share: float = 0.5, find: FindPrefix = find) -> None:
        """Wait for rows, or for all of the prefix if they are refused."""

        def go_on(loaded: LoadedPrefix | None, rows: LoadedRows | None) -> None:
            self.gone[name] = rows

        assert self.tier.begin(PrefixLookup(name, find, go_on, lambda _: None, options=RequestOptions(kv_budget=share)))

    @property
    def num_refused(self) -> int:
        return self.tier.stats().extra.chosen.num_refused

    def run(self) -> None:
        """What is between two steps."""
        queue: Any = self.tier.queue
        queue.run()

    def run_until(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            self.run()
            assert time.monotonic() < deadline, "it is never done"
            time.sleep(0.001)


def in_its_thread(engine: Engine, do: Callable[[Asking], None]) -> None:
    def call(core: EngineCore) -> None:
        assert core.tier is not None
        do(Asking(core.tier))

    engine._loop.call(call)


class Held:
    """A method that waits until `release`; `begun` says that it waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.begun, self._may_go_on = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def held(*args: Any, **options: Any) -> Any:
            self.begun.set()
            assert self._may_go_on.wait(WAIT_S)
            return method(*args, **options)

        monkeypatch.setattr(owner, name, held)

    def release(self) -> None:
        self._may_go_on.set()


def test_rows_count_until_they_are_in_the_pool(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())

    def ask(asking: Asking) -> None:
        asking.ask("first")
        asking.run_until(lambda: "first" in asking.gone)
        first = asking.gone["first"]
        assert first is not None
        monkeypatch.setattr(chosen_loader, "MAX_STAGED_BYTES", first.pages.nbytes + 1)
        asking.ask("second")
        assert asking.num_refused == 1, "there is no room beside the first"
        asking.tier.abandon("second")
        del first
        asking.gone.clear()
        asking.ask("third")
        assert asking.num_refused == 1
        asking.tier.abandon("third")

    in_its_thread(open_engine(), ask)


def test_many_requests_at_once_have_few_files_open(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())

    def ask(asking: Asking) -> None:
        tier, names = asking.tier, [str(number) for number in range(chosen_loader.MAX_SOURCES + 3)]
        opening = Held(monkeypatch, RowRecords.of(tier.store), "open_ordered")
        for name in names:
            asking.ask(name, share=0.1)
        assert asking.num_refused == 3 and opening.begun.wait(WAIT_S)
        tier.abandon("1")
        asking.ask("1", share=0.1)
        assert asking.num_refused == 3, "its files were not opened"
        tier.abandon("0")
        asking.ask("0", share=0.1)
        assert asking.num_refused == 4, "the reader has its files in use"
        opening.release()
        for name in names:
            tier.abandon(name)
        asking.run_until(lambda: tier.extra.offers is not None and not tier.extra.offers._closing)
        asking.ask("another", share=0.1)
        assert asking.num_refused == 4
        tier.abandon("another")

    in_its_thread(open_engine(), ask)


def test_files_of_a_request_that_ended_are_closed_though_no_other_comes(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()

    def leave(asking: Asking) -> None:
        asking.ask("gone")
        asking.tier.abandon("gone")

    in_its_thread(engine, leave)
    deadline, tier = time.monotonic() + WAIT_S, engine._core.tier
    assert tier is not None and tier.extra.offers is not None
    while tier.extra.offers._closing:
        assert time.monotonic() < deadline, "a file stays open until the next request"
        time.sleep(0.001)


@pytest.mark.parametrize("namespace", [b"", None])
def test_a_cache_is_cleared_while_one_waits_and_what_another_left_is_being_read(
    open_engine: Open, namespace: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that left was sent back once more; `DELETE /v1/cache` failed, and the thread died of the next step."""
    learn(open_engine())

    def clear(asking: Asking) -> None:
        opening = Held(monkeypatch, RowRecords.of(asking.tier.store), "open_ordered")
        asking.ask("left")
        asking.ask("waits")
        assert opening.begun.wait(WAIT_S)
        asking.tier.abandon("left")
        opening.release()
        asking.tier._end_loads(namespace)
        asking.run_until(lambda: asking.gone)
        assert asking.gone == {"waits": None} and asking.tier.stats().num_waiting == 0

    in_its_thread(open_engine(), clear)


def test_a_request_that_cannot_be_looked_up_after_its_rows_failed_goes_on(open_engine: Open) -> None:
    learn(open_engine())

    def ask(asking: Asking) -> None:
        finds = iter([find, find])  # in memory and on disk; then it raises

        def find_twice(cache: PrefixCache) -> PrefixMatch:
            return next(finds)(cache)

        asking.ask("one", find=find_twice)
        asking.ask("other")
        asking.tier._end_loads()
        asking.run()
        assert asking.gone == {"one": None}, "the other waits for all of it"
        asking.tier.abandon("other")

    in_its_thread(open_engine(), ask)


def test_rows_that_came_too_late_make_the_next_plan_more_careful_and_no_probe_runs_for_them(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(open_engine())
    seen: list[float] = []
    monkeypatch.setattr(RowRates, "observe", lambda self, *, expected_s, seconds: seen.append(seconds))
    monkeypatch.setattr(Rates, "compute_s", lambda *_: 0.2)
    monkeypatch.setattr(ProbeForward, "queries", lambda *_: pytest.fail("it probes"))

    def ask(asking: Asking) -> None:
        reading = Held(monkeypatch, PrunedPrefix, "read_stored_rows")
        asking.ask("late")
        asking.run_until(reading.begun.is_set)
        time.sleep(0.3)
        reading.release()
        while asking.tier.reader.queued_bytes:
            time.sleep(0.001)
        asking.run_until(lambda: asking.gone)
        assert asking.gone == {"late": None} and asking.tier.stats().extra.chosen.num_late == 1

    in_its_thread(open_engine(), ask)
    assert len(seen) == 1 and seen[0] > 0.2


def test_nothing_of_a_namespace_is_kept_after_it_was_forgotten(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(open_engine())

    def ask(asking: Asking) -> None:
        chosen = asking.tier.extra
        assert isinstance(chosen, ApproximateTier)
        known = chosen.sources.known
        asking.ask("one")
        asking.run_until(lambda: asking.gone)
        assert asking.gone["one"] is not None and known.num_bytes
        chosen.sources.forget(b"")
        assert known.num_bytes == 0
        reading = Held(monkeypatch, PrunedPrefix, "read_stored_rows")
        asking.ask("two")
        asking.run_until(reading.begun.is_set)
        chosen.sources.forget(b"")
        asking.tier._end_loads(b"")
        reading.release()
        asking.run_until(lambda: "two" in asking.gone)
        assert known.num_bytes == 0

    in_its_thread(open_engine(), ask)


def test_between_two_steps_there_is_one_probe_at_most(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())

    def ask(asking: Asking) -> None:
        num_probes, deadline = 0, time.monotonic() + WAIT_S
        queries = ProbeForward.queries

        def count(probe: ProbeForward, rows: LoadedRows, head: int) -> Float32Array:
            nonlocal num_probes
            num_probes += 1
            return queries(probe, rows, head)

        monkeypatch.setattr(ProbeForward, "queries", count)
        for name in "abc":
            asking.ask(name)
        while len(asking.gone) < 3:
            before, queued = num_probes, asking.tier.reader.run(lambda: True, lambda read: None)
            while not queued.is_done:
                time.sleep(0.001)
            asking.run()  # all that was asked of the reader is done
            assert num_probes - before <= 1 and time.monotonic() < deadline
        assert num_probes == 3 and all(asking.gone.values())

    in_its_thread(open_engine(), ask)
