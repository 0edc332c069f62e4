"""What one request computed over a part of a prefix is never another's exact cache, in memory or on a disk.

A cache keyed by tokens alone cannot tell it: KV of tokens that did not see all of those before them has the key of KV
that did. So a reply that was allowed to be approximate spoils those of other clients, which asked for nothing of the
kind, and a store keeps it for as long as it lives.

The model here is fake: each row of KV is a digest of all rows before it, and each logit hangs on the exact rows that
are seen. The chosen rows are wrong on purpose: nobody else's reply may show it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import StepPlan
from radixlm.runtime.model.batch import Batch, Float32Array, UInt8Array

from ..runtime.fake_model import EOS, alone
from ..runtime.fake_tier import Served, processes
from ..runtime.sparse_rows import loaded_rows

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CONTEXT_LENGTH = 160


class WrongRows:
    """Gives requests of an engine over a directory rows which are not theirs."""

    def __init__(self, served: Served) -> None:
        self.bench = served.bench
        self.bench.model.max_missing = CONTEXT_LENGTH
        self.num_opened = 0

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        self.bench.model.read_pages(page_ids, out)

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        self.bench.model.write_pages(page_ids, pages)
        self.num_opened += 1

    def add(self, name: str, ids: list[int], start: int, num_rows: int) -> Request:
        """A request that has few rows of its prompt from `start` on, but for the last token, as if from the disk."""
        request = self.bench.request(name, ids, GREEDY)
        span = SparseSpan(start, num_rows, tuple(ids[:-1]))
        rows = loaded_rows(ids, span, self, np.full(PAGE_SIZE, 987654321, np.uint64).tobytes())
        self.bench.core._scheduler.add(request, rows=rows)
        return request


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """An engine over a directory; opened again, it is another process."""
    with processes(tmp_path / "store") as open_again:
        yield open_again


def test_strangers_and_later_turns_get_the_replies_of_nobody_but_themselves(serve: Callable[..., Served]) -> None:
    chance = random.Random(6)
    histories: list[list[int]] = []  # prompts that were pruned, and their replies after them
    num_pruned = num_other = num_preempted = 0
    for process in range(2):
        served = serve(num_pages=24, context_length=CONTEXT_LENGTH)
        wrong, bench = WrongRows(served), served.bench
        for turn in range(6):
            exact: dict[str, list[int]] = {}
            for i in range(4):
                name = f"{process} {turn} {i}"
                history = chance.choice(histories) if histories and chance.random() < 0.6 else []
                ids = [*history, *(chance.randrange(EOS) for _ in range(20))][-100:]
                if chance.random() < 0.5:
                    exact[name] = ids
                    bench.add(name, ids, GREEDY)
                    continue
                start = len(bench.cache.match(ids).pages) // 2 * 16
                num_rows = chance.randint(1, len(ids) - 1 - start)
                histories.append(ids)
                wrong.add(name, ids, start, num_rows)
                exact[f"{name} too"] = ids
                bench.add(f"{name} too", ids, GREEDY)
            served.run()
            served.settle()
            for name, ids in exact.items():
                assert bench.tokens(name) == alone(ids, GREEDY, context_length=CONTEXT_LENGTH), name
            for name in {name.removesuffix(" too") for name in exact} - set(exact):
                ids = exact[f"{name} too"]
                num_other += bench.tokens(name) != alone(ids, GREEDY, context_length=CONTEXT_LENGTH)
                ids += bench.tokens(name)
        num_pruned += wrong.num_opened
        num_preempted += bench.core.num_preemptions
    assert num_pruned > 15 and num_other > 10, "the wrong rows were not looked at"
    assert num_preempted, "nobody lost what was pruned"


def test_no_page_that_was_computed_over_a_pruned_prefix_is_found_or_stored(serve: Callable[..., Served]) -> None:
    served = serve(num_pages=24, context_length=CONTEXT_LENGTH)
    wrong, ids = WrongRows(served), [*range(30), *range(30), *range(30)]
    served.bench.add("before", ids[:33], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    served.run()
    request = wrong.add("pruned", ids, 32, 9)
    served.bench.step()
    tainted = set(request.admitted.page_ids[2:])
    while served.bench.core.has_work:
        match = served.bench.cache.match([*request.admitted.token_ids, 0])
        assert match.num_tokens in (32, 33) and not tainted & {*match.pages}
        served.bench.step()
    served.settle()
    history = [*ids, *served.bench.tokens("pruned"), 0]
    assert served.bench.cache.match(history).num_tokens == 33
    served = serve(num_pages=24, context_length=CONTEXT_LENGTH)
    assert sum(1 for _ in served.store.page_keys()) == 2, "the two pages that are exact"
    served.bench.add("later", history, GREEDY)
    served.run()
    assert served.num_loaded("later") <= 32
    assert served.bench.tokens("later") == alone(history, GREEDY, context_length=CONTEXT_LENGTH)


@pytest.mark.parametrize("why", ["forgotten", "numbers that are wrong"])
def test_who_waits_with_rows_that_are_not_to_be_used_any_more_computes_them(
    serve: Callable[..., Served], why: str
) -> None:
    served = serve(num_pages=24, context_length=CONTEXT_LENGTH)
    wrong, ids = WrongRows(served), [*range(30), *range(30)]

    def spoil(batch: Batch, logits: Float32Array) -> None:
        logits[:, 7] = np.nan
        wrong.add("pruned", ids, 0, 9)

    if why == "forgotten":
        wrong.add("pruned", ids, 0, 9)
        served.bench.core.forget(b"")
    else:
        bad = served.bench.add("bad", ids, GREEDY)
        while not bad.num_generated:
            served.bench.step()
        served.bench.model.after = spoil
        served.bench.step()
        served.bench.model.after = lambda batch, logits: None
    served.run()
    assert wrong.num_opened == 0
    assert served.bench.tokens("pruned") == alone(ids, GREEDY, context_length=CONTEXT_LENGTH)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_reply_is_labelled_only_if_some_of_it_came_over_a_part(serve: Callable[..., Served], num_tokens: int) -> None:
    served = serve(num_pages=24, context_length=CONTEXT_LENGTH)
    core, cache = served.bench.core, served.bench.cache
    request = WrongRows(served).add("pruned", ids := [*range(30), *range(30)], 0, 9)
    with cache.begin() as transaction:  # it is admitted, and its step fails
        core._scheduler.schedule(transaction, 0.0)
    while request.num_generated < num_tokens:
        served.bench.step()
    assert request.admitted.sparse is not None
    with cache.begin() as transaction:
        core._scheduler._preempt(request, StepPlan(transaction, 16))
    assert request.num_preemptions == 1
    served.run()
    completion = served.bench.outputs["pruned"][-1].completion
    assert completion is not None
    is_exact = completion.token_ids == tuple(alone(ids, GREEDY, context_length=CONTEXT_LENGTH))
    assert is_exact == (num_tokens == 0) == (completion.usage.pruning is None)
