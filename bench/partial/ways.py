"""Ways to provide the KV of a prefix that is on disk: an engine for each way.

Knows how an engine is assembled, and overrides its decisions where a way says so; not what is requested.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.extras.approximate.row_rates import RowRates
from radixlm.runtime.prefix.rates import Rates

from ..store.disks import load_always, open_store
from ..store.throttled_files import ThrottledFiles

_FOREVER_S = 3600.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Way:
    """A way to serve requests whose prefix is on disk.

    Attributes:
        kv_budget: the share of keys and values that they request.
        decides: the engine chooses the fastest plan; else it loads what is requested, however long that takes.
        has_store: False: all is computed.
    """

    kv_budget: float = 1.0
    decides: bool = True
    has_store: bool = True


RECOMPUTE = "recompute"
WAYS: Mapping[str, Way] = {
    RECOMPUTE: Way(has_store=False),
    "full": Way(decides=False),
    "planner": Way(),
    "25%": Way(0.25),
    "50%": Way(0.5),
    "25% always": Way(0.25, decides=False),
}


class PatientRates(Rates):
    """Rates at which computing takes so long that every load is waited for."""

    def compute_s(self, start: int, stop: int) -> float | None:
        """Return more seconds than any part takes."""
        return _FOREVER_S


def choose_always(*_: object, **__: int) -> float:
    """Read selected rows whenever a request asks for them, and wait for them."""
    return _FOREVER_S


def read_parts_always(tier: Any) -> None:
    """Make a tier read the share that a request asks for, whatever its calibration allows, however long it takes."""
    tier.loader.plan, tier.extra.sources.plan = load_always, choose_always
    tier.extra.sources.least_share, tier.extra.sources.max_dropped_attention = 0.0, 1.0
    tier.extra.offers._rates = PatientRates()
    tier.extra.sources.rates = RowRates(PatientRates())


@contextmanager
def engine_of(way: Way, artifact: Artifact, directory: Path, files: ThrottledFiles | None) -> Iterator[Engine]:
    """Yield an engine that serves that way from `directory/store` on the disk of `files`, and changes nothing there."""
    if not way.has_store:
        with Engine(artifact, max_num_seqs=2) as engine:
            yield engine
        return
    store = open_store(artifact, directory / "store", files)
    with Engine(artifact, max_num_seqs=2, store=store, kv_budget=1.0) as engine:
        tier = _tier(engine)
        tier.writer.max_bytes = 0  # nothing is saved
        tier.extra.observer.used = tier.extra.observer.used_part = lambda *_, **__: None
        tier.extra.sources.promoter.used = lambda prefix: None
        if not way.decides:
            tier.loader.plan = load_always
            if way.kv_budget < 1:
                read_parts_always(tier)
        yield engine
        engine._loop.call(lambda core: tier.saver.forget())


def settle(engine: Engine) -> None:
    """Wait until the disk has everything, including rewritten runs, and all read-ahead has finished."""
    tier = _tier(engine)

    def is_busy() -> bool:
        is_saving = tier.saver.has_pending and tier.writer.max_bytes > 0
        is_learning = tier.extra is not None and tier.extra.sources.num_prefetches > 0
        return (
            is_saving
            or is_learning
            or not tier.writer.is_idle
            or (tier.extra is not None and tier.extra.observer.is_ready)
        )

    while engine._loop.call(lambda core: is_busy()):
        time.sleep(_POLL_S)


def forget_memory(engine: Engine) -> None:
    """Forget all prefixes in memory, so that the next request finds its prefix on disk only."""
    engine._loop.call(lambda core: core.cache.clear())


def known_bytes(engine: Engine) -> int:
    """Return the bytes in memory for runs on disk: probe keys and orders."""
    extra = _tier(engine).extra
    return 0 if extra is None else int(extra.sources.known.num_bytes)


def _tier(engine: Engine) -> Any:
    """Return the disk tier of an engine that has one."""
    tier = engine._core.tier
    assert tier is not None
    return tier
