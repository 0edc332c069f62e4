"""Read a reranker's score of a document: two logits after its prompt, or the one number that a head makes of it.

Knows one row of the model's outputs; not prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..step.readers import LogitRows


@dataclass(frozen=True)
class Score:
    """A document's score, from 0 to 1."""

    value: float


class TokenScoreReader:
    """A reader that compares the logits of a true and a false token, such as yes and no, after a prompt.

    The score is `P(true) / (P(true) + P(false))`.

    Args:
        num_tokens: number of tokens of the prompt.
    """

    num_reusable = None

    def __init__(self, true_id: int, false_id: int, num_tokens: int) -> None:
        self._true_id, self._false_id, self._last = true_id, false_id, num_tokens - 1
        self._score: Score | None = None

    @property
    def reading(self) -> Score | None:
        """The score, once the row was read."""
        return self._score

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the last position, if the step computes it."""
        return range(self._last, self._last + 1) if start <= self._last < stop else range(0)

    def read(self, rows: LogitRows) -> bool:
        """Compute the score from the last token's logits of the true and the false token.

        Returns False if they are not finite.
        """
        if not rows.step.is_finite[rows.first]:
            return False
        logits = rows.step.values[rows.first]
        self._score = Score(sigmoid(float(logits[self._true_id]) - float(logits[self._false_id])))
        return True


class HeadScoreReader:
    """A reader of the first row of a pair, where the model's head puts the number that it makes of all rows."""

    num_reusable = 0

    def __init__(self) -> None:
        self._score: Score | None = None

    @property
    def reading(self) -> Score | None:
        """The sigmoid of the number, once the row was read."""
        return self._score

    def wanted(self, start: int, stop: int, length: int) -> range:
        """Return the first position, if the step computes it."""
        return range(1) if start == 0 and self._score is None else range(0)

    def read(self, rows: LogitRows) -> bool:
        """Compute the score from the head's number. Returns False if it is not finite."""
        if not rows.step.is_finite[rows.first]:
            return False
        self._score = Score(sigmoid(float(rows.step.values[rows.first, 0])))
        return True


def sigmoid(x: float) -> float:
    """Return `1 / (1 + exp(-x))`, without overflow.

    >>> sigmoid(0.0), sigmoid(1000.0), sigmoid(-1000.0)
    (0.5, 1.0, 0.0)
    """
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    small = math.exp(x)
    return small / (1.0 + small)
