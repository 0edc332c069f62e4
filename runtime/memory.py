"""What outlives a request. All that remembers something of clients' texts stands in one list, so that nothing is left
out of what happens to all of it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Forgotten:
    """What became of a namespace's pages when it was forgotten.

    Attributes:
        num_freed_pages: that are free now.
        num_kept_pages: that live requests use.
        num_discarded_pages: that are not found on disk any more.
        pending: each done when what it stands for is gone for good.
    """

    num_freed_pages: int = 0
    num_kept_pages: int = 0
    num_discarded_pages: int = 0
    pending: tuple[Future[None], ...] = ()

    def __add__(self, other: Forgotten) -> Forgotten:
        return Forgotten(
            self.num_freed_pages + other.num_freed_pages,
            self.num_kept_pages + other.num_kept_pages,
            self.num_discarded_pages + other.num_discarded_pages,
            self.pending + other.pending,
        )


class Memory(Protocol):
    """Remembers something of what clients sent or were sent. The engine's thread alone calls these methods."""

    @abstractmethod
    def forget(self, namespace: bytes) -> Forgotten:
        """Forget a namespace, but for what live requests use."""

    @abstractmethod
    def drop_unused(self, since: float) -> object:
        """Forget what was last used before `since`, a time on the engine's clock."""

    def start_over(self) -> None:
        """Forget all that depends on pages in memory, in whatever state it is: they are in disorder, or gone."""
        return

    def check(self) -> None:
        """Raise AssertionError unless it agrees with itself; between two steps."""
        return

    def stats(self) -> object:
        """Counts as of now, of a type of its own; None: it counts nothing. Any thread may ask."""
        return None

    def shut_down(self) -> None:
        """Free what it holds; the last call."""
        return


Kept = TypeVar("Kept", bound=Memory)
Stats = TypeVar("Stats")


class Memories:
    """Memories in order: a later one may rest on earlier ones, and is shut down before them."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._memories)

    def add(self, memory: Kept) -> Kept:
        """Have a memory see all that happens from here on; returns it."""
        self._memories.append(memory)
        return memory

    def forget(self, namespace: bytes) -> Forgotten:
        """Have all forget a namespace."""
        return sum((memory.forget(namespace) for memory in self._memories), Forgotten())

    def drop_unused(self, since: float) -> None:
        """Have all forget what was not used since then."""
        for memory in self._memories:
            memory.drop_unused(since)

    def start_over(self) -> None:
        """Have all start over."""
        for memory in self._memories:
            memory.start_over()

    def check(self) -> None:
        """Raise AssertionError unless each agrees with itself."""
        for memory in self._memories:
            memory.check()

    def stats(self, kind: type[Stats]) -> Stats | None:
        """The counts of this type; None: no memory has them."""
        return next((stats for memory in self._memories if isinstance(stats := memory.stats(), kind)), None)

    def shut_down(self) -> None:
        """Shut all down, the last first, also behind one that raises."""
        with ExitStack() as closing:
            for memory in self._memories:
                closing.callback(memory.shut_down)
