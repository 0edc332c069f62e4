"""A reader of a request's rows is handed those that it wants, each once and in order, whatever steps compute."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from radixlm.runtime.engine import request as requests
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.request_options import RequestSpec
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy, StepPlan
from radixlm.runtime.engine.step.readers import LogitRows, Reader
from radixlm.runtime.errors import EngineError

from ..fake_model import Bench, alone, digest, logits_of

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


class RowsReader:
    """Wants the rows of the prompt from one position to another, and says the digest of each."""

    def __init__(self, first: int, last: int) -> None:
        self.left = range(first, last)
        self.read_so_far: list[tuple[int, bytes]] = []

    @property
    def num_reusable(self) -> int | None:
        return self.left.start if self.left else None

    @property
    def reading(self) -> list[tuple[int, bytes]] | None:
        return None if self.left else self.read_so_far

    def wanted(self, start: int, stop: int, length: int) -> range:
        return range(max(start, self.left.start), min(stop, self.left.stop))

    def read(self, rows: LogitRows) -> bool:
        assert rows.positions.start == self.left.start, "a row was left out, or comes twice"
        for place, position in enumerate(rows.positions):
            if not rows.step.is_finite[rows.first + place]:
                return False
            self.read_so_far.append((position, rows.step.values[rows.first + place].tobytes()))
        self.left = range(rows.positions.stop, self.left.stop)
        return True


def rows_of(ids: Sequence[int], vocab_size: int) -> list[bytes]:
    """All rows of a prompt, computed alone and one after another."""
    rows, found = np.zeros(0, np.uint64), []
    for position, token_id in enumerate(ids):
        rows = np.append(rows, np.uint64(digest(rows, token_id, position)))
        found.append(logits_of(int(rows[-1]), vocab_size).tobytes())
    return found


def give(monkeypatch: pytest.MonkeyPatch, made: dict[str, list[Reader]]) -> None:
    """Have requests read by those made for their names."""
    monkeypatch.setattr(requests, "_readers_of", lambda spec: made.get(spec.request_id, []))


def test_each_row_is_read_once_whatever_is_cached_or_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    num_cut = 0  # gave their pages back when some rows were read, and others not
    preempted, reserve = Request.preempted, StepPlan.reserve

    def count(request: Request) -> None:
        nonlocal num_cut
        num_cut += any(isinstance(each, RowsReader) and each.left and each.read_so_far for each in request.readers)
        preempted(request)

    def lack(plan: StepPlan, request: Request, share: float = 1.0) -> bool:
        return (not plan.scheduled or rng.random() > 0.1) and reserve(plan, request, share)

    monkeypatch.setattr(Request, "preempted", count)
    monkeypatch.setattr(StepPlan, "reserve", lack)  # pages are short more often than they are
    for seed in range(30):
        rng = random.Random(seed)
        run(rng, monkeypatch)
    assert num_cut > 10


def run(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=24, max_num_logits=rng.choice([4, 7, 24]))
    bench = Bench(policy=policy, num_pages=9, context_length=128)
    made: dict[str, list[Reader]] = {}
    give(monkeypatch, made)
    shared = rng.choices(range(8, 39), k=60)
    ranges: dict[str, list[range]] = {}
    for number in range(8):
        name, ids = f"{number}", [*shared[: rng.choice([0, 20, 48])], *rng.choices(range(8, 39), k=rng.randint(1, 40))]
        starts = [rng.randrange(len(ids) + 1) for _ in range(rng.choice([0, 1, 1, 2]))]
        ranges[name] = [range(start, rng.randint(start, len(ids))) for start in starts]
        made[name] = [RowsReader(each.start, each.stop) for each in ranges[name]]
        bench.add(name, ids, PARAMS)
        for _ in range(rng.randint(0, 6)):
            bench.step()
    bench.run()
    for name, request in bench.requests.items():
        ids, completion = request.prompt.ids, bench.outputs[name][-1].completion
        assert completion is not None and completion.token_ids == alone(ids, PARAMS, context_length=128)
        rows = rows_of(ids, bench.vocab_size)
        expected = tuple([(position, rows[position]) for position in each] for each in ranges[name])
        assert completion.readings == expected
        told = [output.delta.readings for output in bench.outputs[name] if output.delta is not None]
        assert told == [expected, *[()] * (len(told) - 1)]


def test_a_reading_needs_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, ids = Bench(), list(range(8, 30))
    give(monkeypatch, {"one": [RowsReader(21, 22)]})
    bench.add("one", ids, SamplingParams(max_tokens=0))
    bench.run()
    completion = bench.outputs["one"][-1].completion
    assert completion is not None and completion.token_ids == ()
    assert completion.readings == ([(21, rows_of(ids, bench.vocab_size)[21])],)


def test_a_reader_that_meets_a_damaged_row_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    give(monkeypatch, {"one": [RowsReader(3, 9)]})

    def spoil(batch: object, logits: np.ndarray) -> None:
        if len(logits) > 1:
            logits[1, 0] = np.inf

    bench.model.after = spoil
    bench.add("one", list(range(8, 28)), PARAMS)
    bench.run()
    assert isinstance(bench.outputs["one"][-1].error, EngineError)


@pytest.mark.parametrize("samples", [False, True], ids=["within-a-prompt", "at-its-end"])
def test_a_reader_that_raises_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch, samples: bool) -> None:
    """All requests of its step failed with it."""

    class Broken(RowsReader):
        def read(self, rows: LogitRows) -> bool:
            raise ValueError("a mistake of the reader's")

    policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=24)
    bench = Bench(policy=policy, num_pages=20, context_length=128)
    ids = list(range(8, 36))
    give(monkeypatch, {"one": [Broken(20, 28) if samples else Broken(3, 9)]})
    bench.add("two", ids[:4], PARAMS)
    bench.step()
    bench.add("one", ids, PARAMS)
    bench.run()
    assert isinstance(bench.outputs["one"][-1].error, EngineError)
    completion = bench.outputs["two"][-1].completion
    assert completion is not None and completion.token_ids == alone(ids[:4], PARAMS, context_length=128)
    bench.core.check()


def test_a_request_without_readers_has_no_readings() -> None:
    bench = Bench()
    spec = RequestSpec("one", bench.request("none", [8, 9], PARAMS).prompt, PARAMS)
    assert requests._readers_of(spec) == []
    bench.add("one", [8, 9], PARAMS)
    bench.run()
    completion = bench.outputs["one"][-1].completion
    assert completion is not None and completion.readings == ()
