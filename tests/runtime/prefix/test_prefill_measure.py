"""What a prompt costs is measured at both ends of a context, and once its pages are there."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.prefix.prefill_measure import measure_prefill
from radixlm.runtime.prefix.rates import Rates

from ..fake_model import FakeModel


class Machine:
    """A model whose tokens take `0.001 + 1e-6 * position` seconds, and the first on a page of the pool far longer."""

    def __init__(self, num_pages: int) -> None:
        self.model = FakeModel(num_pages)
        self.model.before = self._compute
        self.now = 0.0
        self._touched: set[int] = set()

    def _compute(self, batch: Batch) -> None:
        for position in batch.arrays.positions:
            self.now += 0.001 + 1e-6 * int(position)
        pages = {int(page) for page in batch.arrays.page_table[0]}
        self.now += 0.05 * len(pages - self._touched)
        self._touched |= pages


def measured(machine: Machine, rates: Rates, cache: PrefixCache, sizes: dict[str, int]) -> list[int]:
    """The tokens of each step, one after the other; pages are free again after each."""
    num_free, steps, before = cache.pool.num_free, [], 0
    measuring = measure_prefill(machine.model, cache, rates, **sizes, clock=lambda: machine.now)
    for _ in measuring:
        assert cache.pool.num_free == num_free
        steps.append(machine.model.num_tokens - before)
        before = machine.model.num_tokens
    return steps


def test_both_ends_of_a_context_are_measured_without_the_system_finding_its_pages() -> None:
    machine, rates, cache = Machine(64), Rates(), PrefixCache(PagePool(64))
    sizes = {"context_length": 1024, "max_num_tokens": 512}
    assert measured(machine, rates, cache, sizes) == [32, 128, 32, 128]
    for start, stop in ((0, 1024), (0, 128), (896, 1024)):
        assert rates.compute_s(start, stop) == pytest.approx(
            (stop - start) * (0.001 + 0.5e-6 * (start + stop)), rel=0.01
        )


def test_pages_of_requests_are_left_alone_and_too_few_free_ones_end_it() -> None:
    machine, rates, cache = Machine(64), Rates(), PrefixCache(PagePool(64))
    taken = set(cache.pool.allocate(40))
    machine.model.before = lambda batch: taken_are_not_in(batch, taken)
    assert measured(machine, rates, cache, {"context_length": 1024, "max_num_tokens": 512}) == [32, 128]


def taken_are_not_in(batch: Batch, taken: set[int]) -> None:
    used = {int(page) for page in batch.arrays.page_table[0]} | {int(slot) // 16 for slot in batch.arrays.slots}
    assert not used & taken


def test_a_model_that_fails_leaves_nothing_measured(caplog: pytest.LogCaptureFixture) -> None:
    machine, rates, cache = Machine(8), Rates(), PrefixCache(PagePool(8))

    def fail(batch: Batch) -> None:
        raise RuntimeError("no memory")

    machine.model.before = fail
    assert measured(machine, rates, cache, {"context_length": 96, "max_num_tokens": 24}) == []
    assert rates.compute_s(0, 96) is None and "could not be measured" in caplog.text
    assert cache.pool.num_free == 8
