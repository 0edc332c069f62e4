"""A model of a server that loads models on demand: what it is loaded with, and where it stands.

Knows neither other models nor how it is loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

State = Literal["unloaded", "loading", "loaded", "unloading"]
ANY = "*"


class Worker(Protocol):
    """A loaded model."""

    @property
    def memory_bytes(self) -> int:
        """What its weights, KV cache and states take."""
        ...

    async def stop(self) -> None:
        """End it, once all that is to be kept is on the disk."""
        ...

    async def wait_until_ended(self) -> str:
        """Return why it has ended, whoever ended it."""
        ...


W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded.

    Attributes:
        source: an artifact, or what is compiled into one.
        aliases: other names that it answers to; `*` is any name that no model has.
        is_pinned: it is loaded from the start, and only unloaded when a client asks for that.
        flags: its options, as those of `radixlm serve`.
        store: the directory that keeps its prefixes; None: nothing is kept on disk.
        context_length: tokens of prompt and reply together; None if unknown before it is loaded.
        needed_bytes: what its weights, KV cache and states take; None if unknown before it is loaded.
        too_large: why it can never be loaded; None: it can.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    flags: tuple[str, ...] = ()
    store: str | None = None
    context_length: int | None = None
    needed_bytes: int | None = None
    too_large: str | None = None

    @property
    def listed(self) -> tuple[str, ...]:
        """The names that clients are told."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY))


class Loader(Protocol[W_co]):
    """Loads models."""

    async def open(self) -> None:
        """Get ready, so that the first model loads quickly."""
        ...

    async def close(self) -> None:
        """Free what it has beside the models, which are stopped by now."""
        ...

    async def load(self, spec: ModelSpec, progressed: Callable[[str, float | None], None]) -> W_co:
        """Return a worker that answers. Cancelled, it leaves nothing behind.

        Args:
            progressed: gets the stage of compiling or loading, and the part of it that is done, 0 to 1 if known.

        Raises:
            ModelFailed: it cannot be loaded.
        """
        ...


@dataclass(eq=False)
class Row(Generic[W]):
    """A model of the table; only the table changes it.

    Attributes:
        num_requests: requests that use it or wait for it to load.
        last_used: when the last request ended, or it was loaded.
        keep_alive_s: seconds without a request after which it is unloaded, as a client said; infinity: only to make
            room; None: as the server has it.
        bytes_taken: of the budget.
        error: why it could not be loaded, or ended by itself, the last time.
        num_loads: how often it was loaded.
        is_removed: it is no model of the table any more.
    """

    spec: ModelSpec
    worker: W | None = None
    loading: asyncio.Task[W] | None = None
    unloading: asyncio.Task[None] | None = None
    num_requests: int = 0
    last_used: float = 0.0
    keep_alive_s: float | None = None
    bytes_known: int | None = None
    bytes_taken: int = 0
    stage: str | None = None
    fraction: float | None = None
    error: str | None = None
    num_loads: int = 0
    is_removed: bool = False

    @property
    def state(self) -> State:
        """Unloading ends when the requests that it had have ended."""
        if self.unloading is not None:
            return "unloading"
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.worker is None else "loaded"

    @property
    def is_evictable(self) -> bool:
        """Whether it may make room for another."""
        return self.state == "loaded" and not self.spec.is_pinned

    def loaded(self, worker: W, now: float) -> None:
        """Note that the model is loaded."""
        self.worker, self.error, self.keep_alive_s = worker, None, None
        self.bytes_known = self.bytes_taken = worker.memory_bytes
        self.last_used = now
        self.num_loads += 1


@dataclass
class Lease(Generic[W]):
    """The right to use a loaded model, which is not unloaded until `release` is called; once is enough."""

    row: Row[W]
    worker: W
    _release: Callable[[], None]
    _is_held: bool = True

    def release(self) -> None:
        """Give it back."""
        if self._is_held:
            self._is_held = False
            self._release()
