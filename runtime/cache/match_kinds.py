"""Say of each id that is used for a prompt how it was found: as the prompt's own, by text, or as an alias.

Knows ids and what they spell; not the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from radixlm.tokenizer_fix import SpelledPrompt

EXACT, TEXT, ALIAS = 0, 1, 2  # weaker and weaker


class AliasSpan(NamedTuple):
    """The used ids `[start, stop)` stand for a rendered reply that ends at `offset` of the prompt's text."""

    start: int
    stop: int
    offset: int


def kinds_of(prompt: SpelledPrompt, ids: Sequence[int], spans: Sequence[AliasSpan]) -> bytes:
    """A byte an id: EXACT where the prompt has the same id at the same place of its text, else TEXT, or ALIAS."""
    kinds = np.full(len(ids), TEXT, np.uint8)
    start, offset = 0, 0
    for span in (*spans, AliasSpan(len(ids), len(ids), 0)):
        kinds[start : span.start][_are_canonical(prompt, ids[start : span.start], offset)] = EXACT
        kinds[span.start : span.stop] = ALIAS
        start, offset = span.stop, span.offset
    return kinds.tobytes()


def _are_canonical(prompt: SpelledPrompt, ids: Sequence[int], offset: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of `ids`, spelling the text from `offset` on, are the prompt's at their place; bool[len(ids)]."""
    lengths = np.fromiter(map(len, map(prompt.spell, ids)), np.int64, len(ids))
    offsets = offset + np.cumsum(lengths) - lengths
    starts = np.array(prompt.starts[:-1])
    index = np.minimum(np.searchsorted(starts, offsets), len(starts) - 1)
    are_at_place = np.equal(starts[index], offsets)
    found: np.ndarray[Any, np.dtype[np.bool_]] = are_at_place & np.equal(np.array(prompt.ids)[index], ids)
    return found
