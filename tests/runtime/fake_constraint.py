"""A language that depends on every token so far, so that a token lost, doubled or foreign shows in what follows."""

from __future__ import annotations

import numpy as np
from radixlm.runtime.errors import ConstraintFailed
from radixlm.runtime.model.batch import Int32Array


def mask_of(allowed: set[int], vocab_size: int) -> Int32Array:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class ChainConstraint:
    """Five tokens may come, which ones by a digest of all before; None instead of a mask where the digest is even."""

    def __init__(self, vocab_size: int, *, num_tokens: int = 10**9, fails_after: int = 10**9) -> None:
        self.vocab_size = vocab_size
        self.seen: list[int] = []
        self._num_tokens = num_tokens
        self._fails_after = fails_after

    @property
    def is_finished(self) -> bool:
        return len(self.seen) >= self._num_tokens

    @property
    def allowed(self) -> set[int]:
        digest = 7
        for token in self.seen:
            digest = (digest * 1103515245 + token * 12345 + 1) % 2**31
        if digest % 4 == 0:
            return set(range(self.vocab_size))
        return {int(i) for i in np.random.default_rng(digest).integers(0, self.vocab_size, 5)}

    def mask(self) -> Int32Array | None:
        if len(self.seen) >= self._fails_after:
            raise ConstraintFailed("nothing can come here; ask for something else")
        allowed = self.allowed
        return None if len(allowed) == self.vocab_size else mask_of(allowed, self.vocab_size)

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed:
            raise ConstraintFailed(f"token {token_id} may not come here")
        self.seen.append(token_id)
