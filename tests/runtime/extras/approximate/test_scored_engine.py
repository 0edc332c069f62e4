"""On a real compiled model: learning what matters changes no bit of any reply, and costs nothing elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Completion, Engine, SamplingParams
from radixlm.runtime.errors import EngineError, InvalidParameter
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.runtime.store import PageKey, PageStore, StoreIdentity

from .records.runs import is_of_pages

WAIT_S = 30.0  # only a hang takes that long
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=3, ignore_eos=True)
QUESTIONS = ("he in the tree", "the", "tree he", "in he the tree in")

Open = Callable[..., Engine]


@pytest.fixture
def open_engine(tiny_artifact: Path, tmp_path: Path) -> Iterator[Open]:
    """Opens engines over stores of their own."""
    opened: list[Engine] = []

    def open_one(name: str, **options: object) -> Engine:
        settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 4, "store": tmp_path / name, **options}
        settings["idle_work"] = False  # what is computed between two turns is sometimes there in time
        opened.append(Engine(tiny_artifact, store_bytes=64 << 20, num_threads=1, **settings))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def conversation(engine: Engine) -> list[Completion]:
    """Several turns behind a long system prompt, and then other questions about it."""
    system = [{"role": "system", "content": "he in the tree " * 12}]
    replies, turns = [], list(system)
    for question in QUESTIONS:
        turns += [{"role": "user", "content": question}]
        replies.append(engine.chat(turns, PARAMS))
        turns += [{"role": "assistant", "content": replies[-1].text}]
    replies += [engine.chat([*system, {"role": "user", "content": question}], PARAMS) for question in QUESTIONS[1:]]
    return replies


def num_rewritten(engine: Engine) -> int:
    tier = engine.stats().tier
    assert tier is not None
    return 0 if tier.extra is None else tier.extra.num_rewritten_runs


def use_until_rewritten(engine: Engine) -> None:
    """Ask again and again: what a prompt finds is rewritten once it is on disk, which takes its time."""
    deadline = time.monotonic() + WAIT_S
    while num_rewritten(engine) == 0:
        assert time.monotonic() < deadline, "nothing is rewritten"
        engine.chat([{"role": "system", "content": "he in the tree " * 12}, {"role": "user", "content": "in"}], PARAMS)
        time.sleep(0.01)


def chains(store: PageStore) -> list[list[PageKey]]:
    """Every way from the beginning of a prompt to its last page on disk."""
    ways: dict[bytes, list[PageKey]] = {}
    for head in store.page_keys():  # parents before children
        ways[head.key] = [*ways.get(head.parent_key, []), head]
    parents = {head.parent_key for way in ways.values() for head in way}
    return [way for key, way in ways.items() if key not in parents]


def test_replies_have_the_same_bits_with_importance_and_what_is_rewritten_is_what_was_computed(
    open_engine: Open, tmp_path: Path, tiny_artifact: Path
) -> None:
    plain, learning = open_engine("plain"), open_engine("learning", kv_budget=1.0)
    ours, theirs = conversation(learning), conversation(plain)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs
        assert one.usage.cached_tokens == other.usage.cached_tokens
    use_until_rewritten(learning)
    assert num_rewritten(plain) == 0
    learning.close()
    identity = StoreIdentity.of(Artifact.open(tiny_artifact).manifest)
    with PageStore.open(tmp_path / "learning", identity, max_bytes=64 << 20) as store:
        rests = [way[start:] for way in chains(store) for start in range(len(way))]
        runs = [(heads, run) for heads in rests if (run := RowRecords.of(store).open_ordered(heads)) is not None]
        assert runs
        for heads, run in runs:
            exact = np.empty((run.header.num_pages, identity.page_bytes), np.uint8)
            assert store.read(heads[: run.header.num_pages], exact) == len(exact)
            assert is_of_pages(run, exact)
            order = run.order()
            assert order is not None and (np.diff(order.astype(int), axis=-1) < 0).any(), "it is that of the text"
            run.close()


def test_without_importance_nothing_is_scored(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "forward_scored", lambda *args, **options: pytest.fail("it was scored"))
    engine = open_engine("plain")
    runner = engine._core._forward
    assert isinstance(runner, ModelRunner) and runner.attention_sums is None
    conversation(engine)


def test_a_kv_budget_needs_a_store_and_a_runner_that_scores(tiny_artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="store is not"):
        Engine(tiny_artifact, kv_cache_bytes=1 << 20, kv_budget=1.0)
    runner = ModelRunner(Artifact.open(tiny_artifact), num_pages=8)
    with pytest.raises(EngineError, match="keeps no attention scores"):
        Engine(
            tiny_artifact,
            kv_cache_bytes=1 << 20,
            store=tmp_path / "store",
            kv_budget=1.0,
            open_runner=lambda *args: runner,
        )
    runner.close()
