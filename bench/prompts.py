"""Make prompts of random token ids: no two share a prefix, so no cache helps unless it is meant to.

Only lengths affect speed: weights and keys are read whatever the tokens are.
"""

from __future__ import annotations

import random

from radixlm.cli.bench.engine_timer import random_ids

VOCABULARY = 49_152  # SmolLM2's


class Prompts:
    """An endless supply, the same for the same seed."""

    def __init__(self, seed: int, vocabulary: int = VOCABULARY) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def ids(self, count: int) -> list[int]:
        """Return a prompt of `count` tokens."""
        return random_ids(self._random, count, self._vocabulary)

    def batch(self, num_prompts: int, count: int) -> list[list[int]]:
        """Return `num_prompts` prompts."""
        return [self.ids(count) for _ in range(num_prompts)]
