"""Choose the pages that keep the KV rows of layers with a sliding window, if memory has room for some pages only.

Such a layer reads only the last `window` rows before a token. Rows far back are needed only to resume from there. Knows
page ids and counts of tokens; neither tree nor sequences, nor how memory is released.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol, runtime_checkable

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfPages
from ..model.batch import PageCopy

POINT_EVERY = 8  # windows between the tokens from which any long prompt can be resumed
KEPT_BEFORE = 64  # tokens; a prompt that ends a little before such a point can be resumed, too


def num_window_pages(window: int, num_sequences: int, num_tokens: int) -> int:
    """Return the most pages that sequences read and write in window layers, in a step of `num_tokens` tokens.

    A window begins within a page, and a step ends within one. A page that is reused in part exists twice.
    """
    return num_sequences * (-(-window // PAGE_SIZE) + 3) + -(-num_tokens // PAGE_SIZE)


@runtime_checkable
class WindowMemory(Protocol):
    """Copies and drops rows; `ModelRunner` is the real one."""

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        ...

    def drop_window_rows(self, runs: Iterable[range]) -> None:
        """Release the memory of the window layers' rows in these runs of pages to the system."""
        ...


class WindowStats(NamedTuple):
    """Most pages that can have window rows, pages that have them, and pages that lost theirs since the start."""

    max_pages: int
    num_with_rows: int
    num_dropped: int


class WindowRows:
    """Tracks the pages that have rows of window layers, at most `max_pages`. All pages have the rows of other layers.

    A page has window rows when it is allocated. It loses them if too many others have them, in this order:

    1. free pages;
    2. pages that were computed or loaded, least recently first;
    3. pages before a point where a prompt is likely to resume (`keep`), least recently used first.

    Pages that a live sequence reads (`needed`) and pages of an uncommitted step keep theirs. A prefix that ends where
    rows were dropped cannot be resumed; `resumable` returns its longest part that can.

    Args:
        window: tokens that a token sees in such a layer, its own included; the most of all layers.

    Attributes:
        needed: returns the pages that live sequences read next.
        before_drop: called with pages before they lose their rows; None if nothing listens.
        num_with_rows: number of pages with window rows, free ones included.
        num_dropped: number of pages that lost them while not free, since the start.
        version: increases when matches can change.
    """

    def __init__(self, window: int, max_pages: int, memory: WindowMemory) -> None:
        assert window > 0 and max_pages > 0
        self.window, self.max_pages = window, max_pages
        self._memory = memory
        self.needed: Callable[[], Collection[int]] = tuple
        self.before_drop: Callable[[Sequence[int]], None] | None = None
        self.num_with_rows = self.num_dropped = self.version = 0
        self._has = bytearray()  # by page
        self._free, self._passed, self._kept = dict[int, None](), dict[int, None](), dict[int, None]()

    def emptied(self) -> WindowRows:
        """Return a new object without any rows, and release their memory; this one is no longer used."""
        pages = range(len(self._has))
        self._has.clear()
        self._memory.drop_window_rows([pages])
        rows = WindowRows(self.window, self.max_pages, self._memory)
        rows.needed, rows.before_drop = self.needed, self.before_drop
        rows.num_dropped, rows.version = self.num_dropped, self.version + 1
        return rows

    def has(self, page_id: int) -> bool:
        """Return whether a page has its window rows."""
        return page_id < len(self._has) and bool(self._has[page_id])

    def first_page(self, num_tokens: int) -> int:
        """Return the index of the first page that tokens from the start of the page of `num_tokens` on read.

        So a prefix that can be resumed can also be resumed at the end of its last full page.
        """
        return max(0, num_tokens // PAGE_SIZE * PAGE_SIZE + 1 - self.window) // PAGE_SIZE

    def resumable(self, page_ids: Sequence[int], num_tokens: int) -> int:
        """Return the longest prefix, of at most `num_tokens` tokens in these pages, that can be resumed."""
        page = -(-num_tokens // PAGE_SIZE)  # the pages from this one to the end have their rows
        while page > self.first_page(num_tokens):
            page -= 1
            if not self.has(page_ids[page]):
                num_tokens = page * PAGE_SIZE
        return num_tokens

    def points(self, start: int, stop: int) -> Iterable[int]:
        """Return the counts of tokens in `(start, stop]` after which rows are always kept for resuming."""
        every = POINT_EVERY * -(-self.window // PAGE_SIZE) * PAGE_SIZE
        return range((start // every + 1) * every, stop + 1, every)

    def has_room_for(self, num_sequences: int, num_tokens: int) -> bool:
        """Return whether `num_sequences` sequences fit, with a step of `num_tokens` tokens."""
        return num_window_pages(self.window, num_sequences, num_tokens) <= self.max_pages

    # For PagePool, which owns the pages.

    def take(self, page_ids: Sequence[int]) -> None:
        """Give window rows to free pages, which a step or a load is about to write.

        Raises:
            OutOfPages: too many pages have rows that must stay; nothing is changed.
        """
        self._make_room(sum(not self.has(page) for page in page_ids), page_ids)
        self._has += bytes(max(0, max(page_ids, default=-1) + 1 - len(self._has)))
        for page in page_ids:
            self._free.pop(page, None)
            self.num_with_rows += not self._has[page]
            self._has[page] = 1

    def settle(self, page_ids: Iterable[int]) -> None:
        """Mark pages as written: their rows can be dropped once no live sequence needs them."""
        for page in page_ids:
            if self.has(page) and page not in self._kept:
                self._passed.setdefault(page)

    def free(self, page_id: int) -> None:
        """Record that a page has no owner any more."""
        self._passed.pop(page_id, None)
        self._kept.pop(page_id, None)
        if self.has(page_id):
            self._free[page_id] = None
            if self.num_with_rows > self.max_pages:  # after `regain` copied its rows to another page
                self._drop_rows([page_id])

    # For callers that know the contents of pages.

    def keep(self, page_ids: Sequence[int], num_tokens: int) -> None:
        """Record that prompts are likely to resume after the first `num_tokens` tokens of these pages, or do so now."""
        first = self.first_page(max(0, num_tokens - KEPT_BEFORE))
        for page in page_ids[first : -(-num_tokens // PAGE_SIZE)]:
            if page in self._passed or page in self._kept:
                self._passed.pop(page, None)
                self._kept.pop(page, None)
                self._kept[page] = None

    def regain(self, page_ids: Sequence[int], others: Sequence[int]) -> None:
        """Copy the rows of `others`, which are about to be freed, to pages of the same tokens that lack them.

        By batch invariance all rows of both are the same bits, so readers of the pages see no change.
        """
        pairs = [(page, other) for page, other in zip(page_ids, others, strict=True) if self._lacks(page, other)]
        if pairs:
            self._memory.copy_rows([PageCopy(other, page, PAGE_SIZE) for page, other in pairs])
            for page, _ in pairs:
                self._has[page] = 1
                self._passed[page] = None
            self.num_with_rows += len(pairs)
            self.version += 1

    def stats(self) -> WindowStats:
        """Return counts for metrics; approximate when read from another thread."""
        return WindowStats(self.max_pages, self.num_with_rows, self.num_dropped)

    def check(self, num_users: Callable[[int], int], is_in_tree: Callable[[int], bool]) -> None:
        """Raise AssertionError unless counts and orders agree with the owners of pages."""
        assert self.num_with_rows == sum(self._has)
        needed = set(self.needed())
        assert self.num_with_rows <= self.max_pages or needed.issuperset([*self._free, *self._passed, *self._kept])
        orders = (self._free, self._passed, self._kept)
        assert len(set().union(*orders)) == sum(map(len, orders)), "a page is in two orders"
        for page in range(len(self._has)):
            is_free = not num_users(page) and not is_in_tree(page)
            assert (page in self._free) == (is_free and self.has(page))
            can_go = page in self._passed or page in self._kept
            assert can_go <= self.has(page), "rows that are gone could be dropped"
            assert can_go or not (is_in_tree(page) and self.has(page)), "rows that could never be dropped"
        assert all(map(self.has, needed)), "a live sequence reads rows that are gone"

    def _lacks(self, page_id: int, other: int) -> bool:
        return page_id != other and not self.has(page_id) and self.has(other)

    def _make_room(self, num_pages: int, taken: Sequence[int]) -> None:
        """Drop rows until `num_pages` more pages can have them; the rows of `taken` stay."""
        num_over = self.num_with_rows + num_pages - self.max_pages
        if num_over <= 0:
            return
        stay = {*self.needed(), *taken}
        can_go = (page for page in chain(self._free, self._passed, self._kept) if page not in stay)
        pages = list(islice(can_go, num_over))
        if len(pages) < num_over:
            raise OutOfPages(
                f"{num_pages} pages of {PAGE_SIZE} tokens are needed, and memory for sliding windows holds "
                f"{self.max_pages}, of which {self.num_with_rows - len(pages)} are in use; lower --max-num-seqs or "
                f"raise --kv-cache-gb"
            )
        self._drop_rows(pages)

    def _drop_rows(self, page_ids: Sequence[int]) -> None:
        """Release the pages' rows of sliding-window layers. `before_drop` first gets those pages that are not free."""
        owned = [page for page in page_ids if page not in self._free]
        if owned and self.before_drop is not None:
            self.before_drop(owned)
        for page in page_ids:
            self._has[page] = 0
            for order in (self._free, self._passed, self._kept):
                order.pop(page, None)
        self.num_with_rows -= len(page_ids)
        self.num_dropped += len(owned)
        self.version += bool(owned)
        self._memory.drop_window_rows(self._releasable_runs(page_ids))

    def _releasable_runs(self, page_ids: Sequence[int]) -> Iterable[range]:
        """Yield pages as runs of neighbours, each widened by a page at either end if that has no rows either.

        The system takes back whole pages of its own, and one of those can span two of ours.
        """
        start = stop = -1
        for page in sorted(page_ids):
            if page != stop:
                if start >= 0:
                    yield self._widened(start, stop)
                start = page
            stop = page + 1
        yield self._widened(start, stop)

    def _widened(self, start: int, stop: int) -> range:
        return range(start - (start > 0 and not self.has(start - 1)), stop + (not self.has(stop)))
