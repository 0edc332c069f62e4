"""On a real compiled model: a part of a prefix is labelled and its request's own; whatever fails is served exactly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.prefix_match import PrefixMatch
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.model.batch import Float32Array
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.loaded_rows import LoadedRows
from radixlm.runtime.prefix.prefix_loader import FindPrefix, Wanted
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.prefix.tier_stats import TierStats
from radixlm.runtime.pruning import pruned_loader, pruned_source
from radixlm.runtime.pruning.probe_forward import ProbeForward
from radixlm.runtime.pruning.pruned_loader import PrunedLoader

from ..eager_loads import choose_always

WAIT_S = 30.0  # only a hang takes that long
PREFIX = [5 + i * i % 200 for i in range(192)]  # twelve pages
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=3, ignore_eos=True)

Open = Callable[..., Engine]


def asked(number: int) -> list[int]:
    return [*PREFIX, *(7 + (number * 31 + i * 11) % 150 for i in range(9))]


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine over one store, and closes the one before it. Loads are always worth it, and parts more so."""
    choose_always(monkeypatch)
    monkeypatch.setattr(pruned_source, "MAX_DROPPED_ATTENTION", 1.0)  # random weights attend to everything
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
    while tier_of(engine).num_rewritten_runs == 0:
        assert time.monotonic() < deadline, "nothing is rewritten"
        engine.generate(asked(number % 3), replace(PARAMS, max_tokens=1), kv_budget=1.0)
        number += 1


def bits(completion: Completion) -> tuple[object, object]:
    return completion.token_ids, completion.logprobs


def exact(engine: Engine, ids: list[int]) -> Completion:
    """Computed from nothing, for nobody else to find."""
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
    assert (tier_of(engine).num_parts, tier_of(engine).num_parts_broken) == (0, 0)


def test_what_is_wanted_again_is_read_from_memory(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()
    replies, read = [], []
    for _ in range(2):
        replies.append(engine.generate(asked(7), PARAMS))
        read.append(tier_of(engine).num_read_bytes)
    assert bits(replies[0]) == bits(replies[1]) and tier_of(engine).num_parts == 2
    assert 0 < read[1] - read[0] < read[0] / 4, "headers only"


def test_the_same_part_gives_the_same_reply_in_company_too(open_engine: Open) -> None:
    learn(open_engine())
    alone = [open_engine().generate(asked(number), PARAMS) for number in range(5, 8)]
    engine = open_engine()
    streams = [engine.stream(asked(number), PARAMS) for number in range(5, 8)]
    together = [stream.result() for stream in streams]
    assert [bits(reply) for reply in together] == [bits(reply) for reply in alone]
    assert tier_of(engine).num_parts == 3 and all(reply.usage.pruning for reply in together)


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
    [path] = directory.glob("ordered-*.run")
    content = bytearray(path.read_bytes())
    for at in range(len(content) // 3, len(content), 4096):
        content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("fault", ["no order", "spoiled", "disagrees", "late"])
def test_whatever_fails_is_served_exactly(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "no order":
        open_engine(kv_budget=None).generate(asked(0), PARAMS)
    else:
        learn(open_engine())
    if fault == "spoiled":
        open_engine().close()
        spoil(tmp_path / "store")
    if fault == "disagrees":
        monkeypatch.setattr(pruned_source, "MAX_DROPPED_ATTENTION", -1.0)
    if fault == "late":
        monkeypatch.setattr(Rates, "compute_s", lambda *args: -1.0)
    engine = open_engine()
    reply = engine.generate(asked(7), PARAMS)
    assert reply.usage.pruning is None and bits(reply) == bits(exact(engine, asked(7)))
    assert reply.usage.disk_tokens_by_kind == {"exact": 192}, "the exact pages did"
    tier = tier_of(engine)
    counted = {"disagrees": tier.num_parts_disagreed, "late": tier.num_parts_late}.get(fault, tier.num_parts_broken)
    assert (tier.num_parts, counted) == (0, 1)


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


def in_its_thread(engine: Engine, do: Callable[[DiskTier, PrunedLoader], None]) -> None:
    """What an engine's thread would do with its tier between two steps; and nobody is left waiting."""

    def call(core: EngineCore) -> None:
        tier = core.tier
        assert tier is not None and tier._parts is not None
        do(tier, tier._parts)

    engine._loop.call(call)


def find(cache: PrefixCache) -> PrefixMatch:
    return cache.match(asked(7))


def part_of(parts: PrunedLoader, name: str) -> LoadedRows:
    """A part that came for who waits under a name; nobody else waits."""
    deadline = time.monotonic() + WAIT_S
    while name not in parts.advance()[0]:
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.001)
    load = parts.loaded(name)
    assert load is not None
    return load


def wait_for_probe(parts: PrunedLoader, name: str) -> Any:
    """A request that begins to wait, and whose first rows are being read."""
    assert parts.begin(name, find, 0.5)
    waiting, deadline = parts._waiting[name], time.monotonic() + WAIT_S
    while not waiting.source.probes_next:
        parts.advance()
        assert time.monotonic() < deadline, "it is never planned"
    return waiting


def test_parts_count_for_as_long_as_somebody_waits_for_his_turn_with_them(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        assert parts.begin("first", find, 0.5)
        load = part_of(parts, "first")
        monkeypatch.setattr(pruned_loader, "MAX_STAGED_BYTES", load.pages.nbytes + 1)
        assert not parts.begin("second", find, 0.5), "there is no room beside the first"
        del load
        assert parts.begin("second", find, 0.5)
        parts.abandon("second")

    in_its_thread(open_engine(), ask)


def test_many_who_ask_at_once_have_few_files_open(open_engine: Open) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        may_read = threading.Event()
        tier.reader.run(lambda: may_read.wait(WAIT_S), lambda read: None)
        begun = [parts.begin(str(number), find, 0.1) for number in range(pruned_loader.MAX_SOURCES + 3)]
        assert begun == [True] * pruned_loader.MAX_SOURCES + [False] * 3
        parts.abandon("0")
        assert parts.begin("0", find, 0.1), "its files were not opened"
        assert not parts.begin("another", find, 0.1)
        may_read.set()
        for number in range(pruned_loader.MAX_SOURCES):
            parts.abandon(str(number))
        deadline = time.monotonic() + WAIT_S
        while parts._ended:
            parts.advance()
            assert time.monotonic() < deadline, "files stay open"
        assert parts.begin("another", find, 0.1)
        parts.abandon("another")

    in_its_thread(open_engine(), ask)


def test_files_of_who_left_are_closed_though_nobody_asks_again(open_engine: Open) -> None:
    learn(open_engine())
    engine = open_engine()

    def leave(tier: DiskTier, parts: PrunedLoader) -> None:
        assert parts.begin("gone", find, 0.5)
        parts.abandon("gone")

    in_its_thread(engine, leave)
    deadline, parts = time.monotonic() + WAIT_S, engine._core.tier._parts  # type: ignore[union-attr]
    assert parts is not None
    while parts._ended:
        assert time.monotonic() < deadline, "a file stays open until somebody asks"
        time.sleep(0.001)


@pytest.mark.parametrize("namespace", [b"", None])
def test_a_cache_is_cleared_while_one_waits_and_what_another_left_was_just_read(
    open_engine: Open, namespace: bytes | None
) -> None:
    """The one who left was sent back once more; `DELETE /v1/cache` failed, and the thread died of the next step."""
    learn(open_engine())

    def clear(tier: DiskTier, parts: PrunedLoader) -> None:
        may_read = threading.Event()
        tier.reader.run(lambda: may_read.wait(WAIT_S), lambda read: None)
        assert parts.begin("left", find, 0.5) and parts.begin("waits", find, 0.5)
        parts.abandon("left")
        may_read.set()
        deadline = time.monotonic() + WAIT_S
        while not all(waiter.work.is_done for waiter in parts._ended):
            assert time.monotonic() < deadline
        parts.end(namespace)
        ready, back = parts.advance()
        assert (ready, list(back)) == ([], ["waits"])

    in_its_thread(open_engine(), clear)


def test_who_cannot_be_looked_up_after_a_part_failed_goes_on(open_engine: Open) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        finds = iter([find, find])  # in memory and on disk; then it raises

        def find_twice(cache: PrefixCache) -> PrefixMatch:
            return next(finds)(cache)

        gone: list[str] = []

        def wanted(name: str, find: FindPrefix) -> Wanted:
            return Wanted(name, find, lambda *_: gone.append(name), lambda _: None, kv_budget=0.5)

        assert tier.begin(wanted("one", find_twice)) and tier.begin(wanted("other", find))
        tier._end_loads()
        tier.advance_chosen()
        assert gone == ["one"], "the other waits for all of it"
        tier.abandon("other")

    in_its_thread(open_engine(), ask)


def test_what_came_too_late_makes_the_next_plan_more_careful(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(open_engine())
    seen: list[float] = []
    monkeypatch.setattr(Rates, "observe_chosen", lambda self, *, expected_s, seconds: seen.append(seconds))

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        wait_for_probe(parts, "late")
        parts._waiting["late"].deadline = -1.0
        assert list(parts.advance()[1]) == ["late"] and parts.counts.num_late == 1

    in_its_thread(open_engine(), ask)
    assert len(seen) == 1 and seen[0] > 0


def test_nothing_of_a_namespace_is_noted_after_it_was_forgotten(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        known = parts.reads.known
        load = parts.begin("one", find, 0.5) and part_of(parts, "one")
        assert load and known.num_bytes
        [run] = known._runs.values()
        parts.end(b"")
        assert known.num_bytes == 0
        begun, may_read, open_ordered = threading.Event(), threading.Event(), tier.store.open_ordered

        def open_slowly(*args: Any, **options: Any) -> Any:
            begun.set()
            assert may_read.wait(WAIT_S)
            return open_ordered(*args, **options)

        monkeypatch.setattr(tier.store, "open_ordered", open_slowly)
        assert parts.begin("two", find, 0.5) and begun.wait(WAIT_S)
        parts.end(b"")
        known._runs[b"", b""] = run  # as its read may, that runs
        may_read.set()
        deadline = time.monotonic() + WAIT_S
        while parts._ended:
            parts.advance()
            assert time.monotonic() < deadline, "it never ends"
        assert known.num_bytes == 0

    in_its_thread(open_engine(), ask)


def test_between_two_steps_there_is_one_probe_at_most(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        for name in "abc":
            assert parts.begin(name, find, 0.5)
        ready: list[str] = []
        num_probes, deadline = 0, time.monotonic() + WAIT_S
        queries = ProbeForward.queries

        def count(probe: ProbeForward, rows: LoadedRows, head: int) -> Float32Array:
            nonlocal num_probes
            num_probes += 1
            return queries(probe, rows, head)

        monkeypatch.setattr(ProbeForward, "queries", count)
        while len(ready) < 3:
            before, queued = num_probes, tier.reader.run(lambda: True, lambda read: None)
            while not queued.is_done:
                time.sleep(0.001)
            ready += parts.advance()[0]  # all that was asked of the reader is done
            assert num_probes - before <= 1 and time.monotonic() < deadline
        assert num_probes == 3 and sorted(ready) == ["a", "b", "c"]

    in_its_thread(open_engine(), ask)


def test_no_probe_runs_for_a_request_that_is_too_late(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    learn(open_engine())

    def ask(tier: DiskTier, parts: PrunedLoader) -> None:
        waiting, deadline = wait_for_probe(parts, "late"), time.monotonic() + WAIT_S
        while not waiting.work.is_done:
            assert time.monotonic() < deadline, "it is never read"
        waiting.deadline = -1.0
        monkeypatch.setattr(ProbeForward, "queries", lambda *_: pytest.fail("it probes"))
        assert list(parts.advance()[1]) == ["late"]

    in_its_thread(open_engine(), ask)
