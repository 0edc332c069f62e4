"""Penalize tokens that would continue a repetition: DRY (p-e-w, oobabooga/text-generation-webui#5677, 2024).

Knows token ids and logits, not text.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams

IntArray = npt.NDArray[np.intp]

_LONGEST = 50  # tokens beyond the allowed length: longer repetitions get the same penalty


class Dry:
    """The tokens of a prompt and its reply so far, and the penalties for repeating them.

    Args:
        breaker_ids: tokens at which a repetition ends.
    """

    def __init__(
        self, params: SamplingParams, token_ids: Iterable[int], breaker_ids: IntArray, vocab_size: int
    ) -> None:
        self._params = params
        self._ids = np.fromiter(token_ids, np.int32)
        self._length = len(self._ids)
        self._is_breaker = np.zeros(vocab_size, np.bool_)
        self._is_breaker[breaker_ids] = True

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy(self)
        other._ids = self._ids.copy()
        return other

    def record(self, token_id: int) -> None:
        """Add a token."""
        if self._length == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(256, self._length), np.int32)])
        self._ids[self._length] = token_id
        self._length += 1

    def take_back(self, num_tokens: int) -> None:
        """Forget the newest tokens."""
        self._length -= num_tokens

    def penalties(self) -> dict[int, float]:
        """Return what is subtracted from the logits of tokens that would continue a repetition, by token."""
        params = self._params
        return {
            token_id: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            for token_id, length in self._repeats().items()
        }

    def _repeats(self) -> dict[int, int]:
        """Return the length of the repetition that each token would continue, if at least the allowed length."""
        last_n = self._params.dry_penalty_last_n
        start = 0 if last_n < 0 else max(0, self._length - last_n)
        newest_first = self._ids[start : self._length][::-1]
        most = min(len(newest_first) - 1, self._params.dry_allowed_length + _LONGEST)
        alive = np.ones(max(len(newest_first) - 1, 0), np.bool_)  # by distance from the end: whether all tokens match
        lengths = np.zeros(len(alive), np.int32)
        for length in range(most):
            if self._is_breaker[newest_first[length]]:
                break
            alive = alive[: len(newest_first) - 1 - length] & (newest_first[1 + length :] == newest_first[length])
            if not alive.any():
                break
            lengths[: len(alive)] += alive
        places = np.flatnonzero(lengths >= self._params.dry_allowed_length)
        order = places[np.argsort(lengths[places], kind="stable")]  # the longest repetition of a token comes last
        following = newest_first[order].tolist()
        return {
            token_id: length
            for token_id, length in zip(following, lengths[order].tolist(), strict=True)
            if not self._is_breaker[token_id]
        }
