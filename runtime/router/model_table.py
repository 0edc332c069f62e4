"""The table of models of a server that loads them on demand, within a memory budget.

Knows states, uses and bytes, not processes, files or HTTP. One event loop owns a table. A `Loader` loads the models, in
processes of their own or otherwise.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..errors import EngineClosed, InvalidParameter, ModelFailed, ModelTooLarge, RadixLMError
from .model_row import ANY, Lease, Loader, ModelSpec, Row, W

T = TypeVar("T")
_LOOKS_S = 1.0  # maximum time between checks for unused models


@dataclass
class ModelTable(Generic[W]):
    """All models of a server, of which some are loaded.

    Args:
        memory_bytes: budget for weights, KV caches and states of all loaded models; None: no limit.
        unload_after_s: seconds without a request after which a model is unloaded; None: never.
        clock: in seconds; only differences count.

    Raises:
        InvalidParameter: there is no model, or two have the same name.
    """

    specs: Sequence[ModelSpec]
    loader: Loader[W]
    memory_bytes: int | None = None
    unload_after_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    log: Callable[[str], None] = lambda text: None
    rows: tuple[Row[W], ...] = field(init=False)

    def __post_init__(self) -> None:
        if not self.specs:
            raise InvalidParameter("there is no model to serve; name one")
        self.rows = ()
        self._leaving: tuple[Row[W], ...] = ()  # removed, and not unloaded yet
        self._by_name: dict[str, Row[W]] = {}
        for spec in self.specs:
            self.add(spec)
        self._waiting: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._making_room = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, spec: ModelSpec) -> Row[W]:
        """Add a model, without loading it.

        Raises:
            InvalidParameter: another model has one of its names.
        """
        row = Row[W](spec)
        names = dict.fromkeys(spec.names, row)
        for name in names:
            if name in self._by_name:
                raise InvalidParameter(f"two models have the name {name!r:.100}; rename one")
        self._by_name |= names
        self.rows = (*self.rows, row)
        return row

    def remove(self, row: Row[W]) -> asyncio.Future[None]:
        """Remove a model from the table, so that no later request finds it.

        Returns a future that is done when its requests have ended and it is unloaded.
        """
        self._by_name = {name: each for name, each in self._by_name.items() if each is not row}
        self.rows = _without(row, self.rows)
        self._leaving = (*self._leaving, row)
        row.is_removed = True
        return asyncio.shield(self._begin(self._leave(row)))

    def named(self, name: str | None) -> Row[W] | None:
        """Return the model that a request names; the first if it names none. None if there is no such model.

        Ollama's clients call a model without a tag `NAME:latest`.
        """
        if not name:
            return self.rows[0]
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        return found or self._by_name.get(ANY)

    @property
    def bytes_taken(self) -> int:
        """Bytes of all models that are loaded, loading or unloading, removed ones included."""
        return sum(row.bytes_taken for row in self._present)

    async def lease(self, row: Row[W], *, is_use: bool = True) -> Lease[W]:
        """Return the right to use a model. Loads it first if needed.

        Args:
            is_use: count as a use of the model, which postpones its unloading. Others do not wait while it unloads,
                because its last requests may wait for them.

        Raises:
            ModelTooLarge: it does not fit into the memory.
            ModelFailed: it could not be loaded, or was removed.
            EngineClosed: the table stops its workers.
        """
        while row.unloading is not None and (is_use or row.worker is None):
            await asyncio.shield(row.unloading)
        if row.is_removed:
            raise ModelFailed(f"{row.spec.name} was deleted")
        row.num_requests += 1
        try:
            worker = row.worker
            if worker is None:
                worker = await self._loaded(self._loading(row))
        except BaseException:
            self._release(row, is_use=False)
            raise
        return Lease(row, worker, lambda: self._release(row, is_use=is_use))

    async def unload(self, row: Row[W]) -> None:
        """Unload a model when its present requests have ended. Later requests load it again."""
        if row.loading is not None:
            with suppress(RadixLMError):
                await asyncio.shield(row.loading)
        if row.worker is not None or row.unloading is not None:
            await asyncio.shield(self._unloading(row))

    def keep_alive(self, row: Row[W], seconds: float) -> None:
        """Set how long a model stays loaded without a request. 0: unload it now; infinity: only to make room."""
        row.keep_alive_s = seconds
        self._unload_if_unwanted(row)

    def expires_in_s(self, row: Row[W]) -> float:
        """Return the seconds until a model is unloaded if no request comes. Infinity if it stays."""
        kept_s = self.unload_after_s if row.keep_alive_s is None else row.keep_alive_s
        if kept_s is None or row.spec.is_pinned:
            return math.inf
        return kept_s if row.num_requests else kept_s - (self.clock() - row.last_used)

    def unload_unused(self) -> None:
        """Start to unload the models whose time without a request is over."""
        for row in self.rows:
            if row.is_evictable and not row.num_requests and self.expires_in_s(row) <= 0:
                self._unloading(row)

    async def run(self) -> None:
        """Load the pinned models, and unload unused ones until this is cancelled."""
        self._loop = asyncio.get_running_loop()
        await self.loader.open()
        for row in self.rows:
            if row.spec.is_pinned and row.worker is None:
                self._loading(row)
        while True:
            await asyncio.sleep(min(_LOOKS_S, (self.unload_after_s or _LOOKS_S) / 4))
            self.unload_unused()

    def stop_soon(self) -> None:
        """Start to stop all workers, from any thread. Their requests end with an error."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop)

    async def close(self) -> None:
        """Stop all workers, also busy ones. No model can be leased afterwards."""
        loading = [row.loading for row in self._present if row.loading is not None]
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        workers = [row.worker for row in self._present if row.worker is not None]
        unloading = [row.unloading for row in self._present if row.unloading is not None]
        for row in self._present:
            row.worker, row.bytes_taken = None, 0
        self._changed()
        await asyncio.gather(*(worker.stop() for worker in workers), *unloading, return_exceptions=True)
        await self.loader.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise AssertionError unless the counts agree with the states."""
        for row in self._present:
            assert row.num_requests >= 0, row
            assert row.bytes_taken == 0 or row.state != "unloaded", row
        stays = self._bytes_staying
        assert self.memory_bytes is None or stays <= self.memory_bytes, f"{stays} bytes of {self.memory_bytes}"

    @property
    def _present(self) -> tuple[Row[W], ...]:
        """The rows that can have a worker: those of the table, and removed ones until they are unloaded."""
        return (*self.rows, *self._leaving)

    @property
    def _bytes_staying(self) -> int:
        return sum(row.bytes_taken for row in self._present if row.unloading is None)

    async def _leave(self, row: Row[W]) -> None:
        try:
            await self.unload(row)
        finally:
            self._leaving = _without(row, self._leaving)
            self._changed()

    def _stop(self) -> None:
        for loading in [row.loading for row in self._present if row.loading is not None]:
            loading.cancel()
        for worker in [row.worker for row in self._present if row.worker is not None]:
            self._begin(worker.stop())

    def _release(self, row: Row[W], *, is_use: bool) -> None:
        row.num_requests -= 1
        if is_use:
            row.last_used = self.clock()
        self._unload_if_unwanted(row)
        self._changed()

    def _unload_if_unwanted(self, row: Row[W]) -> None:
        """Start to unload a model with a `keep_alive` of 0, unless requests use it."""
        if row.keep_alive_s == 0 and not row.num_requests and row.state == "loaded":
            self._unloading(row)

    def _loading(self, row: Row[W]) -> asyncio.Task[W]:
        """Return the task that loads a model; start it if needed."""
        if row.loading is None:
            row.loading = self._begin(self._load(row))
        return row.loading

    async def _loaded(self, loading: asyncio.Task[W]) -> W:
        """Wait for a worker that others may wait for, too."""
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():  # not this request, but loading was cancelled
                raise EngineClosed("the server is stopping; send the request again later") from None
            raise

    def _unloading(self, row: Row[W]) -> asyncio.Task[None]:
        """Return the task that unloads a model; start it if needed."""
        if row.unloading is None:
            row.unloading = self._begin(self._unload(row))
        return row.unloading

    async def _load(self, row: Row[W]) -> W:
        row.stage, row.fraction = "memory", None
        earlier = {each for each in self._leaving if each is not row and each.spec.name == row.spec.name}
        try:
            while not earlier.isdisjoint(self._leaving):  # such a model may have the same store open
                await self._wait_for_change()
            async with self._making_room:  # in the order of the requests
                row.bytes_taken = await self._make_room(row)
            worker = await self.loader.load(row.spec, lambda stage, fraction: _note(row, stage, fraction))
        except BaseException as error:
            row.bytes_taken = 0
            if isinstance(error, Exception):
                row.error = str(error) if isinstance(error, RadixLMError) else "internal error; see the log"
                self.log(f"{row.spec.name} is not loaded: {error}")
            raise
        else:
            row.loaded(worker, self.clock())
            self._begin(self._watch(row, worker))
            self.log(f"{row.spec.name} is loaded")
            self._evict(0, spared=row)  # if it takes more memory than was estimated
            return worker
        finally:
            row.loading = row.stage = row.fraction = None
            self._changed()

    async def _make_room(self, row: Row[W]) -> int:
        """Unload other models until one fits into the budget, and return its bytes.

        Raises:
            ModelTooLarge: it does not fit beside the pinned models.
        """
        if row.spec.too_large is not None:
            raise ModelTooLarge(row.spec.too_large)
        needed = row.bytes_known if row.bytes_known is not None else row.spec.needed_bytes or 0
        while self.memory_bytes is not None and self.bytes_taken + needed > self.memory_bytes:
            pinned = sum(other.bytes_taken for other in self.rows if other.spec.is_pinned and other is not row)
            if needed + pinned > self.memory_bytes:
                also = f", of which pinned models take {pinned / 1e9:.2f} GB" if pinned else ""
                raise ModelTooLarge(
                    f"{row.spec.name} needs {needed / 1e9:.2f} GB for weights, KV cache and states, and the memory of "
                    f"all models is {self.memory_bytes / 1e9:.2f} GB{also}; raise --memory-gb, or give the model a "
                    "smaller --kv-cache-gb or --context-length"
                )
            self._evict(needed)
            await self._wait_for_change()
        return needed

    def _evict(self, needed: int, spared: Row[W] | None = None) -> None:
        """Start to unload models until `needed` bytes will be free: models without requests first, then those without
        an endless `keep_alive`, then the least recently used.

        Args:
            spared: a model that is not unloaded.
        """
        stays = self._bytes_staying
        victims = sorted(
            (row for row in self.rows if row.is_evictable and row is not spared),
            key=lambda row: (row.num_requests > 0, row.keep_alive_s == math.inf, row.last_used),
        )
        for victim in victims:
            if self.memory_bytes is None or stays + needed <= self.memory_bytes:
                return
            stays -= victim.bytes_taken
            self._unloading(victim)

    async def _unload(self, row: Row[W]) -> None:
        try:
            while row.num_requests and row.worker is not None:
                await self._wait_for_change()
            worker, row.worker = row.worker, None
            if worker is not None:
                await worker.stop()
            self.log(f"{row.spec.name} is unloaded")
        finally:
            row.bytes_taken, row.unloading = 0, None
            self._changed()

    async def _watch(self, row: Row[W], worker: W) -> None:
        """Record that a worker has ended by itself."""
        reason = await worker.wait_until_ended()
        if row.worker is worker:
            row.worker, row.error = None, reason
            row.bytes_taken = 0
            self.log(f"{row.spec.name} has ended: {reason}")
            self._changed()

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RadixLMError):
            self.log(f"internal error: {error!r}")

    async def _wait_for_change(self) -> None:
        """Wait until the state of any model changes."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _changed(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)


def _without(row: Row[W], rows: tuple[Row[W], ...]) -> tuple[Row[W], ...]:
    return tuple(each for each in rows if each is not row)


def _note(row: Row[W], stage: str, fraction: float | None) -> None:
    row.stage, row.fraction = stage, fraction
