"""Own the page ids: count the owners of each page, and track which pages are free, cached or in use.

Knows ids and counts. Not the contents of pages, nor which sequence or node an owner is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfPages
from .window_rows import WindowRows


def num_pages_for(num_tokens: int) -> int:
    """Return how many pages the KV of `num_tokens` tokens takes; the last one can be partial."""
    return -(-num_tokens // PAGE_SIZE)


class PagePool:
    """`num_pages` pages, each free, cached (owned by the tree alone) or in use (owned by a sequence).

    `num_free + num_cached + num_in_use == num_pages`, always. Owners are sequences, counted, and the tree, at most
    once. A page becomes free only when its last owner releases it. Pages that were never taken use no memory.

    Attributes:
        windows: tracks which pages have the rows of layers with a sliding window; None if all do.

    >>> pool = PagePool(num_pages=2)
    >>> pages = pool.allocate(2)
    >>> pool.num_free, pool.num_in_use
    (0, 2)
    >>> pool.add_to_tree(pages[:1])
    >>> pool.release(pages)
    >>> pool.num_free, pool.num_cached, pool.num_in_use
    (1, 1, 0)
    """

    def __init__(self, num_pages: int, windows: WindowRows | None = None) -> None:
        if num_pages < 1:
            raise OutOfPages(f"a pool of {num_pages} pages holds nothing; raise --kv-cache-gb")
        self.num_pages, self.windows = num_pages, windows
        self._free: list[int] = []  # a stack of pages that were taken once: the page freed last is the warmest
        self._num_users: list[int] = []  # one entry for each page that was ever taken; these are the first ones
        self._in_tree = bytearray()  # one byte for each such page
        self._num_cached = 0
        self._num_in_use = 0

    @property
    def max_allocation(self) -> int:
        """Most pages that a single `allocate` can ever take."""
        return self.num_pages if self.windows is None else min(self.num_pages, self.windows.max_pages)

    @property
    def num_free(self) -> int:
        """Number of pages without an owner."""
        return len(self._free) + self.num_pages - len(self._num_users)

    @property
    def num_cached(self) -> int:
        """Number of pages that the tree alone owns. All of them can be evicted."""
        return self._num_cached

    @property
    def num_in_use(self) -> int:
        """Number of pages that at least one sequence owns."""
        return self._num_in_use

    def allocate(self, num_pages: int) -> list[int]:
        """Take `num_pages` free pages, each with the caller as its one owner.

        Raises:
            OutOfPages: too few pages are free, or too few have room for rows of sliding windows. Nothing is taken.
        """
        if num_pages > self.num_free:
            raise OutOfPages(
                f"{num_pages} pages of {PAGE_SIZE} tokens are needed, {self.num_free} are free; "
                f"lower --max-num-seqs or raise --kv-cache-gb"
            )
        pages = self._free[: -num_pages - 1 : -1] if num_pages else []
        num_old, num_new = len(pages), num_pages - len(pages)
        pages += range(len(self._num_users), len(self._num_users) + num_new)
        if self.windows is not None:
            self.windows.take(pages)
        del self._free[len(self._free) - num_old :]
        self._num_users += [0] * num_new
        self._in_tree += bytes(num_new)
        for page in pages:
            self._num_users[page] = 1
        self._num_in_use += num_pages
        return pages

    def retain(self, page_ids: Iterable[int]) -> None:
        """Add one sequence to the owners of each page; none of them can be free."""
        for page in page_ids:
            users = self._num_users[page]
            if users == 0:
                assert self._in_tree[page], f"page {page} is free and cannot be retained"
                self._num_cached -= 1
                self._num_in_use += 1
            self._num_users[page] = users + 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Remove one sequence from the owners of each page; a page without owners is free."""
        for page in page_ids:
            users = self._num_users[page] - 1
            assert users >= 0, f"page {page} has no sequence to release it"
            self._num_users[page] = users
            if users == 0:
                self._num_in_use -= 1
                if self._in_tree[page]:
                    self._num_cached += 1
                else:
                    self._add_free(page)

    def add_to_tree(self, page_ids: Iterable[int]) -> None:
        """Make the tree an owner of each page; sequences that own them stay owners."""
        for page in page_ids:
            assert not self._in_tree[page], f"page {page} has a node already"
            assert self._num_users[page], f"page {page} is free and holds nothing to keep"
            self._in_tree[page] = 1
            if self.windows is not None:
                self.windows.settle([page])

    def remove_from_tree(self, page_ids: Iterable[int]) -> None:
        """End the tree's ownership of each page; a page without owners is free."""
        for page in page_ids:
            assert self._in_tree[page], f"page {page} has no node"
            self._in_tree[page] = 0
            if self._num_users[page] == 0:
                self._num_cached -= 1
                self._add_free(page)

    def ref_count(self, page_id: int) -> int:
        """Return the number of owners of a page, the tree included."""
        return self.num_users(page_id) + self.is_in_tree(page_id)

    def num_users(self, page_id: int) -> int:
        """Return the number of sequences that own a page."""
        return self._num_users[page_id] if page_id < len(self._num_users) else 0

    def is_in_tree(self, page_id: int) -> bool:
        """Return whether the tree owns the page. If so, its valid rows never change."""
        return page_id < len(self._in_tree) and bool(self._in_tree[page_id])

    def is_whole(self, page_id: int) -> bool:
        """Return whether the page has all of its rows, those of sliding windows included."""
        return self.windows is None or self.windows.has(page_id)

    def is_private(self, page_id: int) -> bool:
        """Return whether one sequence is the only owner of the page. Rows can be written to such a page only."""
        return self.num_users(page_id) == 1 and not self._in_tree[page_id]

    def check(self, users: Iterable[Sequence[int]], tree_page_ids: Iterable[int]) -> None:
        """Compare every count with the live owners: the pages of each sequence, and those of the tree.

        Raises:
            AssertionError: a count is wrong, a page is lost, or a page is both owned and free.
        """
        owners = Counter(page for page_ids in users for page in page_ids)
        in_tree = Counter(tree_page_ids)
        free = Counter(self._free)
        assert max([-1, *owners, *in_tree, *free]) < len(self._num_users) <= self.num_pages, "a page was never taken"
        for page in range(len(self._num_users)):
            assert self._num_users[page] == owners[page], (
                f"page {page} counts {self._num_users[page]} sequences, {owners[page]} live ones own it"
            )
            assert self._in_tree[page] == in_tree[page], (
                f"page {page} is in {in_tree[page]} nodes, the pool says {self._in_tree[page]}"
            )
            assert free[page] == (not owners[page] and not in_tree[page]), (
                f"page {page} is {free[page]} times free, with {owners[page] + in_tree[page]} owners"
            )
        num_in_use = len(owners)
        num_cached = len(in_tree.keys() - owners.keys())
        assert (self.num_cached, self.num_in_use) == (num_cached, num_in_use)
        assert self.num_free + self.num_cached + self.num_in_use == self.num_pages
        if self.windows is not None:
            self.windows.check(self.num_users, self.is_in_tree)

    def emptied(self) -> PagePool:
        """Return a new pool of the same size, without owners."""
        return PagePool(self.num_pages, None if self.windows is None else self.windows.emptied())

    def _add_free(self, page: int) -> None:
        self._free.append(page)
        if self.windows is not None:
            self.windows.free(page)
