"""Count the owners of each page of a pool, and know which pages are in the tree, while a KV log is replayed.

Knows numbers of pages; not the sequences that own them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class KVLawBroken(Exception):
    """What a line of a KV log says cannot be; the message says why."""


class PageOwners:
    """Pages without owners, at first.

    >>> owners = PageOwners(3)
    >>> owners.take([2])
    >>> owners.keep([2])
    >>> owners.give([2])
    >>> owners.num_free, owners.tree
    (2, {2})
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_free = num_pages
        self.tree: set[int] = set()
        self._num_owners = array("i", bytes(4 * num_pages))

    def take(self, page_ids: Iterable[int]) -> None:
        """One more owns the pages.

        Raises:
            KVLawBroken: one is none of the pool's.
        """
        for page in page_ids:
            require(0 <= page < self.num_pages, f"{page} is none of the {self.num_pages} pages")
            self.num_free -= not self._num_owners[page]
            self._num_owners[page] += 1

    def give(self, page_ids: Iterable[int]) -> None:
        """One of those that own the pages no longer does."""
        for page in page_ids:
            self._num_owners[page] -= 1
            self.num_free += not self._num_owners[page]

    def take_free(self, page_ids: Sequence[int]) -> None:
        """As `take`.

        Raises:
            KVLawBroken: one has an owner, or is listed twice.
        """
        before = self.num_free
        self.take(page_ids)
        require(self.num_free == before - len(page_ids), "it takes a page that has an owner")

    def keep(self, page_ids: Sequence[int]) -> None:
        """The tree owns the pages, too.

        Raises:
            KVLawBroken: it does already, or no sequence does.
        """
        before = self.num_free
        self.take(page_ids)
        require(self.num_free == before, "the tree keeps pages that no sequence has")
        num_before = len(self.tree)
        self.tree.update(page_ids)
        require(len(self.tree) == num_before + len(page_ids), "the tree keeps pages that it has already")

    def evict(self, page_ids: Sequence[int]) -> None:
        """The tree owns the pages no longer.

        Raises:
            KVLawBroken: it did not, or one is there twice.
        """
        num_before = len(self.tree)
        self.require_shared(page_ids)
        self.tree.difference_update(page_ids)
        require(len(self.tree) == num_before - len(page_ids), "the tree evicts a page twice")
        self.give(page_ids)

    def require_shared(self, page_ids: Iterable[int], own: Iterable[int] = ()) -> None:
        """Raise KVLawBroken unless all pages are in the tree, or among one's `own`."""
        known = set(own)
        is_shared = all(page in self.tree or page in known for page in page_ids)
        require(is_shared, "it has pages that are not in the tree")


def require(is_so: bool, law: str) -> None:
    """Raise KVLawBroken unless a law holds."""
    if not is_so:
        raise KVLawBroken(law)
