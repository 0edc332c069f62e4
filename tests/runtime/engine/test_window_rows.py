"""On real compiled models with sliding windows: replies of an engine whose memory keeps few of the windows' rows are
those of one that keeps all, bit for bit, with prefixes that are shared, edited, evicted, and restored from disk.

Rows that are dropped are overwritten with NaN, which would spread to all that reads them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from radixlm.runtime.artifact.window_layers import WindowLayers
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.kv_cache_size import KVCacheSize
from radixlm.runtime.model.memory import WindowPool, can_release_memory
from radixlm.runtime.prefix.disk_writer import DiskWriter
from radixlm.runtime.server.metrics import _kv_page_metrics

from ..eager_loads import load_always

CONTEXT = 256
NUM_PAGES, NUM_WINDOW_PAGES = 40, 15
SETTINGS = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "context_length": CONTEXT}

pytestmark = pytest.mark.skipif(not can_release_memory(), reason="the system takes no memory back")


class Small:
    """Gives engines a small cache, and spoils what they drop."""

    def __init__(self) -> None:
        self.num_dropped = 0

    def choose(self, *args: object, window_layers: WindowLayers | None, **more: object) -> KVCacheSize:
        assert window_layers is not None
        return KVCacheSize(NUM_PAGES, CONTEXT, num_window_pages=NUM_WINDOW_PAGES)

    def drop(self, pool: WindowPool, runs: Iterable[range]) -> None:
        flat = pool._pool.reshape(-1).view("uint8")
        for run in runs:
            for before, size in pool._layers.parts:
                first = before * pool._num_pages
                flat[first + run.start * size : first + min(run.stop, pool._num_pages) * size] = 0xFF
                self.num_dropped += len(run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Small:
    small = Small()
    monkeypatch.setattr(KVCacheSize, "choose", small.choose)
    monkeypatch.setattr(WindowPool, "drop", lambda pool, runs: small.drop(pool, runs))
    return small


@pytest.fixture(
    scope="module", params=[("gemma3", "f32"), ("gemma4", "k12v8"), ("llama4", "k12v8")], ids=lambda p: p[0]
)
def artifact(request: pytest.FixtureRequest, family_artifact: Callable[..., Path]) -> Path:
    name, kv_dtype = request.param
    return family_artifact(name, "keep", kv_dtype)


@pytest.fixture(scope="module")
def plain(artifact: Path) -> Iterator[Engine]:
    with Engine(artifact, kv_cache_bytes=64 << 20, **SETTINGS) as engine:
        yield engine


def params(chance: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=chance.randrange(99), max_tokens=chance.randrange(1, 40), logprobs=2, ignore_eos=True
    )


def prompts(chance: random.Random, replies: list[Completion]) -> list[list[int]]:
    """Some prompts at a time: new ones, those that go on from replies, and those that edit what came before."""
    several: list[list[int]] = []
    for _ in range(chance.randrange(1, 5)):
        new = [chance.randrange(10, 250) for _ in range(chance.choice((3, 40, 150)))]
        if replies and chance.random() < 0.75:
            before = chance.choice(replies)
            text = [*before.prompt_token_ids, *before.token_ids]
            new = [*text[: chance.choice((len(text), chance.randrange(1, len(text) + 1)))], *new[:30]]
        several.append(new[: CONTEXT - 50])
    return several


def compare(engine: Engine, plain: Engine, chance: random.Random, num_rounds: int, replies: list[Completion]) -> int:
    """Ask both the same; how many tokens the small one reused."""
    num_reused = 0
    for _ in range(num_rounds):
        asked = [(ids, params(chance)) for ids in prompts(chance, replies)]
        streams = [engine.stream(ids, given) for ids, given in asked]
        for stream, (ids, given) in zip(streams, asked, strict=True):
            completion, expected = stream.result(), plain.generate(ids, given, cache_match="off")
            assert completion.token_ids == expected.token_ids
            assert completion.logprobs == expected.logprobs  # floats, and equal
            num_reused += completion.usage.cached_tokens
            replies.append(completion)
    return num_reused


@pytest.mark.timeout(600)
def test_replies_are_those_of_an_engine_that_drops_nothing(small: Small, artifact: Path, plain: Engine) -> None:
    chance, replies = random.Random(7), list[Completion]()
    with Engine(artifact, **SETTINGS) as engine:
        num_reused = compare(engine, plain, chance, 30, replies)
        assert num_reused > 300 and small.num_dropped > 100
        stats = engine.stats()
        assert stats.windows is not None and 0 < stats.windows.num_with_rows <= NUM_WINDOW_PAGES
        assert stats.windows.num_dropped > 0 == stats.num_preemptions
        assert "radixlm_kv_window_pages" in {metric.name for metric in _kv_page_metrics(stats)}


def is_written(core: EngineCore) -> bool:
    assert core.tier is not None
    core.tier.saver.go_on()  # it looks for room after a save or a write only, and may have had none then
    return core.tier.writer.is_idle and not core.tier.saver.has_pending


def wait_until_written(engine: Engine) -> None:
    deadline = time.monotonic() + 60
    while not engine._loop.call(is_written):
        assert time.monotonic() < deadline, "saving does not end"
        time.sleep(0.001)


@pytest.mark.timeout(600)
def test_what_the_disk_has_is_whole(
    small: Small, artifact: Path, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the writer often has no room when pages lose rows."""
    chance, replies, busy = random.Random(8), list[Completion](), random.Random(9)
    load_always(monkeypatch)
    monkeypatch.setattr(DiskWriter, "room_bytes", property(lambda writer: busy.choice((0, 0, 0, 8 << 20))))
    for _ in range(3):
        with Engine(artifact, store=tmp_path / "store", **SETTINGS) as engine:
            compare(engine, plain, chance, 12, replies)
            with monkeypatch.context() as roomy:  # else a slow disk may have nothing when the engine ends
                roomy.setattr(DiskWriter, "room_bytes", property(lambda writer: 8 << 20))
                wait_until_written(engine)
    assert sum(sum(reply.usage.disk_tokens_by_kind.values()) for reply in replies) > 0
    assert small.num_dropped > 100


def test_rows_that_memory_dropped_come_from_disk(
    small: Small, artifact: Path, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_always(monkeypatch)
    prompt, greedy = [10 + at % 200 for at in range(240)], SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    edited = [*prompt[:100], 9, 8, 7]
    with Engine(artifact, store=tmp_path / "store", **SETTINGS) as engine:
        for ids in (prompt, [11] * 180, [12] * 180):
            engine.generate(ids, greedy)
            wait_until_written(engine)  # rows that are dropped before would be gone
        reply = engine.generate(edited, greedy)
        assert reply.usage.cached_tokens == 96 and reply.usage.disk_tokens_by_kind == {"exact": 96}
        expected = plain.generate(edited, greedy, cache_match="off")
        assert (reply.token_ids, reply.logprobs) == (expected.token_ids, expected.logprobs)
        again = engine.generate([*edited[:101], 5], greedy)
        assert again.usage.cached_tokens >= 96 and not again.usage.disk_tokens_by_kind, (
            "the pages have their rows again"
        )
    with Engine(artifact, **SETTINGS) as engine:
        for ids in (prompt, [11] * 180, [12] * 180):
            engine.generate(ids, greedy)
        reply = engine.generate(edited, greedy)
        assert reply.cache_match.why_not_more is not None
        assert (reply.usage.cached_tokens, reply.cache_match.why_not_more.kind) == (0, "no_window_rows")
        assert engine.generate([*edited[:101], 5], greedy).usage.cached_tokens >= 96
