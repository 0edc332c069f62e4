"""What a prompt costs is measured at both ends of a context, and once its pages are there."""

from __future__ import annotations

import pytest
from radixlm.runtime.batch import Batch
from radixlm.runtime.load_planner import LoadPlanner
from radixlm.runtime.page_pool import PagePool
from radixlm.runtime.prefill_measure import measure_prefill

from .fake_model import FakeModel


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


def test_both_ends_of_a_context_are_measured_without_the_system_finding_its_pages() -> None:
    machine, planner, pool = Machine(64), LoadPlanner(), PagePool(64)
    measure_prefill(machine.model, pool, planner, context_length=1024, max_num_tokens=512, clock=lambda: machine.now)
    assert pool.num_free == 64
    for start, stop in ((0, 1024), (0, 128), (896, 1024)):
        assert planner.compute_s(start, stop) == pytest.approx(
            (stop - start) * (0.001 + 0.5e-6 * (start + stop)), rel=0.01
        )


def test_a_model_that_fails_leaves_nothing_measured(caplog: pytest.LogCaptureFixture) -> None:
    machine, planner = Machine(8), LoadPlanner()

    def fail(batch: Batch) -> None:
        raise RuntimeError("no memory")

    machine.model.before = fail
    measure_prefill(
        machine.model, PagePool(8), planner, context_length=96, max_num_tokens=24, clock=lambda: machine.now
    )
    assert planner.compute_s(0, 96) is None and "could not be measured" in caplog.text
