"""A span of positions of which only some have KV rows: rows are not positions.

Knows how many rows there are, and of which tokens; neither how the rows were chosen, nor the pages they lie in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..errors import SparseSpanError


@dataclass(frozen=True)
class SparseSpan:
    """Of the positions `[start, stop)` of a sequence only `num_rows` have KV rows::

        positions  [0 .... start) [start ..................... stop) [stop ....... len)
        KV rows    [0 .... start) [start ... start + num_rows)       [start + num_rows ...)
                    exact          chosen, of any of them             approximate

    Each layer and KV head may have rows of other tokens, in any order. KV that is computed over them is approximate:
    it is not what the text alone gives. So only this sequence ever reads the rows from `start` on, even if all rows
    were chosen.

    >>> span = SparseSpan(start=16, num_rows=8, token_ids=tuple(range(48)))
    >>> span.stop, span.num_missing
    (48, 24)

    Raises:
        SparseSpanError: it begins inside a page, or has other than 1 to `stop - start` rows.
    """

    start: int  # a multiple of PAGE_SIZE
    num_rows: int
    token_ids: tuple[int, ...] = field(repr=False)  # of [0, stop): the rows belong to these tokens only
    generated: bytes = field(default=b"", repr=False)  # one byte a token, as far as known: 1 where a model made it

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
        """The first position after the span: from here on each has its own row again."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Positions without a row. From `stop` on, a row's number is its position less this."""
        return len(self.token_ids) - self.start - self.num_rows
