"""Loads that are always worth it: test models compute in no time. Whether it is worth it says `test_prefix_plan.py`."""

from __future__ import annotations

import pytest
from radixlm.runtime.prefix.prefix_loader import PrefixLoader
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates


def load_always(monkeypatch: pytest.MonkeyPatch, deadline_s: float = 60.0) -> None:
    """Have requests wait for whatever the disk has, for so long."""

    def always(num_in_memory: int, num_on_disk: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
        segments = (0, num_in_memory, "memory"), (num_in_memory, num_on_disk, "front")
        return PrefixPlan.of(*segments, deadline_s=deadline_s)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always))
