"""What comes from disk is what would have been computed, bit for bit; and no request waits for a disk in vain."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.engine_queue import WorkQueue
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.states.state_pool import StatePool
from radixlm.runtime.store import PageStore
from radixlm.tokenizer_fix import SpelledPrompt

from ..fake_model import EOS, FakeModel, FakeStates, alone, text_of
from ..fake_tier import IDENTITY, Served, processes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 4 + [7, 7]  # 66 tokens: four full pages


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """An engine core over one directory, each call another process as it were."""
    with processes(tmp_path / "store") as open_again:
        yield open_again


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def answered(served: Served, name: str, ids: list[int], namespace: bytes = b"", max_tokens: int = 8) -> int:
    """Ask, hold the answer against the model running alone, and say how many tokens came from disk."""
    served.bench.add(name, ids, greedy(max_tokens), namespace)
    served.run()
    assert served.bench.tokens(name) == alone(ids, greedy(max_tokens))
    return served.num_loaded(name)


def test_a_process_that_was_started_again_finds_prompts_and_replies(serve: Callable[..., Served]) -> None:
    served = serve()
    assert answered(served, "cold", PROMPT) == 0
    reply = served.bench.tokens("cold")
    served = serve()
    assert answered(served, "warm", PROMPT) == 64
    computed = served.bench.model.num_tokens
    assert computed == len(PROMPT) - 64 + 8 - 1
    later = [*PROMPT, *reply, 11, 12]
    served = serve()
    assert answered(served, "later", later) == 64  # the reply's eight tokens fill no page
    assert served.tier.stats().num_loads == 1 and served.bench.core.counters.disk_tokens_by_kind == {"exact": 64}


@pytest.mark.parametrize("num_generated", [14, 15])  # the last token of the reply would fill a page, or begins one
def test_how_a_reply_is_rendered_outlives_a_process_wherever_the_reply_ends(
    serve: Callable[..., Served], num_generated: int
) -> None:
    served, ids = serve(), PROMPT[:-16]  # 50 tokens
    letters = SpelledPrompt(
        ids, lambda i: text_of([i]).encode(), lambda text: [ord(letter) - ord("A") for letter in text]
    )
    request = served.bench.request("first", ids, greedy(num_generated), spelled=lambda: letters)
    request.spec = replace(request.spec, renderings=lambda text, _: [f" {text}"])
    served.bench.core.add(request)
    served.run()
    assert served.bench.cache.aliases.num_aliases(b"") == 1
    served = serve()
    assert served.bench.cache.aliases.num_aliases(b"") == 1


def test_what_the_model_made_is_known_as_such_after_a_restart(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT, max_tokens=20)
    served = serve()
    answered(served, "warm", [*PROMPT, *alone(PROMPT, greedy(20)), 5])
    root = served.bench.cache.tree.root(b"")
    assert root is not None
    path = next(iter(root.children)).path()
    assert path.generated[:80] == bytes(66) + b"\1" * 14


def test_memory_is_asked_before_the_disk(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served.settle()
    assert answered(served, "warm", PROMPT) == 0
    assert served.tier.stats().num_loads == 0


def test_only_what_memory_lacks_is_loaded(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    assert answered(served, "begins alike", PROMPT[:40]) == 32
    asked = served.store.num_asked
    assert answered(served, "whole", PROMPT) == 32
    assert served.store.num_asked - asked == 2, "pages that are in memory are not read"


def test_pages_that_make_room_are_found_on_disk(serve: Callable[..., Served]) -> None:
    served = serve(num_pages=8)  # one context and two pages
    answered(served, "first", PROMPT)
    for other in range(3):
        answered(served, f"other {other}", [other, *PROMPT])
        served.settle()
    assert served.bench.cache.tree.eviction.num_evicted_pages > 4
    assert answered(served, "again", PROMPT) > 0


def test_pages_leaving_before_their_turn_are_saved_on_the_way_out(serve: Callable[..., Served]) -> None:
    served = serve(num_pages=8)
    served.bench.add("first", PROMPT, greedy())
    while served.bench.core.num_running or served.bench.core.num_waiting:
        served.bench.step()
        served.tier.saver.forget()  # nothing is saved in time
    assert served.tier.stats().num_saved_pages == 0
    served.bench.cache.tree.eviction.evict(served.bench.cache.pool.num_cached)
    served.settle()
    assert answered(served, "again", PROMPT) == 64


def test_a_full_queue_drops_pages_and_keeps_requests(serve: Callable[..., Served]) -> None:
    served = serve(num_pages=8, queue_bytes=256)  # two pages
    served.store.may_write.clear()
    for i in range(6):
        answered(served, f"r{i}", [i, *PROMPT])
    stats = served.tier.stats()
    assert stats.num_dropped_pages > 0 and stats.num_queued_bytes <= 256
    served.store.may_write.set()
    served.settle()


def test_namespaces_do_not_see_each_other_on_disk(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "theirs", PROMPT, b"theirs")
    served = serve()
    assert answered(served, "ours", PROMPT, b"ours") == 0
    assert answered(served, "theirs", PROMPT, b"theirs") == 64


def test_a_request_that_waits_for_the_disk_holds_no_pages_and_others_go_on(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.store.may_read.clear()
    served.bench.add("waits", PROMPT, greedy())
    assert served.bench.core.num_waiting == 1 and served.bench.cache.pool.num_free == served.num_pages
    served.bench.add("goes on", [1, 2, 3], greedy())
    while "goes on" not in served.bench.outputs or served.bench.outputs["goes on"][-1].completion is None:
        served.bench.step()
    assert served.bench.tokens("goes on") == alone([1, 2, 3], greedy())
    assert "waits" not in served.bench.outputs
    served.store.may_read.set()
    served.run()
    assert served.bench.tokens("waits") == alone(PROMPT, greedy()) and served.num_loaded("waits") == 64


def test_while_only_loads_are_in_flight_there_is_no_work_until_one_is_late(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.settle()
    served.store.may_read.clear()
    served.bench.add("waits", PROMPT, greedy())
    assert not served.bench.core.has_work
    wait_s = served.bench.core.wait_s
    assert wait_s is not None and wait_s > 0
    served.bench.now += wait_s
    assert served.bench.core.has_work
    served.run()
    assert served.bench.tokens("waits") == alone(PROMPT, greedy())
    assert served.num_loaded("waits") == 0 and served.tier.stats().num_loads_late == 1


def test_who_leaves_during_a_load_leaves_nothing_behind(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.store.may_read.clear()
    served.bench.add("leaves", PROMPT, greedy())
    served.bench.add("stays", PROMPT, greedy())
    assert served.bench.core.num_waiting == 2 and served.tier.stats().num_loads == 1, "one load is for both"
    served.bench.abort("leaves")
    served.store.may_read.set()
    served.run()
    assert served.bench.tokens("leaves") == () and served.num_loaded("stays") == 64
    served.bench.add("leaves too", [*PROMPT[:32], 1, 2, 3], greedy())
    served.bench.abort("leaves too")
    served.run()
    assert served.tier.stats().num_waiting == 0


def test_an_id_that_waits_for_the_disk_is_taken(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.store.may_read.clear()
    served.bench.add("waits", PROMPT, greedy())
    with pytest.raises(InvalidParameter, match="in use"):
        served.bench.add("waits", [1, 2], greedy())
    served.store.may_read.set()
    served.run()


@pytest.mark.parametrize("num_right", [0, 2])
def test_a_load_that_breaks_off_lets_the_rest_be_computed(serve: Callable[..., Served], num_right: int) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.settle()
    served.store.spoil = lambda was, pages: min(was, num_right)
    assert answered(served, "warm", PROMPT) == num_right * 16
    assert served.tier.stats().num_loads_broken == 1
    served.store.spoil = lambda was, pages: was
    served.settle()
    served = serve()
    assert answered(served, "again", PROMPT) == 64, "what was computed instead is saved again"


def test_reads_and_writes_that_raise_are_no_requests_trouble(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()
    served.settle()

    def fail(num_right: int, pages: np.ndarray) -> int:
        raise RuntimeError("a mistake")

    served.store.spoil = fail
    assert answered(served, "warm", PROMPT) == 0


def test_pages_that_cannot_be_written_to_the_pool_are_computed(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served = serve()

    def refuse(page_ids: object, pages: object) -> None:
        raise RuntimeError("the pool is not there")

    served.bench.model.write_pages = refuse  # type: ignore[method-assign,assignment]
    assert answered(served, "warm", PROMPT) == 0


def test_pages_of_a_step_that_gave_no_numbers_are_not_kept(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "cold", PROMPT)
    served.settle()

    def spoil(batch: object, logits: np.ndarray) -> None:
        logits[:] = np.nan

    served.bench.model.after = spoil
    served.bench.add("damaged", [*PROMPT[:48], *([2] * 20)], greedy())
    served.run()
    assert "not finite" in str(served.bench.error("damaged"))
    served.settle()
    assert served.tier.stats().num_pages == 0, (
        "what it had reused may have been wrong already, and what goes on from it"
    )
    served = serve()
    assert answered(served, "again", PROMPT) == 0


def test_a_namespace_that_is_forgotten_is_forgotten_on_disk(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "a", PROMPT, b"a")
    answered(served, "b", PROMPT, b"b")
    served.settle()
    forgotten = served.tier.forget(b"a")
    for done in forgotten.pending:
        done.result(30)
    assert forgotten.num_discarded_pages == 4
    served = serve()
    assert answered(served, "a", PROMPT, b"a") == 0
    assert answered(served, "b", PROMPT, b"b") == 64


def test_a_save_that_fails_lets_go_who_waited(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed in the step that named them: no caller was told of them, and they waited for ever."""
    served = serve()
    answered(served, "cold", PROMPT)
    served.settle()
    served = serve()

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(served.tier.saver, "advance", fail)
    assert answered(served, "warm", PROMPT) == 64
    assert answered(served, "other", [1, 2, 3]) == 0


def test_what_nobody_used_for_long_leaves_the_disk(serve: Callable[..., Served]) -> None:
    served = serve()
    answered(served, "old", PROMPT)
    served.settle()
    served.bench.now = 100.0
    answered(served, "new", [1, *PROMPT])
    served.settle()
    served.tier.drop_unused(50.0)
    served.settle()
    served = serve()
    assert answered(served, "old", PROMPT) == 0
    assert answered(served, "new", [1, *PROMPT]) == 64


def test_a_store_that_evicts_never_gives_a_page_without_those_before_it(serve: Callable[..., Served]) -> None:
    served = serve(num_records=24)
    for i in range(20):
        answered(served, f"r{i}", [i, *PROMPT])
        served.settle()
        served.tier.check()
    assert served.tier.stats().num_evicted_pages > 0
    served = serve(num_records=24)
    found = [answered(served, f"r{i}", [i, *PROMPT]) for i in reversed(range(20))]  # what was kept last, first
    assert any(found) and not all(found)


def test_random_requests_over_two_small_tiers_get_what_running_alone_gives(serve: Callable[..., Served]) -> None:
    chance = random.Random(6)
    stems = [[chance.randrange(EOS) for _ in range(chance.randrange(20, 60))] for _ in range(5)]
    num_loaded = 0
    for process in range(4):
        served = serve(num_pages=14, num_records=60, queue_bytes=1 << 12)
        wanted, cancelled = {}, set()
        for i in range(30):
            stem = chance.choice(stems)
            ids = stem[: chance.randrange(1, len(stem) + 1)] + [chance.randrange(EOS) for _ in range(5)]
            params = SamplingParams(seed=i, max_tokens=chance.randrange(1, 20), ignore_eos=True)
            name, namespace = f"{process}-{i}", chance.choice([b"", b"", b"x"])
            wanted[name] = (ids, params)
            served.bench.add(name, ids, params, namespace)
            for _ in range(chance.randrange(8)):
                if served.bench.core.has_work:
                    served.bench.step()
            if chance.random() < 0.1 and not any(o.completion for o in served.bench.outputs.get(name, [])):
                cancelled.add(name)
                served.bench.abort(name)
            if chance.random() < 0.1:
                served.bench.now += 2.0  # some loads are late
        served.run()
        served.tier.check()
        for name, (ids, params) in wanted.items():
            tokens = served.bench.tokens(name)
            assert tokens == alone(ids, params)[: len(tokens) if name in cancelled else None], name
            num_loaded += served.num_loaded(name)
    assert num_loaded > 0  # how many is for the reading thread: on a busy machine most are late


def test_small_states_have_no_more_places_than_half_of_a_store_has_records(tmp_path: Path) -> None:
    """States of 32 bytes had 156 million places in ten gigabytes, which took 15 GB of memory and minutes to check."""
    store = PageStore.open(tmp_path, IDENTITY, max_bytes=100 * 2 * 4096)
    cache, queue = PrefixCache(PagePool(8), states=StatePool(4)), WorkQueue(clock=lambda: 0.0)
    tier = DiskTier(store, cache, FakeModel(8), queue, clock=lambda: 0.0, states=FakeStates(4, 32))
    assert tier.index.cache.states is not None
    assert 50 <= tier.index.cache.states.num_slots < 60, "and a few to spare"
    tier.shut_down()


def test_a_store_that_is_off_has_no_page_copied_for_it(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was known to be stored then, so each request had all of its pages copied, and counted as saved."""
    served = serve()
    served.store.store.abandon()
    copied: list[int] = []
    monkeypatch.setattr(served.bench.model, "read_pages", lambda page_ids, out: copied.extend(page_ids))
    for number in range(3):
        answered(served, f"{number}", PROMPT)
    for number in range(12):
        answered(served, f"makes room {number}", [number] * 60)
    stats = served.tier.stats()
    assert not copied and stats.num_saved_pages == 0 and stats.num_dropped_pages >= 12
