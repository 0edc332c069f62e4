"""Which tokens of a text a perplexity counts, and how much text stands before each of them.

Knows token ids and NumPy only, so that every evaluator can import it, each in its own environment. A text is cut
into windows of `size` tokens that start `size / 2` apart:

    window 0    [0 .......... size/2 .......... size)      counts 1 .. size
    window 1           [size/2 .......... size .......... 3 size/2)     counts its second half

so that every token but the first is counted once, after at least `size / 2` tokens of context where the text has
them. llama.cpp's perplexity tool takes the same windows without the overlap, and so counts half of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Int32 = NDArray[np.int32]

_ROWS = 64  # rows of logits in float64 at once: 25 MB for a vocabulary of 49,152


@dataclass(frozen=True)
class Window:
    """Tokens that are fed from position 0 on; those from index `first` on are predicted and counted."""

    token_ids: Int32  # [n], n <= size
    first: int  # >= 1

    @property
    def targets(self) -> Int32:
        """The counted tokens, `[n - first]`; token `first + i` is predicted by the logits of `first + i - 1`."""
        return self.token_ids[self.first :]


def cut(token_ids: Sequence[int], size: int, bos_token_id: int | None = None) -> list[Window]:
    """The windows of a text.

    Where the model wants a BOS token, it takes the place of each window's first token, which is never counted
    (llama.cpp's tool does the same).

    >>> [(w.token_ids.tolist(), w.first) for w in cut(range(7), size=4)]
    [([0, 1, 2, 3], 1), ([2, 3, 4, 5], 2), ([4, 5, 6], 2)]
    """
    windows = []
    for start in range(0, max(1, len(token_ids) - size // 2), size // 2):
        ids = np.array(token_ids[start : start + size], np.int32)
        if bos_token_id is not None:
            ids[0] = bos_token_id
        windows.append(Window(ids, size // 2 if start else 1))
    return windows


def log_probs(logits: NDArray[np.float32], targets: Int32) -> Float64:
    """The natural logarithm of each target's probability, `[n]`, from logits `[n, vocab]`; computed in float64."""
    parts = [_log_probs(logits[i : i + _ROWS], targets[i : i + _ROWS]) for i in range(0, len(targets), _ROWS)]
    return np.concatenate([*parts, np.zeros(0)])


def _log_probs(logits: NDArray[np.float32], targets: Int32) -> Float64:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, targets[:, None], axis=-1)[:, 0]
    return np.asarray(chosen - np.log(np.exp(shifted).sum(axis=-1)))


def save(path: Path, windows: Sequence[Window]) -> None:
    """Write windows for an evaluator in another process."""
    lengths = [len(window.token_ids) for window in windows]
    np.savez(
        path,
        token_ids=np.concatenate([window.token_ids for window in windows]),
        lengths=np.array(lengths),
        firsts=np.array([window.first for window in windows]),
    )


def load(path: Path) -> Iterator[Window]:
    """What `save` wrote, in its order."""
    with np.load(path) as file:
        parts = np.split(file["token_ids"], np.cumsum(file["lengths"])[:-1])
        for token_ids, first in zip(parts, file["firsts"], strict=True):
            yield Window(token_ids, int(first))
