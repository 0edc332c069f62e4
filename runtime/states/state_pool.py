"""Own the slots of recurrent states: count their users, and find snapshots by their place in the prefix tree.

Knows slots, pages and keys of tokens. Not the contents of states, nor which sequence uses a state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfStates
from .snapshot_queue import Entry, SnapshotQueue

NO_STATE = 0
"""The slot of zeros, the state before the first token. It is never written, and belongs to no sequence."""
MIN_SLOTS = 3  # zeros, a state that a step reads, and one that it writes
SPARE_SLOTS = 2  # left free by snapshots, so that work in idle time evicts nothing
_TOKEN_BYTES = 4

SnapshotPlace = int | bytes
"""The place of a snapshot: the last full page before it, or the namespace if there is none."""


class FoundState(NamedTuple):
    """A state after `num_tokens` tokens, and its slot."""

    num_tokens: int
    slot: int


@dataclass
class _Snapshot:
    place: SnapshotPlace
    rows: bytes  # the tokens after the place, as a key
    before: int  # the slot of the snapshot before it; the zeros if there is none
    num_saved: int  # tokens after that snapshot
    credit: int
    behind: set[int] = field(default_factory=set)  # slots of the snapshots that come next after it


class StateStats(NamedTuple):
    """Counts of slots, without the zeros, and the number of snapshots evicted since the start."""

    num_slots: int
    num_free: int
    num_cached: int  # snapshots that no request uses
    num_snapshots: int
    num_evicted: int


class StatePool:
    """`num_slots` slots: the zeros, and others that are free, cached (snapshots without a user) or in use.

    `1 + num_free + num_cached + num_in_use == num_slots`, always. A step reads a sequence's state from one slot and
    writes it to another. So a snapshot is a slot that is not overwritten, and a failed step changes nothing. A slot
    becomes free when it has no user and is no snapshot.

    A snapshot comes after a full page of the tree and a few tokens, and is removed with them. If slots are short, the
    snapshot with the least credit is evicted (GreedyDual: Young 1994). At each use a snapshot's credit becomes the
    number of tokens that it saves, plus the credit of the last evicted one. The snapshots next after an evicted one
    save its tokens, too, from then on. So old snapshots of a long conversation get sparser, but every part of it keeps
    one.

    Attributes:
        num_evicted: snapshots that were evicted.
        version: increases when matches can change.

    >>> pool = StatePool(3)
    >>> slot = pool.allocate()
    >>> pool.keep(b"", b"", slot, num_saved=16)
    >>> pool.release(slot)
    >>> pool.num_free, pool.num_cached, pool.num_in_use
    (1, 1, 0)
    """

    def __init__(self, num_slots: int, *, special_ids: Container[int] = (), is_stored: bool = False) -> None:
        """Create a pool without states.

        Args:
            special_ids: tokens between messages, where snapshots are wanted.
            is_stored: snapshots are wanted at the ends of pages, too, because the disk has whole pages.
        """
        if num_slots < MIN_SLOTS:
            raise OutOfStates(f"{num_slots} slots for states; {MIN_SLOTS} are the least: raise --state-cache-gb")
        self.num_slots, self.special_ids, self.is_stored = num_slots, special_ids, is_stored
        self._free: list[int] = []  # slots that were taken once and are free
        self._num_users = [0]  # of the zeros, and of each slot that was ever taken; these are the first ones
        self._num_in_use = 0
        self._snapshots: dict[int, _Snapshot] = {}  # by slot
        self._at: dict[SnapshotPlace, dict[bytes, int]] = {}  # slots of snapshots, by place and rows
        self._least_credit = 0
        self._unused = SnapshotQueue(self._is_unused)
        self.num_evicted = 0
        self.version = 0

    def emptied(self) -> StatePool:
        """Return a new pool of the same size, without states."""
        return StatePool(self.num_slots, special_ids=self.special_ids, is_stored=self.is_stored)

    @property
    def num_free(self) -> int:
        """Number of slots that hold nothing."""
        return len(self._free) + self.num_slots - len(self._num_users)

    @property
    def num_cached(self) -> int:
        """Number of snapshots that no sequence uses. All of them can be evicted."""
        return self.num_slots - 1 - self.num_free - self._num_in_use

    @property
    def num_in_use(self) -> int:
        """Number of slots that a sequence uses, snapshots included."""
        return self._num_in_use

    @property
    def num_available(self) -> int:
        """Number of slots that `allocate` could return."""
        return self.num_free + self.num_cached

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots in the tree."""
        return len(self._snapshots)

    def allocate(self) -> int:
        """Take a slot, with the caller as its one user; evict a snapshot if none is free.

        Raises:
            OutOfStates: all slots are in use; nothing is taken.
        """
        if not self.num_free and not self._evict():
            raise OutOfStates(
                f"a state is needed, and all {self.num_slots - 1} slots are in use; lower --max-num-seqs or raise "
                f"--state-cache-gb"
            )
        if not self._free:
            self._free.append(len(self._num_users))
            self._num_users.append(0)
        slot = self._free.pop()
        self._num_users[slot] = 1
        self._num_in_use += 1
        return slot

    def retain(self, slot: int) -> None:
        """Add a user to a slot that is not free; no effect for the zeros."""
        if slot == NO_STATE:
            return
        users = self._num_users[slot]
        if not users:
            assert slot in self._snapshots, f"slot {slot} is free and cannot be retained"
            self._num_in_use += 1
        self._num_users[slot] = users + 1

    def release(self, slot: int) -> None:
        """Remove a user from a slot; without users it is free, unless it is a snapshot."""
        if slot == NO_STATE:
            return
        self._num_users[slot] -= 1
        users = self._num_users[slot]
        assert users >= 0, f"slot {slot} has no user to release it"
        if not users:
            self._num_in_use -= 1
            if slot in self._snapshots:
                self._queue_unused(slot)
            else:
                self._free.append(slot)

    def keep(self, place: SnapshotPlace, rows: bytes, slot: int, *, num_saved: int, before: int = NO_STATE) -> None:
        """Make a slot the snapshot of the state after `place` and the tokens `rows`, which are less than a page.

        The caller uses the slot, and never writes it again. If there is such a snapshot already, that one stays, and
        counts as used.

        Args:
            rows: the tokens after `place`, as a key.
            before: slot of the last snapshot of a shorter prefix of the same tokens; `NO_STATE` if there is none.
            num_saved: number of tokens after the snapshot `before`, which this one saves from being computed again.
        """
        assert self._num_users[slot], f"slot {slot} is free and holds no state"
        there = self._at.get(place, {}).get(rows)
        if there is not None:
            self.touch(there)
        elif slot not in self._snapshots:
            self.version += 1
            self._at.setdefault(place, {})[rows] = slot
            self._snapshots[slot] = _Snapshot(place, rows, before, num_saved, self._least_credit + num_saved)
            if before != NO_STATE:
                self._snapshots[before].behind.add(slot)
            if self.num_free < SPARE_SLOTS:
                self._evict()

    def find(self, namespace: bytes, page_ids: Sequence[int], key: bytes, num_tokens: int) -> FoundState:
        """Return the last snapshot of the first `num_tokens` tokens of `key`; the zeros if there is none.

        Args:
            page_ids: the pages of the tokens; the rest of the tokens are in rows after them.
        """
        for num_pages in range(min(len(page_ids), num_tokens // PAGE_SIZE), -1, -1):
            place: SnapshotPlace = page_ids[num_pages - 1] if num_pages else namespace
            start = num_pages * PAGE_SIZE * _TOKEN_BYTES
            left = num_tokens * _TOKEN_BYTES - start
            found = [
                (len(rows), slot)
                for rows, slot in self._at.get(place, {}).items()
                if len(rows) <= left and key.startswith(rows, start)
            ]
            if found:
                length, slot = max(found)
                return FoundState(num_pages * PAGE_SIZE + length // _TOKEN_BYTES, slot)
        return FoundState(0, NO_STATE)

    def at_page_end(self, page_id: int) -> int | None:
        """Return the slot of the snapshot right after a page; None if there is none."""
        return self._at.get(page_id, {}).get(b"")

    def touch(self, slot: int) -> None:
        """Record that a snapshot is used now."""
        snapshot = self._snapshots.get(slot)
        if snapshot is not None:
            snapshot.credit = self._least_credit + snapshot.num_saved
            self._queue_unused(slot)

    def forget(self, places: Iterable[SnapshotPlace]) -> None:
        """Drop all snapshots at these places, which were removed from the tree.

        Sequences that use such a slot keep it; it becomes free with its last user.
        """
        for place in places:
            for slot in list(self._at.get(place, {}).values()):
                self._drop(slot)

    def forget_rows(self, place: SnapshotPlace, page: bytes, is_elsewhere: Callable[[bytes], bool]) -> None:
        """Drop the snapshots that a removed page has within it: those after `place` and a beginning of its tokens.

        Args:
            page: the tokens of the page after `place`, as a key.
            is_elsewhere: returns whether another page after `place` begins with these tokens; then their snapshot
                stays.
        """
        for rows, slot in list(self._at.get(place, {}).items()):
            if rows and page.startswith(rows) and not is_elsewhere(rows):
                self._drop(slot)

    def snapshots_behind(self, places: Iterable[SnapshotPlace]) -> int:
        """Return the number of snapshots at these places."""
        return sum(len(self._at.get(place, {})) for place in places)

    def stats(self) -> StateStats:
        """Return counts for metrics; approximate when read from another thread."""
        return StateStats(self.num_slots - 1, self.num_free, self.num_cached, self.num_snapshots, self.num_evicted)

    def check(self, users: Iterable[int]) -> None:
        """Compare every count with the slots of live sequences, one for each user.

        Raises:
            AssertionError: a count is wrong, a slot is lost, or a slot is both used and free.
        """
        counts = Counter(slot for slot in users if slot != NO_STATE)
        free = Counter(self._free)
        assert max([NO_STATE, *counts, *free, *self._snapshots]) < len(self._num_users) <= self.num_slots
        for slot in range(1, len(self._num_users)):
            assert self._num_users[slot] == counts[slot], (
                f"slot {slot} counts {self._num_users[slot]} sequences, {counts[slot]} live ones use it"
            )
            is_kept = slot in self._snapshots
            assert free[slot] == (not counts[slot] and not is_kept), f"slot {slot} is {free[slot]} times free"
        assert free[NO_STATE] == self._num_users[NO_STATE] == 0 and NO_STATE not in self._snapshots
        assert self._num_in_use == len(counts)
        assert 1 + self.num_free + self.num_cached + self.num_in_use == self.num_slots
        at = {slot: (place, rows) for place, each in self._at.items() for rows, slot in each.items()}
        assert at == {slot: (each.place, each.rows) for slot, each in self._snapshots.items()}
        assert all(self._at.values()), "a place without a snapshot"
        before = {slot: each.before for slot, each in self._snapshots.items() if each.before != NO_STATE}
        assert before == {slot: other for other, each in self._snapshots.items() for slot in each.behind}
        unused = ((each.credit, slot) for slot, each in self._snapshots.items() if not self._num_users[slot])
        assert not self._unused.missing(unused), "a snapshot that could never be evicted"

    def _evict(self) -> bool:
        """Drop the unused snapshot with the least credit. Returns False if there is none."""
        victim = self._unused.pop()
        if victim is None:
            return False
        self._least_credit, slot = victim
        self._drop(slot)
        self.num_evicted += 1
        return True

    def _drop(self, slot: int) -> None:
        """Remove a snapshot; its slot stays in use if it has users."""
        self.version += 1
        snapshot = self._snapshots.pop(slot)
        before = self._snapshots.get(snapshot.before)
        if before is not None:
            before.behind.remove(slot)
            before.behind |= snapshot.behind
        for behind in snapshot.behind:
            other = self._snapshots[behind]
            other.before = snapshot.before
            other.num_saved += snapshot.num_saved
            other.credit += snapshot.num_saved
            self._queue_unused(behind)
        at = self._at[snapshot.place]
        del at[snapshot.rows]
        if not at:
            del self._at[snapshot.place]
        if not self._num_users[slot]:
            self._free.append(slot)

    def _queue_unused(self, slot: int) -> None:
        """Queue a snapshot to be evicted, after its credit changed or its last user left; a used one is not queued."""
        entry = self._snapshots[slot].credit, slot
        if self._is_unused(entry):
            self._unused.push(entry, len(self._snapshots))

    def _is_unused(self, entry: Entry) -> bool:
        """Return whether the entry is not outdated: its slot is an unused snapshot with this credit."""
        credit, slot = entry
        snapshot = self._snapshots.get(slot)
        return snapshot is not None and snapshot.credit == credit and not self._num_users[slot]
