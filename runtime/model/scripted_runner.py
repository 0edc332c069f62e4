"""A model that generates the tokens of a script, for tests and replays, instead of its own.

For one request at a time. Knows arrays and ids, not where a script comes from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .batch import Batch, Float32Array, PageCopy, Runner, TopLogits
from .memory import AdapterRows


class ScriptedRunner:
    """Runs `model`, or nothing, and generates the ids of `script` for a request that samples greedily.

    >>> runner = ScriptedRunner(vocab_size=10)
    >>> runner.script.extend([7, 8])
    >>> [int(runner.top_logits(1, 10).token_ids[0, 0]) for _ in range(3)]
    [7, 8, 0]

    Args:
        model: computes every forward, and generates after the end of the script. None: nothing is computed, and the ids
            after the script are 0.
        adapters: the memory of LoRA adapters, which `model` reads; None: there is no room for any.
    """

    def __init__(self, vocab_size: int, model: Runner | None = None, adapters: AdapterRows | None = None) -> None:
        self.adapters = adapters
        self.script: deque[int] = deque()
        self._vocab_size = vocab_size
        self._model = model
        self._draft_ids: list[int] = []  # draft tokens of the last forward

    def forward(self, batch: Batch) -> Float32Array:
        """Return the model's logits `[R, vocab_size]`, or zeros."""
        arrays = batch.arrays
        self._draft_ids = arrays.token_ids[arrays.logit_rows[1:]].tolist()
        if self._model is not None:
            return self._model.forward(batch)
        return np.zeros((batch.shape[3], self._vocab_size), np.float32)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the next id of the script as the largest logit, and the ids after it as far as the draft tokens match.

        After the end of the script, return the model's own.
        """
        if self._model is not None and not self.script:
            return self._model.top_logits(num_rows, vocab_size)
        generated = [self.script.popleft() if self.script else 0]
        for draft_id in self._draft_ids[: num_rows - 1]:
            if draft_id != generated[-1] or not self.script:
                break
            generated.append(self.script.popleft())
        ids = np.array([*generated, *generated[-1:] * (num_rows - len(generated))], np.int32)[:, None]
        return TopLogits(np.zeros_like(ids, np.float32), ids, np.ones(num_rows, np.int32))

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies in the model."""
        if self._model is not None:
            self._model.copy_rows(copies)

    def close(self) -> None:
        """Free the model."""
        if self._model is not None:
            self._model.close()
