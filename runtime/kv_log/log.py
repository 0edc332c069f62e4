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
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from .rotating_file import RotatingFile

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
        """A log that continues a file, which is renamed when it has `max_bytes`; see `rotating_file.py`.

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
