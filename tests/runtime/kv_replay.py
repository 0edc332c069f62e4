"""The slow version of all that happens to KV: plain lists of pages by sequence, and a set for the tree."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PAGE_SIZE = 16


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)


@dataclass
class Replayed:
    """One sequence."""

    length: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    reserved: list[int] | None = None  # pages of a step
    pruned: tuple[int, int, int] | None = None  # of the tokens [start, stop) only so many have rows

    def rows_of(self, num_tokens: int) -> int:
        if self.pruned is None:
            return num_tokens
        start, stop, num_rows = self.pruned
        return num_tokens - (stop - start - num_rows)

    @property
    def tainted(self) -> set[int]:
        """Its pages that are nobody else's to find."""
        if self.pruned is None:
            return set()
        return {*self.pages[self.pruned[0] // PAGE_SIZE :], *(self.reserved or ())}


@dataclass
class KVReplay:
    """Does again what a log says, and fails where a line is not what these lists say."""

    num_pages: int = 0
    sequences: dict[int, Replayed] = field(default_factory=dict)
    tree: set[int] = field(default_factory=set)
    num_events: dict[str, int] = field(default_factory=dict)

    def run(self, lines: Iterable[str]) -> None:
        for line in lines:
            event = json.loads(line)
            try:
                self._do(event)
            except AssertionError as error:
                raise AssertionError(f"after {sum(self.num_events.values())} lines: {line.strip()}: {error}") from error
            name = event["event"]
            self.num_events[name] = self.num_events.get(name, 0) + 1

    @property
    def free(self) -> set[int]:
        owned = set(self.tree)
        for sequence in self.sequences.values():
            owned |= {*sequence.pages, *(sequence.reserved or ())}
        return set(range(self.num_pages)) - owned

    def _do(self, event: dict[str, Any]) -> None:
        name = event["event"]
        before = len(self.free)
        if "seq" not in event:
            getattr(self, f"_{name}")(event)
        else:
            sequence = self.sequences.get(event["seq"])
            if name in ("open", "open_pruned", "fork"):
                assert sequence is None, "the id is taken"
                sequence = self.sequences[event["seq"]] = Replayed()
            assert sequence is not None, "nobody has this id"
            said = event["length"][0], event["computed"][0]
            assert said == (sequence.length, sequence.computed), f"it has {sequence}"
            getattr(self, f"_{name}")(event, sequence)
            sequence.length = event["length"][1]
            assert event["computed"][1] == sequence.computed <= sequence.length
            assert sequence.pruned is None or sequence.pruned[1] <= sequence.computed
            assert len(sequence.pages) == pages_for(sequence.rows_of(sequence.computed))
            assert len(set(sequence.pages)) == len(sequence.pages)
            if name == "close":
                del self.sequences[event["seq"]]
        if "free" in event:
            assert event["free"] == [before, len(self.free)]
        tainted = {page for sequence in self.sequences.values() for page in sequence.tainted}
        assert not tainted & self.tree, "what was computed over a pruned prefix can be found"

    def _open(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert set(event["pages"]) <= self.tree, "shared pages are the tree's"
        sequence.pages, sequence.computed = event["pages"], event["computed"][1]

    def _open_pruned(self, event: dict[str, Any], sequence: Replayed) -> None:
        start, stop, num_rows = event["pruned"]
        num_shared = start // PAGE_SIZE
        assert start % PAGE_SIZE == 0 and 0 < num_rows <= stop - start
        assert set(event["pages"][:num_shared]) <= self.tree, "shared pages are the tree's"
        assert set(event["pages"][num_shared:]) <= self.free, "a page that is somebody's was taken"
        sequence.pages, sequence.computed, sequence.pruned = event["pages"], stop, (start, stop, num_rows)

    def _resume(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert set(event["pages"]) <= self.tree | set(sequence.pages)
        if event["computed"][1] > sequence.computed:
            sequence.pruned = None
        sequence.pages, sequence.computed = event["pages"], event["computed"][1]

    def _fork(self, event: dict[str, Any], sequence: Replayed) -> None:
        parent, at = self.sequences[event["parent"]], event["length"][1]
        if parent.pruned is not None and at > parent.pruned[0]:
            sequence.pruned = parent.pruned
        assert at <= parent.computed and event["pages"] == parent.pages[: pages_for(sequence.rows_of(at))]
        sequence.pages, sequence.computed = list(event["pages"]), at

    def _reserve(self, event: dict[str, Any], sequence: Replayed) -> None:
        start, stop = event["reserved"]
        assert sequence.reserved is None and start == sequence.computed < stop <= sequence.length
        assert set(event["pages"]) <= self.free, "a page that is somebody's was taken"
        num_kept = len(sequence.pages) - len(event["copies"])
        assert num_kept + len(event["pages"]) == pages_for(sequence.rows_of(stop))
        for source, target, num_rows in event["copies"]:
            last_row = sequence.rows_of(start) % PAGE_SIZE
            assert (source, num_rows) == (sequence.pages[-1], last_row) and target == event["pages"][0]
        sequence.reserved = event["pages"]

    def _drop(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert sequence.reserved is not None
        sequence.reserved = None

    def _commit(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert sequence.reserved is not None and sequence.computed < event["computed"][1] <= sequence.length
        assert event["pages"] == sequence.reserved
        sequence.pages = sequence.pages[: event["kept"]] + event["pages"]
        sequence.computed, sequence.reserved = event["computed"][1], None

    def _share(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert sequence.pruned is None, "it has nothing to share"
        assert set(event["pages"]) <= self.tree | set(sequence.pages), "pages from nowhere"
        sequence.pages = sequence.pages[: event["kept"]] + event["pages"]
        assert set(sequence.pages[: sequence.computed // PAGE_SIZE]) <= self.tree, "full pages that nobody can find"

    def _append(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert event["length"][0] <= event["length"][1]

    def _pop(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert 0 <= event["length"][1] <= event["length"][0]
        sequence.computed = min(sequence.computed, event["length"][1])
        if sequence.pruned is not None and sequence.computed < sequence.pruned[1]:
            sequence.computed, sequence.pruned = min(sequence.computed, sequence.pruned[0]), None
        del sequence.pages[pages_for(sequence.rows_of(sequence.computed)) :]

    def _preempt(self, event: dict[str, Any], sequence: Replayed) -> None:
        assert sequence.reserved is None
        sequence.pages, sequence.computed, sequence.pruned = [], 0, None

    _close = _preempt

    def _keep(self, event: dict[str, Any]) -> None:
        held = {page for each in self.sequences.values() for page in (*each.pages, *(each.reserved or ()))}
        assert not set(event["pages"]) & self.tree and set(event["pages"]) <= held
        self.tree |= set(event["pages"])

    def _evict(self, event: dict[str, Any]) -> None:
        assert set(event["pages"]) <= self.tree
        self.tree -= set(event["pages"])

    def _begin(self, event: dict[str, Any]) -> None:
        self.num_pages = event["num_pages"]
        self._start_over(event)

    def _start_over(self, event: dict[str, Any]) -> None:
        self.sequences.clear()
        self.tree.clear()
