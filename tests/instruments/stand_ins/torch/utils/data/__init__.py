"""Data sets that are iterated, and loaders of batches of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IterableDataset(Generic[T]):
    """Something to iterate."""


class DataLoader(Generic[T]):
    """What `collate_fn` makes of each item of a data set."""

    def __init__(self, dataset: Iterable[Any], *, collate_fn: Callable[[list[Any]], T], **_: object) -> None:
        self.dataset, self._collate = dataset, collate_fn

    def __iter__(self) -> Iterator[T]:
        return (self._collate([item]) for item in self.dataset)


def get_worker_info() -> None:
    """None: there are no workers."""
