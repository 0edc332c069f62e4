"""Log what happens to the KV of sequences, one JSON line an operation; a log is replayed to find what went wrong.

Knows ids, lengths and pages, never tokens. A line has the `time`, in seconds since 1970, an `event`, and the id of the
`request` that it concerns: null where only the tree changes. Of a sequence it has the number as `seq`, its `length` and
how many of its tokens are `computed`, each before and after::

    {"time": 1795372800.25, "event": "append", "request": "request-7", "seq": 3, "length": [40, 41],
     "computed": [40, 40]}

    begin                 of a process, with `num_pages`; nothing of another one in the same file is left
    state                 of all there is, where a file goes on from a full one: `num_pages`, pages of the `tree`,
                          `sequences` with one number for each `length` and `computed`
    open, fork, resume    `pages`: all that the sequence has now; `fork` has its `parent`. What is opened as `private`
                          shares pages with its forks alone
    open_pruned           likewise; `pruned`: of the tokens `[start, stop)` only so many have rows: [start, stop, rows].
                          What is behind `start` is not shared, until a `pop` below `stop`, a `resume` that gains,
                          or a `preempt` ends that
    reserve               `pages` taken to compute the tokens `reserved`; `copies` of rows: [source, target, rows]
                          The last `draft` ones may be behind the sequence's own: guesses
    accept                `pages` that are left of those, once as much of the draft is appended as was right
    commit, drop          the end of that; after a commit, `pages` are the sequence's after its first `kept` ones
    share                 likewise: its full pages are the tree's now, which had some of them already
    append, pop           of tokens; `pop` gives back the pages that no token is left in
    preempt, close        all its pages are given back
    keep, evict           `pages` that the tree owns from now on, or no longer
    start_over            there is nothing any more

Where pages are taken or given back, `free` counts the pages without an owner, before and after. `replay.py` reads it.

A full file `FILE` is renamed `FILE.1`, what was that becomes `FILE.2`, and so on.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

NUM_OLDER = 4  # files that are kept beside the one that is written


class RotatingFile:
    """Each line is in the file as soon as it is written. The caller calls `turn`, between two lines.

    Args:
        max_bytes: the file is full with so many; None: it never is. A pipe or a device is never full: its name is not
            ours to change.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, max_bytes: int | None) -> None:
        self._path = Path(path)
        is_ours = self._path.is_file() or not self._path.exists()
        self._max_bytes = max_bytes if is_ours else None
        self._num_bytes = self._path.stat().st_size if self._path.exists() else 0
        is_cut = _is_cut(self._path)
        self._file = self._open("a")
        if is_cut:  # the process before this one ended in the middle of a line
            self.write("\n")

    @property
    def is_full(self) -> bool:
        """Whether it is time to `turn`."""
        return self._max_bytes is not None and self._num_bytes >= self._max_bytes

    def write(self, text: str) -> None:
        """Add whole lines.

        Raises:
            OSError: they cannot be written.
        """
        self._num_bytes += len(text.encode())
        self._file.write(text)

    def turn(self) -> None:
        """Rename the file and the older ones, of which the oldest goes, and begin an empty one.

        Raises:
            OSError: one cannot be renamed.
        """
        self._file.close()
        for number in reversed(range(NUM_OLDER)):
            if (file := _numbered(self._path, number)).exists():
                file.replace(_numbered(self._path, number + 1))
        self._num_bytes = 0
        self._file = self._open("w")

    def close(self) -> None:
        """End it."""
        self._file.close()

    def _open(self, mode: str) -> TextIO:
        return open(self._path, mode, encoding="utf-8", buffering=1)  # type: ignore[return-value]


def files_of(path: Path) -> list[Path]:
    """A rotating file and what it was before, the oldest first; `path` is the last, whether it exists or not."""
    older = [_numbered(path, number) for number in reversed(range(1, NUM_OLDER + 1))]
    return [*(file for file in older if file.is_file()), path]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _is_cut(path: Path) -> bool:
    """Whether a file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


_LOGGER = logging.getLogger(__name__)


class LogFile(Protocol):
    """Where lines are written."""

    def write(self, text: str, /) -> object: ...
    def close(self) -> None: ...


class LoggedSequence(Protocol):
    """What a line says of a sequence."""

    @property
    def request_id(self) -> str | None: ...
    @property
    def seq_id(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    def __len__(self) -> int: ...


class KVLog:
    """A file of operations. If it cannot be written, the log ends and serving goes on.

    Args:
        file: this object's own from here on.
        clock: seconds since 1970.
    """

    def __init__(self, file: LogFile, *, clock: Callable[[], float] = time.time) -> None:
        self._file: LogFile | None = file
        self._clock = clock

    @classmethod
    def open(cls, path: str | Path, max_bytes: int | None = None) -> KVLog:
        """A log that continues a file, which is renamed when it has `max_bytes`; see `RotatingFile`.

        Raises:
            OSError: the file cannot be written.
        """
        return cls(RotatingFile(path, max_bytes))

    @property
    def is_full(self) -> bool:
        """Whether it is time to `turn`."""
        return isinstance(self._file, RotatingFile) and self._file.is_full

    def turn(self, **state: object) -> None:
        """Begin another file with a line of all there is, so that it can be replayed without those before it."""
        if isinstance(self._file, RotatingFile):
            try:
                self._file.turn()
            except OSError as error:
                self._end(error)
        self._add({"event": "state", "request": None, **state})

    def write(
        self,
        event: str,
        sequence: LoggedSequence | None = None,
        *,
        length: int | None = None,
        computed: int | None = None,
        **fields: object,
    ) -> None:
        """Add a line. `length` and `computed` are the sequence's before the operation, where they differ from now."""
        if self._file is None:
            return
        line: dict[str, object] = {"event": event, "request": None}
        if sequence is not None:
            now, num_computed = len(sequence), sequence.num_computed
            line["request"] = sequence.request_id
            line["seq"] = sequence.seq_id
            line["length"] = [now if length is None else length, now]
            line["computed"] = [num_computed if computed is None else computed, num_computed]
        self._add(line | fields)

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(self._clock(), 6), **line}) + "\n")
        except (OSError, ValueError) as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        _LOGGER.error("the KV log ends here: %s", error)
        self._file = None
