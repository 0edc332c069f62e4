"""A span of positions of which only some have KV rows, so that rows are not positions.

Knows the number of rows, and the tokens of the span; not how the rows were selected, nor their pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..errors import SparseSpanError


@dataclass(frozen=True)
class SparseSpan:
    """The positions `[start, stop)` of a sequence, of which only `num_rows` have KV rows::

        positions  [0 .... start) [start ..................... stop) [stop ....... len)
        KV rows    [0 .... start) [start ... start + num_rows)       [start + num_rows ...)
                    exact          selected among the span           approximate

    Each layer and KV head can have rows of other tokens, in any order. KV that is computed over them is approximate: it
    is not the KV of the text alone. So only this sequence ever reads the rows from `start` on, even if all rows were
    selected.

    >>> span = SparseSpan(start=16, num_rows=8, token_ids=tuple(range(48)))
    >>> span.stop, span.num_missing
    (48, 24)

    Raises:
        SparseSpanError: it begins inside a page, or does not have 1 to `stop - start` rows.
    """

    start: int  # a multiple of PAGE_SIZE
    num_rows: int
    token_ids: tuple[int, ...] = field(repr=False)  # of [0, stop): the rows belong to these tokens only
    generated: bytes = field(default=b"", repr=False)  # one byte a token, as far as known: 1 if a model generated it

    def __post_init__(self) -> None:
        if self.start < 0 or self.start % PAGE_SIZE:
            raise SparseSpanError(
                f"a sparse span begins at position {self.start}, inside a page of {PAGE_SIZE}; begin it with a page"
            )
        if not 1 <= self.num_rows <= self.stop - self.start:
            raise SparseSpanError(
                f"{self.num_rows} rows are for the positions {self.start} to {self.stop}; choose 1 to "
                f"{self.stop - self.start}"
            )

    @property
    def stop(self) -> int:
        """First position after the span. From here on each position has its own row again."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Number of positions without a row. From `stop` on, a row's number is its position minus this."""
        return len(self.token_ids) - self.start - self.num_rows
