"""Token types of pairs, and means of a text's rows, against NumPy."""

from __future__ import annotations

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.embedding import mean_rows, token_types

from .harness import built, every_target

LENGTHS = (5, 1, 40, 7)  # of the texts of a step
SEPARATOR = 9


def step() -> tuple[np.ndarray, np.ndarray]:
    """The position of each token, and its text."""
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in LENGTHS])
    return positions, np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)


@every_target
def test_tokens_after_the_first_separator_of_their_text_have_the_second_type(target: Target) -> None:
    rng = np.random.default_rng(0)
    positions, texts = step()
    token_ids = rng.choice(np.array([3, SEPARATOR, 4, 5, 6, 7], np.int32), len(positions))
    token_ids[:5] = [3, 4, SEPARATOR, 5, SEPARATOR]
    expected = [SEPARATOR in token_ids[:i][texts[:i] == texts[i]] for i in range(len(texts))]
    types = np.full(len(texts), -1, np.int32)
    built(target, token_types, SEPARATOR)(token_ids, positions, types, len(texts))
    assert types.tolist() == expected
    assert types[:5].tolist() == [0, 0, 0, 1, 1]


@every_target
def test_a_row_becomes_the_mean_of_those_to_the_end_of_its_text(target: Target) -> None:
    _, texts = step()
    x = np.random.default_rng(0).standard_normal((len(texts), 48)).astype(np.float32)
    expected = []
    for first in range(len(texts)):
        rows = x[first:][texts[first:] == texts[first]].astype(np.float64)
        expected.append((np.cumsum(rows[::-1], axis=0)[-1] / len(rows)).astype(np.float32))  # from the last one on
    built(target, mean_rows, 48)(x, texts, len(texts))
    assert (x == np.array(expected)).all()
