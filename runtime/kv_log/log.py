"""Log every change to the KV of sequences, one JSON line each; replaying a log finds errors.

Knows ids, lengths and pages, never tokens. A line has the `time`, in seconds since 1970, an `event`, and the id of the
`request`, null if only the tree changes. For a sequence it has the number as `seq`, its `length` and how many of its
tokens are `computed`, each before and after::

    {"time": 1795372800.25, "event": "append", "request": "request-7", "seq": 3, "length": [40, 41],
     "computed": [40, 40]}

    begin                 a process begins, with `num_pages`; nothing of an earlier one in the same file remains
    state                 the complete state, at the start of a file that continues a full one: `num_pages`, pages of
                          the `tree`, `sequences` with one number for each `length` and `computed`
    open, fork, resume    `pages`: all that the sequence has now; `fork` has its `parent`. A sequence opened as
                          `private` shares pages with its forks alone
    open_pruned           the same; `pruned`: the tokens `[start, stop)` have only some rows: [start, stop, rows].
                          Pages after `start` are not shared, until a `pop` below `stop`, a `resume` that gains,
                          or a `preempt` ends that
    reserve               `pages` taken to compute the tokens `reserved`; `copies` of rows: [source, target, rows]
                          The last `draft` ones can be draft tokens after the sequence's own
    accept                `pages` that remain of those, after the accepted draft tokens were appended
    commit, drop          the reservation ends; after a commit, `pages` are the sequence's after its first `kept` ones
    share                 the same; its full pages are the tree's now, which had some of them already
    append, pop           of tokens; `pop` releases the pages that become empty
    preempt, close        all its pages are released
    keep, evict           `pages` that the tree owns from now on, or no longer
    start_over            everything is released

If pages are taken or released, `free` counts the pages without an owner, before and after. `replay.py` reads the log.

A full file `FILE` is renamed `FILE.1`, the former `FILE.1` becomes `FILE.2`, and so on.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

NUM_OLDER = 4  # older files that are kept


class RotatingFile:
    """A file of lines, each written at once. The caller calls `rotate`, between two lines, to start a new file.

    Args:
        max_bytes: size at which the file is full; None: never. Pipes and devices are never full, because they cannot be
            renamed.
        is_private: whether only the user can read the files.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, max_bytes: int | None, *, is_private: bool = False) -> None:
        self._path, self._is_private = Path(path), is_private
        is_ours = self._path.is_file() or not self._path.exists()
        self._max_bytes = max_bytes if is_ours else None
        self._num_bytes = self._path.stat().st_size if self._path.exists() else 0
        is_cut = _is_cut(self._path)
        self._file = self._open("a")
        if is_cut:  # the previous process ended in the middle of a line
            self.write("\n")

    @property
    def is_full(self) -> bool:
        """Return whether it is time to call `rotate`."""
        return self._max_bytes is not None and self._num_bytes >= self._max_bytes

    def write(self, text: str) -> None:
        """Append complete lines to the file; never rotates it, because the caller decides when (`is_full`).

        Raises:
            OSError: they cannot be written.
        """
        self._num_bytes += len(text.encode())
        self._file.write(text)

    def rotate(self) -> None:
        """Rename the file and the older ones, remove the oldest, and start an empty file.

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
        """Close the file."""
        self._file.close()

    def _open(self, mode: str) -> TextIO:
        opener = _open_privately if self._is_private else None
        return open(self._path, mode, encoding="utf-8", buffering=1, opener=opener)  # type: ignore[return-value]


def files_of(path: Path) -> list[Path]:
    """Return the files of a rotating file, the oldest first; `path` is the last, whether it exists or not."""
    older = [_numbered(path, number) for number in reversed(range(1, NUM_OLDER + 1))]
    return [*(file for file in older if file.is_file()), path]


def _open_privately(path: str, flags: int) -> int:
    """Open a file that only its owner can read, also if it exists; return its descriptor."""
    file = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.fchmod(file, 0o600)  # an existing file can have another mode
    return file


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _is_cut(path: Path) -> bool:
    """Return whether a file ends within a line."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


_LOGGER = logging.getLogger(__name__)


class LogFile(Protocol):
    """A file that lines are written to."""

    def write(self, text: str, /) -> object: ...
    def close(self) -> None: ...


class LoggedSequence(Protocol):
    """The properties of a sequence that a line contains."""

    @property
    def request_id(self) -> str | None: ...
    @property
    def seq_id(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    def __len__(self) -> int: ...


class KVLog:
    """A file of operations. If it cannot be written, the log ends and serving continues.

    Args:
        file: owned by this object from now on.
        clock: seconds since 1970.
    """

    def __init__(self, file: LogFile, *, clock: Callable[[], float] = time.time) -> None:
        self._file: LogFile | None = file
        self._clock = clock

    @classmethod
    def open(cls, path: str | Path, max_bytes: int | None = None) -> KVLog:
        """Open a log that appends to a file, which is renamed when it has `max_bytes`; see `RotatingFile`.

        Raises:
            OSError: the file cannot be written.
        """
        return cls(RotatingFile(path, max_bytes))

    @property
    def is_full(self) -> bool:
        """Return whether it is time to call `rotate`."""
        return isinstance(self._file, RotatingFile) and self._file.is_full

    def rotate(self, **state: object) -> None:
        """Start a new file with a line of the complete `state`, so that it can be replayed without the earlier ones."""
        if isinstance(self._file, RotatingFile):
            try:
                self._file.rotate()
            except OSError as error:
                self._end(error)
        self._write_line({"event": "state", "request": None, **state})

    def write(
        self,
        event: str,
        sequence: LoggedSequence | None = None,
        *,
        length: int | None = None,
        computed: int | None = None,
        **fields: object,
    ) -> None:
        """Write a line for an event, with the sequence's request, number, length and computed tokens.

        `length` and `computed` are values before the operation, given only if they differ from the present ones.
        """
        if self._file is None:
            return
        line: dict[str, object] = {"event": event, "request": None}
        if sequence is not None:
            now, num_computed = len(sequence), sequence.num_computed
            line["request"] = sequence.request_id
            line["seq"] = sequence.seq_id
            line["length"] = [now if length is None else length, now]
            line["computed"] = [num_computed if computed is None else computed, num_computed]
        self._write_line(line | fields)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_line(self, line: dict[str, object]) -> None:
        """Write a line with the time, as JSON; if it cannot be written, end the log. Does nothing after that."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(self._clock(), 6), **line}) + "\n")
        except (OSError, ValueError) as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        _LOGGER.error("the KV log ends here: %s", error)
        self._file = None
