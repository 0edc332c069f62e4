"""A prefix of which only some tokens have keys and values: its row in a batch is shorter than its positions.

Knows numbers of positions and rows, and whose tokens they are; neither which of them were chosen, nor pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..errors import PrunedPrefixError


@dataclass(frozen=True)
class PrunedPrefix:
    """Of the positions `[start, stop)` of a sequence only `num_rows` have KV rows::

        positions  [0 .... start) [start ..................... stop) [stop ....... len)
        KV rows    [0 .... start) [start ... start + num_rows)       [start + num_rows ...)
                    exact          chosen, of any of them             tainted

    The chosen rows may be other tokens' in each layer and KV head, in any order. What is computed over them is
    tainted: it is not what the text alone gives, so nobody but the sequence ever sees it. That holds if all were
    chosen, too.

    >>> pruned = PrunedPrefix(start=16, num_rows=8, token_ids=tuple(range(48)))
    >>> pruned.stop, pruned.num_missing
    (48, 24)

    Raises:
        PrunedPrefixError: it begins inside a page, or has other than 1 to `stop - start` rows.
    """

    start: int  # a multiple of PAGE_SIZE
    num_rows: int
    token_ids: tuple[int, ...] = field(repr=False)  # of [0, stop): the rows are theirs and nobody else's
    generated: bytes = field(default=b"", repr=False)  # one byte each, as far as is known: 1 where a model made it

    def __post_init__(self) -> None:
        if self.start < 0 or self.start % PAGE_SIZE:
            raise PrunedPrefixError(
                f"a pruned prefix begins at position {self.start}, inside a page of {PAGE_SIZE}; begin it with a page"
            )
        if not 1 <= self.num_rows <= self.stop - self.start:
            raise PrunedPrefixError(
                f"{self.num_rows} rows are for the positions {self.start} to {self.stop}; choose 1 to "
                f"{self.stop - self.start}"
            )

    @property
    def stop(self) -> int:
        """The first position that has a row of its own again."""
        return len(self.token_ids)

    @property
    def num_missing(self) -> int:
        """Positions without a row: so much shorter is the KV than the positions, from `stop` on."""
        return len(self.token_ids) - self.start - self.num_rows
