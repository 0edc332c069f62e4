"""Ways to have the keys and values of a prefix that is on disk: as engines that answer requests each in its own way.

Knows how an engine is put together, and takes what it decides out of its hands where a way says so; not what is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.ordered_reader import OpenRun
from radixlm.runtime.store.ordered_run import RunOrder
from radixlm.runtime.store.rewriting import rewrite

from ..store.disks import load_always, open_store
from ..store.throttled_files import ThrottledFiles

_FOREVER_S = 3600.0
_POLL_S = 0.01


@dataclass(frozen=True)
class Way:
    """How requests are answered whose prefix is on disk.

    Attributes:
        kv_budget: the share of keys and values that they ask for.
        decides: the engine says what is worth it; else it does what is asked for, however long that takes.
        in_text_order: the same tokens are read from runs that lie as in the text.
        has_store: False: all is computed.
    """

    kv_budget: float = 1.0
    decides: bool = True
    in_text_order: bool = False
    has_store: bool = True


RECOMPUTE = "recompute"
WAYS: Mapping[str, Way] = {
    RECOMPUTE: Way(has_store=False),
    "full": Way(decides=False),
    "planner": Way(),
    "25%": Way(0.25),
    "50%": Way(0.5),
    "25% always": Way(0.25, decides=False),
    "25% in text": Way(0.25, decides=False, in_text_order=True),
}


class PatientRates(Rates):
    """Computing takes so long that every load is waited for."""

    def compute_s(self, start: int, stop: int) -> float | None:
        """Longer than any part takes."""
        return _FOREVER_S


def choose_always(*_: object, **__: int) -> float:
    """Read chosen rows whenever a request asks for them, and wait for them."""
    return _FOREVER_S


@contextmanager
def engine_of(way: Way, artifact: Artifact, directory: Path, files: ThrottledFiles | None) -> Iterator[Engine]:
    """An engine that answers that way from `directory/store` on the disk of `files`, and changes nothing there."""
    if not way.has_store:
        with Engine(artifact, max_num_seqs=2) as engine:
            yield engine
        return
    orders = _orders(directory) if way.in_text_order else None
    place = directory / ("store_in_text" if way.in_text_order else "store")
    store = open_store(artifact, place, files)
    with Engine(artifact, max_num_seqs=2, store=store, kv_budget=1.0) as engine:
        tier = _tier(engine)
        tier.writer.max_bytes = 0  # nothing is saved
        tier.chosen.used = lambda *_, **__: None
        if not way.decides:
            tier.loader.plan = load_always
            if way.kv_budget < 1:
                tier._parts.reads.plan, tier._parts.reads.rates = choose_always, PatientRates()
        if orders is not None:
            tier._parts.reads.store = _StoreInText(store, orders)
        yield engine
        engine._loop.call(lambda core: tier._saver.forget())


def settle(engine: Engine) -> None:
    """Wait until the disk has all that it is to have, rewritten runs with it, and what is read for later is there."""
    tier = _tier(engine)

    def is_busy() -> bool:
        is_saving = tier._saver.has_pending and tier.writer.max_bytes > 0
        is_learning = tier._parts is not None and bool(tier._parts.reads.prefetch)
        return is_saving or is_learning or not tier.writer.is_idle or (tier.chosen is not None and tier.chosen.is_ready)

    while engine._loop.call(lambda core: is_busy()):
        time.sleep(_POLL_S)


def forget_memory(engine: Engine) -> None:
    """Have the next request find its prefix on disk only."""
    engine._loop.call(lambda core: core.cache.clear())


def known_bytes(engine: Engine) -> int:
    """What is kept in memory of runs on disk: probe keys and orders."""
    parts = _tier(engine)._parts
    return 0 if parts is None else int(parts.reads.known.num_bytes)


def heads_of(artifact: Artifact, token_ids: list[int]) -> list[PageKey]:
    """The full pages of a prompt."""
    identity, heads, parent = StoreIdentity.of(artifact.manifest), list[PageKey](), NO_PARENT
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        heads.append(
            PageKey.of(identity, b"", parent, token_ids[start : start + PAGE_SIZE], bytes(PAGE_SIZE)),
        )
        parent = heads[-1].key
    return heads


def lay_as_text(store: PageStore, heads: list[PageKey], orders: dict[str, RunOrder]) -> None:
    """Write the runs that `heads` begin with again in the order of the text; `orders` has, by their last page, that in
    which they were, and those that lie so already."""
    while (run := store.open_ordered(heads)) is not None:
        order, key = run.order(), run.header.key.hex()
        assert order is not None
        run.close()
        mine, heads = heads[: run.header.num_pages], heads[run.header.num_pages :]
        if key not in orders:
            scores = -np.broadcast_to(np.arange(order.shape[-1], dtype=np.float64), order.shape)
            assert rewrite(store, mine, scores, probe_head=run.header.probe_head).stored
            orders[key] = order


def save_orders(directory: Path, orders: Mapping[str, RunOrder]) -> None:
    """Keep what `lay_as_text` found, for `engine_of`."""
    np.savez(directory / "orders.npz", allow_pickle=False, **orders)


def _orders(directory: Path) -> dict[str, RunOrder]:
    with np.load(directory / "orders.npz") as orders:
        return {key: orders[key] for key in orders}


def _tier(engine: Engine) -> Any:
    tier = engine._core.tier
    assert tier is not None
    return tier


class _RunInText:
    """A run as in the text, whose readers are told the order of importance: they choose as ever, and read elsewhere."""

    def __init__(self, run: OpenRun, order: RunOrder) -> None:
        self._run, self._order = run, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def order(self) -> RunOrder | None:
        """Not the file's, but that is read from there."""
        return None if self._run.order() is None else self._order

    def first(self, num_tokens: int) -> npt.NDArray[np.uint16]:
        """Nothing: what ranks first lies anywhere, and is read by `at`."""
        return self._order[..., :0]


class _StoreInText:
    """Opens such runs."""

    def __init__(self, store: PageStore, orders: Mapping[str, RunOrder]) -> None:
        self._store, self._orders = store, orders

    def open_ordered(self, heads: list[PageKey], **kept: Any) -> _RunInText | None:
        """As the store's own, of a run whose order is known."""
        run = self._store.open_ordered(heads, **kept)
        return None if run is None else _RunInText(run, self._orders[run.header.key.hex()])
