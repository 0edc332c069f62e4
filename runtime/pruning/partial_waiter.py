"""Somebody who waits for a part of a stored prefix: what the disk has for him, and how far that is read.

Knows one prompt and its part, not who else waits, nor when it is too late.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_match import PrefixMatch
from ..cache.sparse_span import SparseSpan
from ..model.batch import PageIO, UInt8Array
from ..prefix.disk_index import StoredPrefix
from ..prefix.disk_reader import ReadWork
from ..prefix.loaded_rows import LoadedRows
from ..prefix.page_loader import FindPrefix
from .partial_prefix import Choice, PartialPrefix
from .run_cache import RunCache

if TYPE_CHECKING:
    from ..model.batch import Float32Array
    from ..store import PageStore


class Stage(Enum):
    """What the reader was asked for last."""

    OPENING = auto()
    READING = auto()  # what most queries looked at
    CHOOSING = auto()  # and reading what this one looks for


@dataclass(eq=False)
class PartialWaiter:
    """Who waits, and what is there by now.

    `open`, `read` and `choose` are the reader's thread's, the rest the engine's; never at once.
    """

    name: str
    find: FindPrefix
    num_tokens_ahead: int | None
    match: PrefixMatch  # the disk's
    prefix: StoredPrefix
    num_in_memory: int  # pages
    start: int  # the page from which on rows are pruned
    budget: float
    num_bytes: int  # of rows when all is read, about
    deadline: float
    stage: Stage = Stage.OPENING
    partial: PartialPrefix | None = None
    pages: UInt8Array | None = None  # the rows that are there
    choice: Choice | None = None
    is_forgotten: bool = False  # with all that is kept of its namespace's runs
    planned_at: float = 0.0
    expected_s: float = 0.0
    work: ReadWork = field(init=False)

    @property
    def stop(self) -> int:
        """The page before which rows are pruned; the rest of the prompt is the query."""
        return len(self.prefix.heads) if self.partial is None else self.start + self.partial.num_tokens // PAGE_SIZE

    @property
    def num_query_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.match.prompt_ids) - self.stop * PAGE_SIZE

    @property
    def opened(self) -> PartialPrefix:
        """The part; it must be open."""
        assert self.partial is not None, "nothing is open"
        return self.partial

    def load(self, io: PageIO, dropped_mass: float = 0.0) -> LoadedRows:
        """Of as many rows as are there."""
        assert self.pages is not None, "nothing was read"
        stop = self.stop * PAGE_SIZE
        token_ids, generated = self.prefix.token_ids[:stop], self.prefix.generated[:stop]
        span = SparseSpan(self.start * PAGE_SIZE, self.opened.num_there, token_ids, generated)
        return LoadedRows(self.match, span, self.pages, io, dropped_mass)

    # In the reader's thread.

    def open(self, store: PageStore, known: RunCache) -> bool:
        """Begin where memory ends, or, where no run begins there, because memory has a part of one, at the start."""
        for start in dict.fromkeys((self.num_in_memory, 0)):
            heads, num_before = self.prefix.heads[start:], start * PAGE_SIZE
            self.start = start
            self.partial = PartialPrefix.open(store, heads, budget=self.budget, num_before=num_before, known=known)
            if self.partial is not None:
                return True
        return False

    def read(self) -> bool:
        """Read what most queries looked at."""
        if not self.opened.read_stored():
            return False
        self.pages = self.opened.rows()
        return True

    def choose(self, queries: Float32Array) -> bool:
        """Choose the rest by what the prompt looks for, and read it, if that is enough."""
        self.choice = self.opened.choose(queries)
        if not self.choice.is_enough or not self.opened.read_chosen():
            return False
        self.pages = self.opened.rows()
        return True
