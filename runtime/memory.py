"""The list of everything that outlives a request and remembers clients' texts.

Forgetting a namespace or starting over reaches every object in the list.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ForgetResult:
    """The effect of forgetting a namespace.

    Attributes:
        num_freed_pages: pages that are free now.
        num_kept_pages: pages that live requests use.
        num_discarded_pages: pages that can no longer be found on disk.
        pending: futures that are done when their data is erased for good.
    """

    num_freed_pages: int = 0
    num_kept_pages: int = 0
    num_discarded_pages: int = 0
    pending: tuple[Future[None], ...] = ()

    def __add__(self, other: ForgetResult) -> ForgetResult:
        return ForgetResult(
            self.num_freed_pages + other.num_freed_pages,
            self.num_kept_pages + other.num_kept_pages,
            self.num_discarded_pages + other.num_discarded_pages,
            self.pending + other.pending,
        )


class Memory(Protocol):
    """An object that remembers data of clients between requests. Only the engine's thread calls its methods."""

    @abstractmethod
    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget a namespace, except data that live requests use."""

    @abstractmethod
    def drop_unused(self, since: float) -> object:
        """Forget data that was last used before `since`, a time on the engine's clock."""

    def start_over(self) -> None:
        """Forget everything that depends on pages in memory, which can be inconsistent or gone."""
        return

    def check(self) -> None:
        """Raise AssertionError unless the object is consistent; between two steps."""
        return

    def stats(self) -> object:
        """Return current counts, of a type of its own, or None; from any thread."""
        return None

    def shut_down(self) -> None:
        """Free all resources; the last call."""
        return


Kept = TypeVar("Kept", bound=Memory)
Stats = TypeVar("Stats")


class Memories:
    """Memories in order: a later one can depend on earlier ones, and is shut down before them."""

    def __init__(self) -> None:
        self._memories: list[Memory] = []

    def __iter__(self) -> Iterator[Memory]:
        return iter(self._memories)

    def add(self, memory: Kept) -> Kept:
        """Add a memory to the list, and return it."""
        self._memories.append(memory)
        return memory

    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget a namespace in all memories."""
        return sum((memory.forget(namespace) for memory in self._memories), ForgetResult())

    def drop_unused(self, since: float) -> None:
        """Forget data that was last used before `since` in all memories."""
        for memory in self._memories:
            memory.drop_unused(since)

    def start_over(self) -> None:
        """Start over in all memories."""
        for memory in self._memories:
            memory.start_over()

    def check(self) -> None:
        """Raise AssertionError unless each memory is consistent."""
        for memory in self._memories:
            memory.check()

    def stats(self, kind: type[Stats]) -> Stats | None:
        """Return the counts of this type; None if no memory has them."""
        return next((stats for memory in self._memories if isinstance(stats := memory.stats(), kind)), None)

    def shut_down(self) -> None:
        """Shut down all memories, the last first, even if one raises."""
        with ExitStack() as closing:
            for memory in self._memories:
                closing.callback(memory.shut_down)
