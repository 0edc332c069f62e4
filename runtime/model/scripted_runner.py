"""Let a model say what it is told: its tokens are those of a script, whatever it computes.

For one request at a time. Knows arrays and ids, not where a script comes from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .batch import Batch, Float32Array, PageCopy, Runner, TopLogits


class ScriptedRunner:
    """Runs `model`, or nothing, and says the ids of `script` one after the other to a request that takes the best.

    >>> runner = ScriptedRunner(vocab_size=10)
    >>> runner.script.extend([7, 8])
    >>> [int(runner.top_logits(1, 10).token_ids[0, 0]) for _ in range(3)]
    [7, 8, 0]

    Args:
        model: computes what is asked, and goes on where the script ends; None: nothing is computed, and that is id 0.
    """

    def __init__(self, vocab_size: int, model: Runner | None = None) -> None:
        self.script: deque[int] = deque()
        self._vocab_size = vocab_size
        self._model = model
        self._guesses: list[int] = []  # of the last forward: what is fed behind the row that says a token

    def forward(self, batch: Batch) -> Float32Array:
        """The model's logits `[R, vocab_size]`, or zeros."""
        arrays = batch.arrays
        self._guesses = arrays.token_ids[arrays.logit_rows[1:]].tolist()
        if self._model is not None:
            return self._model.forward(batch)
        return np.zeros((batch.shape[3], self._vocab_size), np.float32)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """The next id of the script as the largest logit, and the ones after it as far as they were guessed; the
        model's own after its end."""
        if self._model is not None and not self.script:
            return self._model.top_logits(num_rows, vocab_size)
        said = [self.script.popleft() if self.script else 0]
        for guess in self._guesses[: num_rows - 1]:
            if guess != said[-1] or not self.script:
                break
            said.append(self.script.popleft())
        ids = np.array([*said, *said[-1:] * (num_rows - len(said))], np.int32)[:, None]
        return TopLogits(np.zeros_like(ids, np.float32), ids, np.ones(num_rows, np.int32))

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """The model's."""
        if self._model is not None:
            self._model.copy_rows(copies)

    def close(self) -> None:
        """Free the model."""
        if self._model is not None:
            self._model.close()
