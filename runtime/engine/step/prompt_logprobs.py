"""Read the logprobs of a prompt's own tokens.

Knows one prompt and its rows of logits.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..completion import PromptLogprobs
from .readers import LogitRows
from .sampler import logprob_of


class PromptLogprobsReader:
    """A reader of all rows of a prompt except the last, which is for the reply's first token.

    Attributes:
        logprobs: the logprobs read so far.
    """

    def __init__(self, prompt_ids: Iterable[int], num_top: int) -> None:
        self.logprobs = PromptLogprobs(prompt_ids, num_top)

    @property
    def num_reusable(self) -> int | None:
        """Number of first tokens whose rows were read; None: all, or the prompt has one token, and no such row."""
        num_rows = self.logprobs.num_rows
        return None if num_rows and self.logprobs.is_complete else num_rows

    @property
    def reading(self) -> PromptLogprobs | None:
        """The logprobs, once they are complete."""
        return self.logprobs if self.logprobs.is_complete else None

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the prompt's positions that were not read yet."""
        return range(max(start, self.logprobs.num_rows), min(stop, len(self.logprobs.token_ids) - 1))

    def read(self, rows: LogitRows) -> bool:
        """Add the logprob of the token after each position."""
        step, asked, stop = rows.step, self.logprobs, rows.first + len(rows.positions)
        if not all(step.is_finite[rows.first : stop]):
            return False
        for row in range(rows.first, stop):
            asked.append(logprob_of(step, row, asked.next_id, asked.num_top))
        return True
