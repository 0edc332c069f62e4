"""The end of a prefix comes from disk while its beginning is computed: the same bits, and no request waits for it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import StepPlan
from radixlm.runtime.prefix import disk_reader

from ..fake_model import EOS, FAKE_PAGE_BYTES, alone
from ..fake_tier import WAIT_S, Served, processes

CONTEXT_LENGTH = 400
PROMPT = [number * number % 37 for number in range(330)]  # twenty full pages and ten tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TOKEN_S = 0.01
STEP = 24  # tokens


class Turns:
    """Stands in for the event that lets a store read: each piece has to be let through."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(0)

    def wait(self, timeout: float) -> bool:
        return self._free.acquire(timeout=timeout)

    def let(self, num_pieces: int) -> None:
        if num_pieces:
            self._free.release(num_pieces)

    def set(self) -> None:
        self.let(1000)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """A process over a directory that has the prompt, with a disk as quick as the model; both stand still."""
    with processes(tmp_path / "store") as open_again:
        first = open_again(num_pages=64, context_length=CONTEXT_LENGTH)
        first.bench.add("cold", PROMPT, GREEDY)
        first.run()

        def opened(num_pages: int = 64) -> Served:
            served = open_again(num_pages=num_pages, context_length=CONTEXT_LENGTH)
            know(served)
            served.store.may_read = Turns()  # type: ignore[assignment]
            return served

        yield opened


def know(served: Served) -> None:
    """Let the rates know disk and model, and learn nothing else: a page takes as long to read as to compute."""
    rates = served.tier.rates
    while rates.disk_bytes_per_s is None:  # it is measured as soon as it is opened
        served.bench.step()
        time.sleep(0.0005)  # for the thread that does
    rates.observe_compute(num_tokens=512, position=256, seconds=512 * TOKEN_S)
    rates.disk_bytes_per_s = FAKE_PAGE_BYTES / (PAGE_SIZE * TOKEN_S)
    rates.observe_read = lambda **measured: None  # type: ignore[method-assign]


def read(served: Served, num_pages: int) -> None:
    """Let the disk go on by so many pages, which are pieces of their own here."""
    posted, turns = served.bench.core.queue, served.store.may_read
    assert isinstance(turns, Turns)
    wanted = len(posted) + num_pages
    turns.let(num_pages)
    deadline = time.monotonic() + WAIT_S
    while len(posted) < wanted:
        assert time.monotonic() < deadline, "the disk was not asked"
        time.sleep(0.0005)


def finish(served: Served, *names: str, ids: Sequence[int] = PROMPT) -> None:
    """Run to the end, without the disk, and hold the answers against the model running alone."""
    served.run()
    for name in names:
        assert served.bench.tokens(name) == alone(ids, GREEDY, context_length=CONTEXT_LENGTH)
    assert not served.tier.loader.met_names


def test_beginning_and_end_meet_and_have_the_bits_of_the_whole(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    while served.tier.loader.met_names:
        read(served, 1)
        served.bench.step()
    num_loaded = served.bench.core.cache.stats().num_cached_pages
    computed = served.bench.model.num_tokens
    finish(served, "warm")
    # a step is one and a half pages: eight of them and eight pages read are the twenty
    assert served.num_loaded("warm") == 8 * PAGE_SIZE and num_loaded <= 20
    assert computed == 12 * PAGE_SIZE + 10, "the last step goes on with what is behind"
    completion = served.bench.outputs["warm"][-1].completion
    assert completion is not None and completion.usage.cached_tokens == 8 * PAGE_SIZE
    assert completion.usage.tokens_by_kind == {"exact": 128} and completion.cache_match.num_cached_tokens == 128
    stats = served.tier.stats()
    assert (stats.num_loads, stats.num_loads_from_end, stats.num_loaded_pages) == (1, 1, 8)
    assert served.bench.model.num_tokens == len(PROMPT) - 8 * PAGE_SIZE + 8 - 1
    served.tier.check()


def test_who_computes_stops_where_the_disk_is_about_to_be(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, 16)
    sizes: list[int] = []
    served.bench.model.before = lambda batch: sizes.append(len(batch.arrays.token_ids))
    served.bench.step()
    served.bench.step()
    served.bench.step()
    assert sizes == [24, 24, 16], "four pages are left to compute, and the rest is there"
    served.bench.step()
    finish(served, "warm")
    assert served.num_loaded("warm") == 16 * PAGE_SIZE


def test_a_disk_that_is_there_first_leaves_nothing_to_compute(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, 20)
    finish(served, "warm")
    assert served.num_loaded("warm") == 320 and served.bench.model.num_tokens == 10 + 8 - 1


@pytest.mark.parametrize("num_read", [0, 3])
def test_a_disk_that_stops_is_not_waited_for(serve: Callable[..., Served], num_read: int) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, num_read)
    num_steps = 0
    while "warm" not in served.bench.outputs:
        served.bench.step()
        num_steps += 1
    assert num_steps <= len(PROMPT) / STEP + 8, "it crawls"
    finish(served, "warm")
    assert served.num_loaded("warm") == num_read * PAGE_SIZE
    assert served.tier.stats().num_loads_cut == (num_read == 0)


def test_a_page_that_is_not_right_ends_the_load_only(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, 2)
    served.bench.step()
    served.store.spoil = lambda num_right, pages: 0
    read(served, 1)
    finish(served, "warm")
    stats = served.tier.stats()
    assert served.num_loaded("warm") == 0 and stats.num_loads_broken == 1
    served.settle()
    assert served.tier.stats().num_pages == 21, "what was computed instead is saved again"


def test_pages_that_cannot_be_written_to_the_pool_are_computed(serve: Callable[..., Served]) -> None:
    served = serve()

    def refuse(page_ids: object, pages: object) -> None:
        raise RuntimeError("the pool is not there")

    served.bench.model.write_pages = refuse  # type: ignore[method-assign,assignment]
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, 20)
    finish(served, "warm")
    assert served.num_loaded("warm") == 0


def test_who_leaves_takes_the_load_along(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("leaves", PROMPT, GREEDY)
    read(served, 3)
    served.bench.step()
    served.bench.abort("leaves")
    assert not served.tier.loader.met_names and served.bench.core.num_running == 0
    served.store.may_read.set()
    served.bench.add("again", PROMPT, GREEDY)
    finish(served, "again")


def test_a_step_that_fails_takes_the_load_along(serve: Callable[..., Served]) -> None:
    served = serve()

    def fail(batch: object) -> None:
        raise RuntimeError("no memory")

    served.bench.add("fails", PROMPT, GREEDY)
    read(served, 3)
    served.bench.step()
    served.bench.model.before = fail
    served.bench.step()
    served.bench.model.before = lambda batch: None
    assert "failed" in str(served.bench.error("fails"))
    served.run()
    assert not served.tier.loader.met_names
    served.bench.add("again", PROMPT, GREEDY)
    finish(served, "again")


def test_another_of_the_same_prompt_waits_for_both_ends(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("first", PROMPT, GREEDY)
    served.bench.step()
    served.bench.add("second", PROMPT, GREEDY)
    while served.tier.loader.met_names:
        read(served, 1)
        served.bench.step()
    finish(served, "first", "second")
    stats = served.tier.stats()
    assert (stats.num_loads, stats.num_loaded_pages) == (1, 8)
    assert served.num_loaded("first") == served.num_loaded("second") == 8 * PAGE_SIZE
    second = served.bench.outputs["second"][-1].completion
    assert second is not None and second.usage.cached_tokens == 320, "what the first computed is in memory"


def test_the_load_goes_on_for_who_is_left(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("first", PROMPT, GREEDY)
    served.bench.step()
    served.bench.add("second", PROMPT, GREEDY)
    read(served, 6)
    served.bench.step()
    served.bench.abort("first")
    served.bench.step()
    assert served.tier.loader.met_names == ["second"]
    while served.tier.loader.met_names:
        read(served, 1)
        served.bench.step()
    finish(served, "second")
    assert served.num_loaded("second") > 6 * PAGE_SIZE and served.tier.stats().num_loads == 1


def test_who_is_preempted_meanwhile_finds_the_end_later(serve: Callable[..., Served]) -> None:
    served = serve()
    request = served.bench.add("warm", PROMPT, GREEDY)
    for _ in range(3):
        served.bench.step()
    read(served, 10)
    with served.bench.cache.begin() as transaction:  # as if an older one needed room
        served.bench.core._scheduler._preempt(request, StepPlan(transaction, STEP))
    served.bench.cache.tree.eviction.evict(3)
    assert request.num_preemptions and len(served.tier.loader.met_names) == 1
    read(served, 2)
    finish(served, "warm")
    assert served.num_loaded("warm") == 12 * PAGE_SIZE


def test_a_namespace_that_is_forgotten_meanwhile_is_not_put_in(serve: Callable[..., Served]) -> None:
    served = serve()
    served.bench.add("warm", PROMPT, GREEDY)
    read(served, 4)
    served.bench.step()
    forgotten = served.bench.core.forget(b"")
    for done in forgotten.pending:
        done.result(WAIT_S)
    assert forgotten.num_discarded_pages == 21 and not served.tier.loader.met_names
    finish(served, "warm")
    assert served.num_loaded("warm") == 0


def test_where_others_wait_nothing_is_computed_that_is_on_disk(serve: Callable[..., Served]) -> None:
    served = serve()
    for number in range(2):
        served.bench.add(f"ahead {number}", [number, *PROMPT], GREEDY)
    served.bench.add("warm", PROMPT, GREEDY)
    assert served.tier.stats().num_loads == 0, "loading all takes as long as computing, and computing has to wait"
    finish(served, "warm")


@pytest.mark.parametrize(("times_as_fast", "num_from_end"), [(0.5, 1), (1.0, 1), (1.5, 0)])
def test_beside_others_both_ends_are_for_what_would_be_computed(
    serve: Callable[..., Served], times_as_fast: float, num_from_end: int
) -> None:
    served = serve()
    served.bench.add("beside", [1, 2, 3], GREEDY)
    served.bench.step()
    assert served.tier.rates.disk_bytes_per_s is not None
    served.tier.rates.disk_bytes_per_s *= times_as_fast
    served.bench.add("warm", PROMPT, GREEDY)
    stats = served.tier.stats()
    assert (stats.num_loads, stats.num_loads_from_end) == (1, num_from_end)
    served.store.may_read.set()
    finish(served, "warm")


def test_random_requests_with_ends_from_disk_get_what_running_alone_gives(serve: Callable[..., Served]) -> None:
    chance = random.Random(11)
    served = serve(num_pages=56)
    num_loaded = 0
    for round_number in range(6):
        if round_number:
            served = serve(num_pages=chance.choice([30, 56]))
        wanted: dict[str, list[int]] = {}
        for number in range(5):
            cut = chance.choice([330, 330, 200, chance.randrange(100, 330)])
            ids = PROMPT[:cut] + [chance.randrange(EOS) for _ in range(chance.randrange(1, 9))]
            name = f"{round_number}-{number}"
            wanted[name] = ids
            served.bench.add(name, ids, GREEDY, chance.choice([b"", b"", b"", b"x"]))
            for _ in range(chance.randrange(12)):
                served.store.may_read.let(chance.randrange(3))  # type: ignore[attr-defined]
                served.bench.step()
            if chance.random() < 0.2:
                served.bench.abort(name)
        served.store.may_read.set()
        served.run()
        served.tier.check()
        assert not served.tier.loader.met_names
        for name, ids in wanted.items():
            tokens = served.bench.tokens(name)
            assert tokens == alone(ids, GREEDY, context_length=CONTEXT_LENGTH)[: len(tokens)], name
            num_loaded += served.num_loaded(name)
    assert num_loaded > 0


def test_what_is_read_before_it_is_met_is_bounded(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.runtime.prefix.prefix_loader.STAGED_BYTES", 5 * FAKE_PAGE_BYTES)
    served = serve()
    room = served.tier.loader.room_bytes
    served.bench.add("warm", PROMPT, GREEDY)
    assert room == 5 * FAKE_PAGE_BYTES and served.tier.loader.room_bytes == 0
    read(served, 5)  # and not as many as the reader happens to read before they are computed
    finish(served, "warm")
    assert served.num_loaded("warm") == 5 * PAGE_SIZE and served.tier.loader.room_bytes == room


def test_a_disk_that_was_never_measured_is_waited_for_once_it_delivers(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request after a start had a second, and computed what a slow disk would have had in three."""
    monkeypatch.setattr(disk_reader, "PIECE_BYTES", 4 * FAKE_PAGE_BYTES)
    served = serve()
    rates = served.tier.rates
    rates.begin_with((0.0, 0.0, 0.0, 0.0, 0.0))
    rates.disk_bytes_per_s = None
    eight_pages_a_second = partial(setattr, rates, "disk_bytes_per_s", 8 * FAKE_PAGE_BYTES)
    rates.observe_read = lambda **measured: eight_pages_a_second()  # type: ignore[method-assign]
    served.bench.add("warm", PROMPT, GREEDY)
    for _ in range(5):
        read(served, 1)
        served.bench.step()
        served.bench.now += 0.5
    finish(served, "warm")
    assert served.num_loaded("warm") == 20 * PAGE_SIZE and served.tier.stats().num_loads_late == 0
