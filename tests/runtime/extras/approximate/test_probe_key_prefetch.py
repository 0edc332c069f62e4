"""Probe keys are read while the disk is idle, if the first request for a prefix is quicker without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.prefix.rates import Rates

from .eager_parts import choose_always

WAIT_S = 30.0  # only a hang takes that long
PREFIX = [5 + i * i % 200 for i in range(192)]  # twelve pages
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)


def asked(number: int) -> list[int]:
    return [*PREFIX, *(7 + (number * 31 + i * 11) % 150 for i in range(9))]


def wait(engine: Engine, is_done: Callable[[Any], bool]) -> None:
    """Until the tier is; the question is asked between two steps."""
    deadline = time.monotonic() + WAIT_S
    while not engine._loop.call(lambda core: is_done(core.tier)):
        assert time.monotonic() < deadline, "it is never done"
        time.sleep(0.01)


def is_saved(tier: Any) -> bool:
    return bool(tier.writer.is_idle and not tier.saver.has_pending and not tier.extra.observer.is_ready)


def test_keys_that_no_request_waits_for_are_there_for_the_next(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def plan_chosen(start: int, stop: int, rates: Rates, *, num_bytes: int, **sizes: int) -> float | None:
        planned.append(num_bytes)
        return 1.0 if num_bytes < max(planned) else None  # with keys that are there

    choose_always(monkeypatch, plan_chosen)
    settings = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 2, "store": tmp_path / "store", "kv_budget": 1.0}
    with Engine(tiny_artifact, **settings) as engine:  # type: ignore[arg-type]
        for number in range(3):
            engine.generate(asked(number), PARAMS)
            wait(engine, is_saved)
    with Engine(tiny_artifact, **settings) as engine:  # type: ignore[arg-type]
        # or the order is another by then
        engine._loop.call(lambda core: setattr(core.tier.extra.observer, "used", lambda *_, **__: None))
        first = engine.generate(asked(7), PARAMS, kv_budget=0.5)
        assert first.usage.pruning is None and first.usage.cached_tokens == 192
        wait(engine, lambda tier: not tier.extra.sources.num_prefetches)
        engine._loop.call(lambda core: core.cache.clear())
        second = engine.generate(asked(8), PARAMS, kv_budget=0.5)
        assert second.usage.pruning is not None and second.usage.pruning.loaded == 0.5
        stats = engine.stats().tier
        assert stats is not None and (stats.extra.chosen.num_refused, stats.extra.chosen.num_loaded) == (1, 1)
    assert len(planned) == 3 and planned[0] > planned[1] == planned[2]
