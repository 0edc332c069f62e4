"""An extra offers rows to requests and observes prompts, through hooks of a tier; what it breaks, it breaks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.radix_node import Node
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.prefix.disk_tier import DiskTier
from radixlm.runtime.prefix.loaded_prefix import PrefixLookup

from ..fake_model import alone
from ..fake_tier import Served, processes
from ..sparse_rows import loaded_rows

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3] * 4 + [7, 7]  # 66 tokens: four full pages
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@dataclass
class FakeExtra:
    """Offers to those whose names begin with `part`, and notes what it is told."""

    tier: DiskTier
    num_read_bytes: int = 1000
    waiting: dict[str, PrefixLookup] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    is_ready: bool = False

    @property
    def offers(self) -> FakeOffers:
        return FakeOffers(self)

    @property
    def observer(self) -> FakeObserver:
        return FakeObserver(self)

    def stats(self) -> object:
        return list(self.told)


@dataclass
class FakeOffers:
    extra: FakeExtra

    def begin(self, wanted: PrefixLookup) -> bool:
        if wanted.name.startswith("part"):
            self.extra.waiting[wanted.name] = wanted
        return wanted.name in self.extra.waiting

    def abandon(self, name: str) -> None:
        self.extra.waiting.pop(name, None)

    def end(self, namespace: bytes | None = None) -> None:
        for wanted in self.extra.waiting.values():
            self.extra.tier.queue.post(lambda wanted=wanted: self.extra.tier.load_pages(wanted))
        self.extra.waiting.clear()

    def read_ahead(self) -> None:
        self.extra.told.append("reads ahead")

    def close(self) -> None:
        self.extra.told.append("offers closed")


@dataclass
class FakeObserver:
    extra: FakeExtra

    @property
    def is_ready(self) -> bool:
        return self.extra.is_ready

    def advance(self) -> None:
        self.extra.is_ready = False
        self.extra.told.append("stored")

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        if sequence.sparse is not None:
            self.extra.told.append(f"used {sequence.sparse.num_rows} rows")
            return
        self.extra.told.append(f"used {sequence.num_computed}, {num_reused} found")
        if sequence.token_ids[0] == 13:
            raise RuntimeError("it is no more than a hint")
        self.extra.is_ready = True

    def leaving(self, node: Node) -> None:
        self.extra.told.append("leaving")

    def forget(self, namespace: bytes | None = None) -> None:
        self.extra.told.append("forgot")

    def close(self) -> None:
        self.extra.told.append("observer closed")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with processes(tmp_path / "store") as open_again:
        yield lambda **options: open_again(make_extra=FakeExtra, **options)


def extra_of(served: Served) -> FakeExtra:
    extra = served.tier.extra
    assert isinstance(extra, FakeExtra)
    return extra


def ask(served: Served, name: str, ids: list[int] = PROMPT) -> None:
    served.bench.add(name, ids, GREEDY)
    served.run()
    assert served.bench.tokens(name) == alone(ids, GREEDY)


def test_a_request_waits_for_an_offer_and_begins_with_its_rows(serve: Callable[..., Served]) -> None:
    served = serve()
    extra = extra_of(served)
    served.bench.add("part", PROMPT, GREEDY)
    served.bench.step()
    assert served.tier.stats().num_waiting == 1 and not served.bench.outputs.get("part")
    served.bench.model.max_missing = 64
    page = np.full(PAGE_SIZE, 987654321, np.uint64).tobytes()
    rows = loaded_rows(PROMPT, SparseSpan(0, 32, tuple(PROMPT[:64])), served.bench.model, page)
    served.tier.go_on(extra.waiting.pop("part"), rows)
    served.run()
    completion = served.bench.outputs["part"][-1].completion
    assert completion is not None and completion.usage.pruning is not None
    assert completion.usage.pruning.loaded == 0.5
    assert served.bench.model.num_tokens == len(PROMPT) - 64 + 4 - 1, "tokens of the offer were computed"
    assert "used 32 rows" in extra.told
    assert served.tier.stats().num_waiting == 0 and served.tier.stats().extra == extra.told


def test_a_request_without_an_offer_is_served_from_pages(serve: Callable[..., Served]) -> None:
    ask(serve(), "cold")
    served = serve()
    ask(served, "warm")
    assert served.num_loaded("warm") == 64 and "used 66, 64 found" in extra_of(served).told
    assert served.tier.stats().num_read_bytes > 1000, "its own, too"


def test_requests_that_wait_for_an_offer_go_on_when_it_is_dropped_and_leave_when_they_end(
    serve: Callable[..., Served],
) -> None:
    ask(serve(), "cold")
    served = serve()
    extra = extra_of(served)
    for name in ("part one", "part two"):
        served.bench.add(name, PROMPT, GREEDY)
    served.bench.core.abort("part two")
    assert [*extra.waiting] == ["part one"]
    served.bench.core.forget(b"another")  # drops all offers of this one
    served.run()
    assert served.bench.tokens("part one") == alone(PROMPT, GREEDY) and served.num_loaded("part one") == 64
    assert not extra.waiting and "forgot" in extra.told


def test_what_was_learned_is_stored_when_nothing_else_is_to_be(serve: Callable[..., Served]) -> None:
    served = serve()
    extra = extra_of(served)
    ask(served, "cold")
    served.settle()
    assert extra.told.count("stored") == 1 and not extra.is_ready
    assert extra.told.index("stored") > extra.told.index("used 66, 0 found")


def test_an_observer_that_raises_costs_no_request(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    ask(served, "unlucky", [13, *PROMPT])
    assert "what a prompt looked at could not be noted" in caplog.text
    served.settle()
    assert served.tier.stats().num_pages == len([13, *PROMPT]) // PAGE_SIZE


def test_an_extra_hears_of_pages_that_leave_and_of_the_end(serve: Callable[..., Served]) -> None:
    served = serve(num_pages=8)
    extra = extra_of(served)
    for number in range(4):
        ask(served, f"other {number}", [number, *PROMPT])
        served.settle()
    assert "leaving" in extra.told and "reads ahead" not in extra.told
    served.close()
    assert extra.told[-2:] == ["offers closed", "observer closed"]
