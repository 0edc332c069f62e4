"""How far a model is from transformers on a golden of a real model, and whether that is further than llama.cpp.

Knows the golden files and arithmetic; NumPy only. The test that runs the model hands over logits.

A whole distribution takes a megabyte a position, so a golden has a few ids of each: the most likely, and some that were
drawn from the others as likely as they are. With p of transformers, q of the model, r = log p - log q,

    KL(p || q) = sum over the vocabulary of p (r + exp(-r) - 1),        because p and q both sum to 1

and each term is positive and small where p and q are close. The sum over the most likely ids is taken as it is; the
rest is estimated by the mean of (r + exp(-r) - 1) over the drawn ids, times their share of p. The estimate has no
bias, whatever q is. q's own sum goes over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from .smollm2_kl import Comparison

HERE = Path(__file__).resolve().parent
NUM_LIKELY = 24  # ids of each position that count by themselves
NUM_DRAWN = 8  # ids that stand for all others


@dataclass(frozen=True)
class RealGolden:
    """`real_NAME.npz`, as `real.py` made it: prompts, and what is known of the last positions of each."""

    prompts: list[RealPrompt]

    @classmethod
    def load(cls, name: str) -> Self:
        """`name` is one of `real.py`'s models."""
        with np.load(file_of(name)) as file:
            arrays = dict(file)
        count = sum(key.startswith("ids_") for key in arrays)
        return cls([RealPrompt(*(arrays[f"{field}_{i}"] for field in RealPrompt.FIELDS)) for i in range(count)])


@dataclass(frozen=True)
class RealPrompt:
    """A prompt of `T` tokens, of which the last `R` positions are compared."""

    FIELDS = ("ids", "likely", "log_probs", "llama_cpp_kl", "llama_cpp_agrees")

    ids: np.ndarray  # int32 [T], fed as they are
    likely: np.ndarray  # int32 [R, NUM_LIKELY + NUM_DRAWN], most likely first, then those drawn
    log_probs: np.ndarray  # float16, the same shape: transformers'
    llama_cpp_kl: np.ndarray  # float32 [R], KL(transformers || llama.cpp) in nats, over the whole vocabulary
    llama_cpp_agrees: np.ndarray  # bool [R], whether both choose the same next token

    def compare(self, logits: Iterable[np.ndarray]) -> Iterator[Comparison]:
        """Compare logits of all positions, `[n, vocab]` after `[n, vocab]`: those of all at once are a gigabyte."""
        start = len(self.likely) - len(self.ids)  # counted from the first that is compared
        for chunk in logits:
            if start + len(chunk) > 0:
                yield self._compare(chunk[max(-start, 0) :], max(start, 0))
            start += len(chunk)

    def _compare(self, logits: np.ndarray, first: int) -> Comparison:
        rows = slice(first, first + len(logits))
        likely, log_probs = self.likely[rows], self.log_probs[rows].astype(np.float64)
        found = np.take_along_axis(logits, likely, axis=1) - _log_sum(logits)[:, None]
        return Comparison(
            kl=estimated_kl(log_probs, found),
            agrees=logits.argmax(axis=-1) == likely[:, 0],
            llama_cpp_kl=self.llama_cpp_kl[rows].astype(np.float64),
            llama_cpp_agrees=self.llama_cpp_agrees[rows],
        )


def estimated_kl(log_probs: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL in nats of each position; both `[R, NUM_LIKELY + NUM_DRAWN]`, of the same ids."""
    weights = np.exp(log_probs)
    rest = np.clip(1.0 - weights[:, :NUM_LIKELY].sum(axis=1, keepdims=True), 0.0, 1.0)
    weights[:, NUM_LIKELY:] = rest / NUM_DRAWN
    ratio = log_probs - found
    kl: np.ndarray = (weights * (ratio + np.exp(-ratio) - 1.0)).sum(axis=1)
    return kl


def file_of(name: str) -> Path:
    return HERE / f"real_{name}.npz"


def _log_sum(logits: np.ndarray) -> np.ndarray:
    """Logarithm of the sum of exponentials of each row, float64."""
    largest = logits.max(axis=-1)
    sums = [np.exp(row - top).sum(dtype=np.float64) for row, top in zip(logits, largest, strict=True)]
    return np.asarray(np.log(sums) + largest.astype(np.float64))
