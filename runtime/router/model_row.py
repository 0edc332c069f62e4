"""One model of a server that loads models on demand: its options and its state.

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
        """Bytes of its weights, KV cache and states."""
        ...

    async def stop(self) -> None:
        """Stop it after it has saved its store to disk."""
        ...

    async def wait_until_ended(self) -> str:
        """Wait until it has ended for any reason, and return the reason."""
        ...


W = TypeVar("W", bound=Worker)
W_co = TypeVar("W_co", bound=Worker, covariant=True)


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be loaded.

    Attributes:
        source: an artifact, or a model to compile.
        aliases: other names that it accepts; `*` is any name that no model has.
        is_pinned: it is loaded at the start, and unloaded only on a client's request.
        loras: names of its LoRA adapters. A request names one as `MODEL:ADAPTER`.
        flags: its own flags of `radixlm serve`.
        store: directory of its prefixes; None: no prefixes are saved to disk.
        context_length: tokens of prompt and reply together; None if unknown before it is loaded.
        needed_bytes: bytes of its weights, KV cache and states; None if unknown before it is loaded.
        too_large: error message if it can never fit into the memory, else None.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    is_pinned: bool = False
    loras: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    store: str | None = None
    context_length: int | None = None
    needed_bytes: int | None = None
    too_large: str | None = None

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names of the model as it was compiled, without `*`."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY))

    @property
    def listed(self) -> tuple[str, ...]:
        """The names in lists of models: its own, then its first name with each adapter."""
        return (*self.own_names, *(f"{self.name}:{lora}" for lora in self.loras))

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests can give, `*` included."""
        adapted = (f"{name}:{lora}" for name in self.own_names for lora in self.loras)
        return (self.name, *self.aliases, *adapted)

    def parent_of(self, name: str) -> str | None:
        """Return the model's first name if one of its names is of an adapter, else None."""
        return self.name if name in self.names and name not in self.own_names and name != ANY else None


class Loader(Protocol[W_co]):
    """Loads models."""

    async def open(self) -> None:
        """Prepare, so that the first model loads quickly."""
        ...

    async def close(self) -> None:
        """Free its resources. All models have been stopped."""
        ...

    async def load(self, spec: ModelSpec, progressed: Callable[[str, float | None], None]) -> W_co:
        """Load a model, and return its worker when it serves. Leaves nothing behind if it is cancelled.

        Args:
            progressed: called with the stage of compiling or loading, and its progress, 0 to 1, or None if unknown.

        Raises:
            ModelFailed: the model cannot be loaded.
        """
        ...


@dataclass(eq=False)
class Row(Generic[W]):
    """A model of the table, with its state, which only the table changes.

    Attributes:
        num_requests: requests that use it or wait for it to load.
        last_used: time at which the last request ended, or it was loaded.
        keep_alive_s: seconds without a request after which it is unloaded, set by a client; infinity: only to make
            room; None: the server's default.
        bytes_known: bytes that it took when it was loaded; None if it was never loaded.
        bytes_taken: bytes that it takes of the memory budget now.
        error: why loading failed, or its process ended, the last time.
        num_loads: number of times that it was loaded.
        is_removed: the table does not list it any more.
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
        """The model's state. It is unloading until its last request has ended."""
        if self.unloading is not None:
            return "unloading"
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.worker is None else "loaded"

    @property
    def is_evictable(self) -> bool:
        """Return whether it may be unloaded for another model."""
        return self.state == "loaded" and not self.spec.is_pinned

    def loaded(self, worker: W, now: float) -> None:
        """Record that the model is loaded."""
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
