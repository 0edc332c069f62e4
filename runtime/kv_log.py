"""Write down what happens to the KV of sequences, to be replayed when something is wrong: one JSON line an operation.

Knows ids, lengths and pages, never tokens. A line has an `event` and, where one is concerned, the sequence as `seq`,
its `length` and how many of its tokens are `computed`, each before and after::

    {"event": "append", "seq": 3, "length": [40, 41], "computed": [40, 40]}

    begin                 of a process, with `num_pages`; nothing of another one in the same file is left
    open, fork, resume    `pages`: all that the sequence has now; `fork` has its `parent`
    open_pruned           likewise; `pruned`: of the tokens `[start, stop)` only so many have rows: [start, stop, rows].
                          What is behind `start` is nobody else's, until a `pop` below `stop`, a `resume` that gains,
                          or a `preempt` ends that
    reserve               `pages` taken to compute the tokens `reserved`; `copies` of rows: [source, target, rows]
    commit, drop          the end of that; after a commit, `pages` are the sequence's after its first `kept` ones
    share                 likewise: its full pages are the tree's now, which had some of them already
    append, pop           of tokens; `pop` gives back the pages that no token is left in
    preempt, close        all its pages are given back
    keep, evict           `pages` that the tree owns from now on, or no longer
    start_over            there is nothing any more

Where pages are taken or given back, `free` are those that nobody owns, before and after.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from .sequence import Sequence

_LOGGER = logging.getLogger(__name__)


class KVLog:
    """A file of operations. One that cannot be written is left alone: serving goes on."""

    def __init__(self, file: TextIO) -> None:
        """Write to `file`, which is this object's own from here on."""
        self._file: TextIO | None = file

    @classmethod
    def open(cls, path: str | Path) -> KVLog:
        """A log that goes on at the end of a file; every line is there as soon as it happened.

        Raises:
            OSError: the file cannot be written.
        """
        return cls(open(path, "a", encoding="utf-8", buffering=1))

    def write(
        self,
        event: str,
        sequence: Sequence | None = None,
        *,
        length: int | None = None,
        computed: int | None = None,
        **fields: object,
    ) -> None:
        """Add a line. `length` and `computed` are those of the sequence before, where they were others."""
        if self._file is None:
            return
        line: dict[str, object] = {"event": event}
        if sequence is not None:
            now, num_computed = len(sequence), sequence.num_computed
            line["seq"] = sequence.seq_id
            line["length"] = [now if length is None else length, now]
            line["computed"] = [num_computed if computed is None else computed, num_computed]
        try:
            self._file.write(json.dumps(line | fields) + "\n")
        except (OSError, ValueError) as error:
            _LOGGER.error("the KV log ends here: %s", error)
            self._file = None

    def close(self) -> None:
        """End the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
