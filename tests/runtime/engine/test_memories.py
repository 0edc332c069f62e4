"""Nothing that remembers is left out of what happens to all memories."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.memory import ForgetResult, Memories, Memory
from radixlm.runtime.prefix.tier_hooks import TierStats
from radixlm.runtime.server import create_app
from radixlm.runtime.speculation.draft_model import DraftStats

WAIT_S = 30.0


class Noted(Memory):
    """Notes what it is told; a namespace takes it some time."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.dropped = threading.Event()

    def forget(self, namespace: bytes) -> ForgetResult:
        self.told.append(f"forget {namespace!r}")
        done: Future[None] = Future()
        threading.Timer(0.05, lambda: (self.told.append("gone"), done.set_result(None))).start()
        return ForgetResult(num_discarded_pages=7, pending=(done,))

    def drop_unused(self, since: float) -> None:
        self.dropped.set()

    def start_over(self) -> None:
        self.told.append("start over")

    def check(self) -> None:
        self.told.append("check")

    def stats(self) -> TierStats | None:
        return None

    def shut_down(self) -> None:
        self.told.append("shut down")


class Killed(BaseException):
    """Ends the engine's thread."""


def kinds_of(kind: type[Memory]) -> set[type[Memory]]:
    """All product classes that are memories."""
    kinds = {found for each in kind.__subclasses__() for found in {each, *kinds_of(each)}}
    return {each for each in kinds if each.__module__.startswith("radixlm.")}


def test_every_kind_of_memory_is_in_an_engine_that_has_all_features(tiny_artifact: Artifact, tmp_path: Path) -> None:
    options = {"store": tmp_path, "draft": tiny_artifact, "speculate": "draft", "kv_cache_bytes": 1 << 24}
    with Engine(tiny_artifact, **options) as engine:
        create_app(engine)  # what clients leave on the server is forgotten with the rest
        memories = engine._loop.call(lambda core: list(core.memories))
        assert {type(memory) for memory in memories} == kinds_of(Memory)
        stats = engine.stats()
        assert isinstance(stats.tier, TierStats) and isinstance(stats.draft, DraftStats)


def test_a_memory_sees_all_that_happens(tiny_artifact: Artifact) -> None:
    noted = Noted()
    with Engine(tiny_artifact, cache_ttl_s=0.5, kv_cache_bytes=1 << 24) as engine:
        engine._loop.call(lambda core: core.memories.add(noted))
        engine.generate([5, 6, 7], SamplingParams(max_tokens=2, temperature=0))
        assert noted.dropped.wait(WAIT_S)
        assert engine.clear_cache(b"a").num_discarded_pages == 7
        assert noted.told == ["forget b'a'", "gone"], "it came back before all was gone"
        engine.check()
        with pytest.raises(Killed):
            engine._loop.call(kill)
        engine.generate([5, 6, 7], SamplingParams(max_tokens=1))
        assert noted.told[2:] == ["check", "start over", "check"]
        engine._loop.call(lambda core: core._outputs._start_over([], AssertionError("pages are in disorder")))
        assert noted.told[5:] == ["start over"]
    assert noted.told[6:] == ["shut down"]


def kill(_: object) -> None:
    raise Killed


def test_all_are_shut_down_also_behind_one_that_raises() -> None:
    class Broken(Noted):
        def shut_down(self) -> None:
            raise OSError("the disk is gone")

    memories = Memories()
    first = memories.add(Noted())
    memories.add(Broken())
    with pytest.raises(OSError, match="the disk is gone"):
        memories.shut_down()
    assert first.told == ["shut down"]


def test_what_is_forgotten_is_the_sum_of_all() -> None:
    memories = Memories()
    memories.add(PrefixCache(PagePool(2)))
    for _ in range(2):
        memories.add(Noted())
    forgotten = memories.forget(b"a")
    assert (forgotten.num_freed_pages, forgotten.num_kept_pages, forgotten.num_discarded_pages) == (0, 0, 14)
    assert len(forgotten.pending) == 2
