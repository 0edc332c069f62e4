"""On a real compiled model: what comes back from disk after a restart is what was computed, to the last bit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.chat.tools.tool_calls import ToolCall
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.engine.request_options import NO_OPTIONS, RequestOptions
from radixlm.runtime.errors import EngineClosed, InvalidParameter, StoreCorrupt, StoreError, StoreOff
from radixlm.runtime.prefix import disk_reader, disk_writer
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.store import PageStore
from radixlm.runtime.store.record_writer import RecordWriter

from ..eager_loads import load_always

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=24, logprobs=3, ignore_eos=True)
PROMPT = [5 + i * i % 200 for i in range(150)]  # nine full pages and six tokens

PARAMS_TOKENS = 24

Open = Callable[..., Engine]


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine over one store, and closes the one before it. Loads are always worth it: this model is tiny."""
    load_always(monkeypatch)
    opened: list[Engine] = []

    def open_again(**options: object) -> Engine:
        if opened:
            opened[-1].close()
        settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "store": tmp_path / "store", **options}
        opened.append(Engine(tiny_artifact, store_bytes=64 << 20, num_threads=1, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield open_again
    opened[-1].close()


def same(ours: Completion, theirs: Completion) -> bool:
    """Ids, and the floats of all logprobs."""
    return ours.token_ids == theirs.token_ids and ours.logprobs == theirs.logprobs


def test_a_warm_reply_from_disk_has_the_bits_of_a_cold_one(open_engine: Open) -> None:
    cold = open_engine().generate(PROMPT, PARAMS)
    engine = open_engine()
    warm = engine.generate(PROMPT, PARAMS)
    assert same(warm, cold)
    assert warm.usage.cached_tokens == 144 and warm.usage.disk_tokens_by_kind == {"exact": 144}
    stats = engine.stats()
    assert stats.tier is not None and (stats.tier.num_loads, stats.tier.num_loaded_pages) == (1, 9)
    assert stats.num_computed_tokens == len(PROMPT) - 144 + PARAMS_TOKENS - 1


def test_a_conversation_goes_on_by_text_after_a_restart(open_engine: Open) -> None:
    messages = [{"role": "user", "content": "he in the tree " * 8}]
    engine = open_engine()
    letters = replace(PARAMS, logit_bias={ord(letter) + 3: 30.0 for letter in "hein"}, max_tokens=64)
    first = engine.chat(messages, letters)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "ein"}]
    engine = open_engine()
    warm = engine.chat(messages, PARAMS)
    cold = engine.generate(warm.prompt_token_ids, PARAMS, namespace=b"nobody's", cache_match="exact")
    assert cold.usage.cached_tokens == 0 and same(warm, cold)
    num_pages = (len(first.prompt_token_ids) + len(first.token_ids) - 1) // PAGE_SIZE
    assert sum(warm.usage.disk_tokens_by_kind.values()) == num_pages * PAGE_SIZE
    assert warm.usage.disk_tokens_by_kind["text"] > 16


def test_forgetting_a_namespace_takes_it_off_the_disk(open_engine: Open) -> None:
    engine = open_engine()
    engine.generate(PROMPT, PARAMS)
    engine.generate(PROMPT, PARAMS, namespace=b"other")
    engine = open_engine()
    cleared = engine.clear_cache()
    assert cleared.num_discarded_pages == 10 and cleared.num_freed_pages == 0
    assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0
    assert engine.generate(PROMPT, PARAMS, namespace=b"other").usage.cached_tokens == 144


def test_namespaces_outlive_the_process_that_made_them(open_engine: Open) -> None:
    ours, theirs = CacheScope(api_key="ours"), CacheScope(api_key="theirs")
    engine = open_engine()
    before = engine.namespaces.of(ours)
    engine.generate(PROMPT, PARAMS, namespace=before)
    engine = open_engine()
    assert engine.namespaces.of(ours) == before
    assert engine.generate(PROMPT, PARAMS, namespace=engine.namespaces.of(theirs)).usage.cached_tokens == 0
    assert engine.generate(PROMPT, PARAMS, namespace=before).usage.cached_tokens == 144
    other = open_engine(store=None)
    assert other.namespaces.of(ours) != before


def test_another_engine_on_the_same_directory_is_refused(
    open_engine: Open, tiny_artifact: Path, tmp_path: Path
) -> None:
    engine = open_engine()
    with pytest.raises(StoreError, match="another"):
        Engine(tiny_artifact, kv_cache_bytes=1 << 20, store=tmp_path / "store")
    assert engine.generate(PROMPT, PARAMS).finish_reason == "length"


def test_a_runner_that_cannot_copy_pages_needs_no_store(open_engine: Open) -> None:
    class Bare:
        def close(self) -> None: ...

    with pytest.raises(InvalidParameter, match="Bare cannot copy pages"):
        open_engine(open_runner=lambda *args: Bare())
    open_engine()  # the directory is free again


def test_the_engine_sleeps_while_it_waits_for_the_disk(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine()
    cold = engine.generate(PROMPT, PARAMS)
    engine = open_engine()
    read, may_read = PageStore.read, threading.Event()
    monkeypatch.setattr(
        PageStore, "read", lambda store, page_keys, out: read(store, page_keys, out) if may_read.wait(60) else 0
    )
    with engine.stream(PROMPT, PARAMS) as stream:
        while not engine.stats().tier.num_waiting:  # type: ignore[union-attr]
            time.sleep(0.001)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.15, "it spins"
        may_read.set()
        warm = stream.result()
    assert same(warm, cold) and warm.usage.cached_tokens == 144


@pytest.mark.parametrize("operation", ["read", "put"])
def test_closing_does_not_wait_for_a_disk_that_hangs_and_says_so(
    operation: str, open_engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine().generate(PROMPT, PARAMS)
    engine, began, may_go_on = open_engine(), threading.Event(), threading.Event()
    work = getattr(PageStore, operation)

    def hang(*arguments: object) -> object:
        began.set()
        assert may_go_on.wait(60)
        return work(*arguments)

    monkeypatch.setattr(PageStore, operation, hang)
    for module in (disk_reader, disk_writer):
        monkeypatch.setattr(module, "HANG_S", 0.01)
    monkeypatch.setattr(DiskTier.shut_down, "__defaults__", (0.01,))
    try:
        with engine.stream(PROMPT if operation == "read" else PROMPT[::-1], PARAMS):
            assert began.wait(60)
        closing = threading.Thread(target=engine.close)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        assert "does not answer; it stays in use until this process ends" in caplog.text
    finally:
        may_go_on.set()


def test_what_a_disk_that_failed_still_has_is_not_said_to_be_cleared(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleared namespace was said to be off the disk, and was found again by the next process."""
    engine = open_engine()
    engine.generate(PROMPT, PARAMS)
    engine = open_engine()
    with monkeypatch.context() as broken:

        def fail(*arguments: object) -> object:
            raise OSError(5, "Input/output error")

        broken.setattr(RecordWriter, "discard", fail)
        with pytest.raises(StoreOff, match="may still be on disk"):
            engine.clear_cache()
    assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0
    with pytest.raises(StoreOff):
        engine.clear_cache()
    assert open_engine().clear_cache().num_discarded_pages > 0


def test_clearing_ends_when_the_engine_is_closed_over_a_disk_that_hangs(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine().generate(PROMPT, PARAMS)
    engine, began, may_go_on = open_engine(), threading.Event(), threading.Event()
    discard, ends = PageStore.discard, list[BaseException | None]()

    def hang(*arguments: Any) -> object:
        began.set()
        assert may_go_on.wait(60)
        return discard(*arguments)

    def clear() -> None:
        try:
            engine.clear_cache()
        except (StoreOff, EngineClosed) as error:  # the second may come when the engine is closed already
            ends.append(error)

    monkeypatch.setattr(PageStore, "discard", hang)
    monkeypatch.setattr(disk_writer, "HANG_S", 0.01)
    monkeypatch.setattr(DiskTier.shut_down, "__defaults__", (0.01,))
    threads = [threading.Thread(target=clear) for _ in range(2)]  # one is at work, one waits
    try:
        for thread in threads:
            thread.start()
        assert began.wait(60)
        engine.close()
        for thread in threads:
            thread.join(30)
        assert len(ends) == 2 and any(isinstance(end, StoreOff) for end in ends)
    finally:
        may_go_on.set()


def test_a_call_is_known_after_a_restart_to_its_namespace_alone(open_engine: Open) -> None:
    call = ToolCall("call_1", "edit", '{"line": 1, "path": "é"}')

    def arguments(engine: Engine, options: RequestOptions = NO_OPTIONS) -> str:
        function = {"name": "edit", "arguments": '{"path":"\\u00e9","line":1}'}
        said = {"role": "assistant", "tool_calls": [{"id": "call_1", "function": function}]}
        [message] = engine.as_generated([said], options)
        calls: Any = message["tool_calls"]
        return str(calls[0]["function"]["arguments"])

    engine = open_engine()
    stream = engine.stream(PROMPT, PARAMS)
    engine.note_call(call, stream=stream)  # before its reply has ended
    stream.result()
    engine = open_engine()
    assert arguments(engine) == call.arguments
    assert arguments(engine, RequestOptions(namespace=b"another")) != call.arguments
    late = engine.stream(PROMPT[:100], PARAMS)
    late.result()
    engine.note_call(ToolCall("call_1", "edit", '{"path": "é", "line": 1}'), stream=late)  # and behind its end
    assert arguments(open_engine()) == '{"path": "é", "line": 1}'
    open_engine().clear_cache()
    engine = open_engine()
    assert arguments(engine) == '{"path":"\\u00e9","line":1}'


def test_a_call_of_a_reply_that_is_not_kept_is_not_kept(open_engine: Open) -> None:
    engine = open_engine()
    stream = engine.stream(PROMPT, PARAMS, cache_match="off")
    engine.note_call(ToolCall("call_1", "edit", "{}"), RequestOptions(cache_match="off"), stream)
    stream.result()
    engine.note_call(ToolCall("call_2", "edit", "{}"), NO_OPTIONS, stream)  # its pages are nowhere
    assert len(open_engine().prompts.call_history) == 0


def test_a_call_of_a_reply_is_no_error_where_the_engine_was_closed_meanwhile(open_engine: Open) -> None:
    engine = open_engine()
    stream = engine.stream(PROMPT, PARAMS)
    stream.result()
    engine.close()
    engine.note_call(ToolCall("call_1", "edit", "{}"), stream=stream)


def test_clearing_waits_for_a_disk_that_hangs_no_longer_than_it_says(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engine().generate(PROMPT, PARAMS)
    engine, may_go_on = open_engine(), threading.Event()
    discard = PageStore.discard

    def hang(*arguments: Any) -> object:
        assert may_go_on.wait(60)
        return discard(*arguments)

    monkeypatch.setattr(PageStore, "discard", hang)
    monkeypatch.setattr("radixlm.runtime.engine.engine.CLEARS_WITHIN_S", 0.05)
    try:
        with pytest.raises(StoreOff, match="ask again"):
            engine.clear_cache()
    finally:
        may_go_on.set()
    monkeypatch.setattr("radixlm.runtime.engine.engine.CLEARS_WITHIN_S", 60.0)
    engine.clear_cache()
    assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0


def test_an_engine_that_cannot_be_opened_lets_go_of_its_store(tiny_artifact: Path, tmp_path: Path) -> None:
    wrong: list[dict[str, object]] = [
        {"cache_ttl_s": 0.0},
        {"kv_log": tmp_path / "no" / "such" / "folder"},
        {"open_runner": lambda *args: object()},
    ]
    for options in wrong:
        with pytest.raises((InvalidParameter, OSError, AttributeError)):
            Engine(tiny_artifact, kv_cache_bytes=1 << 20, store=tmp_path / "store", **options)  # type: ignore[arg-type]
    with Engine(tiny_artifact, kv_cache_bytes=1 << 20, store=tmp_path / "store") as engine:
        assert engine.generate(PROMPT, PARAMS).usage.cached_tokens == 0


def test_an_engine_opens_without_a_store_that_its_disk_does_not_allow(open_engine: Open, tmp_path: Path) -> None:
    """A home directory that was full kept a server from starting that had run the day before."""
    engine = open_engine(store="/proc/no-store")
    assert engine.generate(PROMPT, PARAMS).token_ids
    stats = engine.stats()
    assert stats.tier is None and "/proc/no-store cannot hold a store" in str(stats.store_off_because)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreCorrupt):
        open_engine(store=tmp_path / "file")
    open_engine()


def test_a_store_is_opened_again_although_a_forked_child_has_its_lock(open_engine: Open) -> None:
    open_engine()
    hold, release = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(release)
        os.read(hold, 1)
        os._exit(0)
    assert open_engine().generate(PROMPT, PARAMS).token_ids
    os.close(release)
    os.waitpid(pid, 0)
