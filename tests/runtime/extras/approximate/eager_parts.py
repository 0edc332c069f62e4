"""Loads of parts that are always worth it: test models compute in no time. See `test_row_rates.py` for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from radixlm.runtime.extras.approximate.pruned_source import PrunedSources
from radixlm.runtime.prefix.rates import Rates

from ...eager_loads import load_always


def choose_always(monkeypatch: pytest.MonkeyPatch, plan: Callable[..., float | None] = lambda *_, **__: 1.0) -> None:
    """Have requests wait for chosen rows where they said that those are enough, or as `plan` says; else for all."""
    load_always(monkeypatch)
    monkeypatch.setattr(PrunedSources, "plan", staticmethod(plan))
    monkeypatch.setattr(Rates, "compute_s", lambda *_: 60.0)
