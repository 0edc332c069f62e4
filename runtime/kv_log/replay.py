"""Replay a KV log, and find the first invalid line.

Holds the live state at a line, and never the log itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from ..errors import KVLogBroken
from .lines import (
    DECODER,
    AnyLine,
    Begin,
    Close,
    Evict,
    Fork,
    KeepPages,
    Open,
    OpenPruned,
    SequenceLine,
    StartOver,
    State,
)
from .log import files_of
from .replayed_sequence import KVLawBroken, PageOwners, ReplayedSequence, require

MAX_LINE_BYTES = 256 << 20  # a state of millions of pages has less; anything longer is not a line
_MAX_SHOWN = 300  # characters of a line, in a message


def replay(path: Path) -> KVReplay:
    """Replay a log, with the files that it was rotated into; return the state at its end.

    Raises:
        KVLogBroken: a line breaks a rule, or cannot be decoded, or there is no line at all. A line that was cut,
            because its process ended, is skipped.
        OSError: a file cannot be read.
    """
    replayed = KVReplay()
    for file in files_of(path):
        with file.open("rb") as lines:
            replayed.run(iter(partial(lines.readline, MAX_LINE_BYTES), b""), str(file))
        replayed.num_files += 1
    if not replayed.num_events.total():
        raise KVLogBroken(f"{path} has no line; a log begins with how many pages there are")
    return replayed


@dataclass
class KVReplay:
    """The state after the lines so far; `run` raises if a line contradicts it."""

    owners: PageOwners = field(default_factory=lambda: PageOwners(0))
    sequences: dict[int, ReplayedSequence] = field(default_factory=dict)
    num_events: Counter[str] = field(default_factory=Counter)
    num_files: int = 0
    _is_begun: bool = False

    def run(self, lines: Iterable[bytes], name: str = "log") -> None:
        """Replay lines; `name` is the name of their file.

        Raises:
            KVLogBroken: see `replay`.
        """
        unread: KVLogBroken | None = None  # an invalid line, which can be cut if its process wrote nothing after it
        text = b""
        for number, text in enumerate(lines, 1):
            try:
                line = DECODER.decode(text)
                if unread is not None and not isinstance(line, Begin):
                    raise unread
                unread = None
                self._replay_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if unread is not None:
                    raise unread from None
                unread = _error_of_line(name, number, text, f"it is no line of a KV log: {error}")
            except KVLawBroken as broken:
                raise _error_of_line(name, number, text, str(broken)) from None
        if unread is not None and text.endswith(b"\n"):
            raise unread

    def _replay_line(self, line: AnyLine) -> None:
        """Apply one line to the pages and sequences, and count its event.

        Raises:
            KVLawBroken: the line is not valid after those before it.
        """
        before = self.owners.num_free
        require(self._is_begun or isinstance(line, Begin | State), "a log begins with how many pages there are")
        match line:
            case Begin():
                self._begin(line.num_pages)
            case State():
                self._replay_state(line)
            case StartOver():
                self._begin(self.owners.num_pages)
            case KeepPages():
                self.owners.keep(line.pages)
                self._require_untainted(set(line.pages))
            case Evict():
                self.owners.evict(line.pages)
                self._require_free(before, line.free)
            case _:
                self._replay_sequence_line(line)
                self._require_free(before, line.free)
        self.num_events[str(line.__struct_config__.tag)] += 1

    def _begin(self, num_pages: int) -> None:
        """Start over with `num_pages` free pages, and no sequences."""
        self.owners = PageOwners(num_pages)
        self.sequences.clear()
        self._is_begun = True

    def _replay_state(self, line: State) -> None:
        """Begin with this state, or compare it with the state that the earlier lines produced."""
        if self._is_begun:
            require(line.num_pages == self.owners.num_pages, f"there were {self.owners.num_pages} pages before it")
            require(sorted(line.tree) == sorted(self.owners.tree), "the tree is not what the lines before it make")
            are_same = [
                stated.seq in self.sequences and self.sequences[stated.seq].agrees_with(stated)
                for stated in line.sequences
            ]
            require(all(are_same) and len(are_same) == len(self.sequences), "the sequences are not what they make")
            return
        self._begin(line.num_pages)
        self.sequences = {stated.seq: ReplayedSequence.of(stated, self.owners) for stated in line.sequences}
        self.owners.take(line.tree)
        self.owners.tree.update(line.tree)
        self._require_untainted(self.owners.tree)

    def _replay_sequence_line(self, line: SequenceLine) -> None:
        """Apply a line to its sequence, which `open` and `fork` lines create and `close` lines remove."""
        sequence = self.sequences.get(line.seq)
        if isinstance(line, Open | OpenPruned | Fork):
            require(sequence is None, f"there is a sequence {line.seq} already")
            sequence = self.sequences[line.seq] = ReplayedSequence(self.owners)
        if sequence is None:
            raise KVLawBroken(f"there is no sequence {line.seq}")
        sequence.replay(line, self.sequences.get(line.parent) if isinstance(line, Fork) else None)
        if isinstance(line, Close):
            del self.sequences[line.seq]

    def _require_free(self, before: int, stated: tuple[int, int] | None) -> None:
        """Raise KVLawBroken unless the free pages before and after a line are as many as it states, if it does."""
        now = self.owners.num_free
        require(stated in (None, (before, now)), f"{before} pages were free and {now} are")

    def _require_untainted(self, page_ids: set[int]) -> None:
        """Raise KVLawBroken if pages in the tree have KV of a private sequence, or KV computed over a pruned prefix."""
        for sequence in self.sequences.values():
            if page_ids & sequence.tainted:
                what = "is private" if sequence.is_private else "was computed over a pruned prefix"
                raise KVLawBroken(f"what {what} can be found")


def _error_of_line(name: str, number: int, text: bytes, law: str) -> KVLogBroken:
    """Return the error that names an invalid line, its text and the rule that it breaks."""
    shown = text.decode(errors="replace").strip()
    cut = shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + "…"
    return KVLogBroken(f"{name}, line {number}: {law}: {cut}")
