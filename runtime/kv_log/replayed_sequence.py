"""Replay the lines of one sequence of a KV log: its length, its plain list of pages, and the rules for each line.

The slow, obvious version of `sequence.py`, `kv_transaction.py` and `page_pool.py`. Knows its own lines, the owners of
each page, and the pages in the tree; not the other sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from . import lines as lines
from .lines import Rows, SequenceLine, SequenceState


class KVLawBroken(Exception):
    """An invalid line of a KV log; the message gives the reason."""


class PageOwners:
    """The number of owners of each page, and the pages of the tree; at first no page has an owner.

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
        """Add an owner to each page.

        Raises:
            KVLawBroken: a page is not in the pool.
        """
        for page in page_ids:
            require(0 <= page < self.num_pages, f"{page} is none of the {self.num_pages} pages")
            self.num_free -= not self._num_owners[page]
            self._num_owners[page] += 1

    def give(self, page_ids: Iterable[int]) -> None:
        """Remove an owner from each page."""
        for page in page_ids:
            self._num_owners[page] -= 1
            self.num_free += not self._num_owners[page]

    def take_free(self, page_ids: Sequence[int]) -> None:
        """Add the first owner to each page.

        Raises:
            KVLawBroken: a page has an owner, or is listed twice.
        """
        before = self.num_free
        self.take(page_ids)
        require(self.num_free == before - len(page_ids), "it takes a page that has an owner")

    def keep(self, page_ids: Sequence[int]) -> None:
        """Make the tree one more owner of pages that sequences own.

        Raises:
            KVLawBroken: the tree owns one already, or no sequence does.
        """
        before = self.num_free
        self.take(page_ids)
        require(self.num_free == before, "the tree keeps pages that no sequence has")
        num_before = len(self.tree)
        self.tree.update(page_ids)
        require(len(self.tree) == num_before + len(page_ids), "the tree keeps pages that it has already")

    def evict(self, page_ids: Sequence[int]) -> None:
        """End the tree's ownership of the pages.

        Raises:
            KVLawBroken: the tree does not own one, or one is listed twice.
        """
        num_before = len(self.tree)
        self.require_shared(page_ids)
        self.tree.difference_update(page_ids)
        require(len(self.tree) == num_before - len(page_ids), "the tree evicts a page twice")
        self.give(page_ids)

    def require_shared(self, page_ids: Iterable[int], own: Iterable[int] = ()) -> None:
        """Raise KVLawBroken unless all pages are in the tree, or in `own`."""
        known = set(own)
        is_shared = all(page in self.tree or page in known for page in page_ids)
        require(is_shared, "it has pages that are not in the tree")


def require(is_so: bool, law: str) -> None:
    """Raise KVLawBroken unless a condition holds."""
    if not is_so:
        raise KVLawBroken(law)


@dataclass
class ReplayedSequence:
    """The state of one sequence; every method raises KVLawBroken if its line is invalid."""

    owners: PageOwners
    length: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    reserved: list[int] | None = None  # pages of a step
    pruned: Rows | None = None  # the tokens [start, stop), and how many of them have rows
    is_private: bool = False

    @classmethod
    def of(cls, stated: SequenceState, owners: PageOwners) -> ReplayedSequence:
        """Return the sequence that a `state` line describes."""
        sequence = cls(owners, stated.length, stated.computed, [], None, stated.pruned, stated.private)
        sequence._replace(stated.pages)
        sequence.check()
        return sequence

    def agrees_with(self, stated: SequenceState) -> bool:
        """Return whether a `state` line describes this sequence."""
        now = self.length, self.computed, self.pages, self.reserved, self.pruned, self.is_private
        return now == (stated.length, stated.computed, stated.pages, None, stated.pruned, stated.private)

    def rows_of(self, num_tokens: int) -> int:
        """Return the number of KV rows of the first `num_tokens` tokens."""
        if self.pruned is None:
            return num_tokens
        start, stop, num_rows = self.pruned
        return num_tokens - (stop - start - num_rows)

    @property
    def tainted(self) -> set[int]:
        """Pages of the sequence that must not be in the tree."""
        if self.pruned is None and not self.is_private:
            return set()
        start = 0 if self.pruned is None else self.pruned[0]
        return {*self.pages[start // PAGE_SIZE :], *(self.reserved or ())}

    def replay(self, line: SequenceLine, parent: ReplayedSequence | None) -> None:
        """Apply a line to this sequence, and check its counts before and after; a fork has a `parent`."""
        stated = line.length[0], line.computed[0]
        has = self.length, self.computed
        require(has == stated, f"{has[0]} tokens are there and {has[1]} computed, not {stated[0]} and {stated[1]}")
        self._apply(line, parent)
        self.length = line.length[1]
        computed = line.computed[1]
        require(computed == self.computed, f"{self.computed} tokens are computed then, not {computed}")
        self.check()

    def check(self) -> None:
        """Raise KVLawBroken unless tokens, rows and pages agree."""
        require(0 <= self.computed <= self.length, "more tokens are computed than there are")
        require(self.pruned is None or self.pruned[1] <= self.computed, "pruned tokens are not computed")
        num_pages = _num_pages(self.rows_of(self.computed))
        require(len(self.pages) == num_pages, f"it has {len(self.pages)} pages, its tokens fill {num_pages}")

    def _apply(self, line: SequenceLine, parent: ReplayedSequence | None) -> None:
        """Change pages, computed tokens and reservation as the line's event does."""
        match line:
            case lines.Open():
                self.owners.require_shared(line.pages)
                require(not (line.private and line.pages), "it is private, and shares pages")
                self.is_private, self.computed = line.private, line.computed[1]
                self._replace(line.pages)
            case lines.OpenPruned():
                self._open_pruned(line)
            case lines.Fork():
                self._fork(line, parent)
            case lines.Resume():
                self._resume(line)
            case lines.Reserve():
                self._reserve(line)
            case lines.Accept():
                self._accept(line)
            case lines.DropReservation():
                self._end_reservation()
            case lines.Commit():
                self._commit(line)
            case lines.Share():
                self._share(line)
            case lines.Append():
                require(line.length[0] <= line.length[1], "it has fewer tokens after it")
            case lines.Pop():
                self._pop(line.length[1], line.computed[1] if line.state else None)
            case lines.Preempt() | lines.Close():
                require(self.reserved is None, "a step is under way")
                self.computed, self.pruned = 0, None
                self._replace([])

    def _open_pruned(self, line: lines.OpenPruned) -> None:
        """Open the sequence with a pruned prefix: shared pages before its span, and new pages for the span's rows."""
        start, stop, num_rows = line.pruned
        require(start % PAGE_SIZE == 0 and 0 < num_rows <= stop - start, "its pruned tokens are none")
        shared, own = line.pages[: start // PAGE_SIZE], line.pages[start // PAGE_SIZE :]
        self.owners.require_shared(shared)
        self.owners.take(shared)
        self.owners.take_free(own)
        self.pages, self.computed, self.pruned = line.pages, stop, line.pruned

    def _fork(self, line: lines.Fork, parent: ReplayedSequence | None) -> None:
        """Take over the parent's pages of the first tokens; they must be the parent's, and computed."""
        if parent is None:
            raise KVLawBroken(f"there is no sequence {line.parent}")
        at = line.length[1]
        if parent.pruned is not None and at > parent.pruned[0]:
            self.pruned = parent.pruned
        if line.state:
            require(line.computed[1] <= at, "it has computed more than its parent")
            at = line.computed[1]
        self.is_private, self.computed = parent.is_private, at
        num_pages = _num_pages(self.rows_of(at))
        require(at <= parent.computed and line.pages == parent.pages[:num_pages], "it has not its parent's pages")
        self._replace(line.pages)

    def _resume(self, line: lines.Resume) -> None:
        """Take cached pages for tokens that were not computed."""
        if self.is_private:
            require(line.pages == self.pages, "it is private, and takes pages")
        self.owners.require_shared(line.pages, self.pages)
        if line.computed[1] > self.computed:
            self.pruned = None
        self.computed = line.computed[1]
        self._replace(line.pages)

    def _reserve(self, line: lines.Reserve) -> None:
        """Reserve free pages for the tokens that a step computes; they must be the next ones and fit."""
        start, stop = line.reserved
        require(self.reserved is None, "it is reserved already")
        require(start == self.computed < stop <= self.length + line.draft, "it reserves other tokens than the next")
        num_pages = len(self.pages) - len(line.copies) + len(line.pages)
        require(num_pages == _num_pages(self.rows_of(stop)), "it takes too many pages, or too few")
        last = self.pages[-1:], line.pages[:1], self.rows_of(start) % PAGE_SIZE
        for source, target, num_rows in line.copies:
            require(([source], [target], num_rows) == last, "it copies other rows than its last page's")
        self.owners.take_free(line.pages)
        self.reserved = line.pages

    def _accept(self, line: lines.Accept) -> None:
        """Keep the first reserved pages, after draft tokens were verified, and release the others."""
        reserved, num_kept = self.reserved or [], len(line.pages)
        require(line.pages == reserved[:num_kept], "it keeps other pages than were reserved")
        self.owners.give(reserved[num_kept:])
        self.reserved = line.pages

    def _end_reservation(self) -> list[int]:
        """Release the reserved pages, and return them."""
        reserved, self.reserved = self.reserved, None
        if reserved is None:
            raise KVLawBroken("nothing is reserved")
        self.owners.give(reserved)
        return reserved

    def _commit(self, line: lines.Commit) -> None:
        """Make the reserved pages the sequence's own, and count the step's tokens as computed."""
        require(self._end_reservation() == line.pages, "it commits other pages than were reserved")
        least = self.computed + (not line.state)
        require(least <= line.computed[1] <= self.length, "it computes nothing, or more than there is")
        self.computed = line.computed[1]
        self._replace(line.pages, num_kept=line.kept)

    def _share(self, line: lines.Share) -> None:
        """Replace full pages by those that the tree has of the same tokens; then all full pages must be in the tree."""
        require(self.pruned is None and not self.is_private, "it has nothing to share")
        self.owners.require_shared(line.pages, self.pages)
        self._replace(line.pages, num_kept=line.kept)
        require(line.kept < line.shared <= self.computed // PAGE_SIZE, "it shares pages that are not full")
        is_shared = self.owners.tree.issuperset(self.pages[: line.shared])
        require(is_shared, "it has full pages that cannot be found")

    def _pop(self, length: int, state_at: int | None) -> None:
        """Drop the KV of the tokens after the first `length` ones, and the pages that held only theirs.

        Args:
            state_at: the tokens that a recurrent model's snapshot covers; None if the model keeps no states.
        """
        require(0 <= length <= self.length, f"it pops to {length} tokens of {self.length}")
        require(self.reserved is None, "a step is under way")
        before, self.computed = self.computed, min(self.computed, length)
        if self.pruned is not None and self.computed < self.pruned[1]:
            self.computed, self.pruned = min(self.computed, self.pruned[0]), None
        if state_at is not None and length < before:
            require(state_at <= self.computed, "it has computed more than it has tokens")
            self.computed = state_at
        self._replace([], num_kept=_num_pages(self.rows_of(self.computed)))

    def _replace(self, page_ids: list[int], *, num_kept: int = 0) -> None:
        """Replace the pages after the first `num_kept` ones by these."""
        before = self.pages[num_kept:]
        self.owners.take(page_ids)
        self.owners.give(before)
        self.pages = self.pages[:num_kept] + page_ids
        require(len(set(self.pages)) == len(self.pages), "it has a page twice")


def _num_pages(num_rows: int) -> int:
    return -(-num_rows // PAGE_SIZE)
