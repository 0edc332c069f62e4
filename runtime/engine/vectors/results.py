"""What embedding models and rerankers give their callers: vectors of texts, and documents with their scores.

Frozen values, made of the completions of requests. Knows numbers, not models or steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...artifact.text_vectors import EmbeddingInfo
from ...errors import EngineClosed, InvalidParameter
from ...model.batch import Float32Array
from ..completion import Completion
from .hidden_states import PooledState
from .token_scores import TokenScore

T = TypeVar("T")


@dataclass(frozen=True)
class Embedding:
    """The vector of a text.

    Attributes:
        vector: float32 `[dimensions]`.
        prompt_tokens: of the text; `cached_tokens` of them were found in the prefix cache.
    """

    vector: Float32Array
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class DocumentScore:
    """How well a document answers a query.

    Attributes:
        index: the document's place among the documents.
        score: from 0 to 1.
        prompt_tokens: of the prompt that has both; `cached_tokens` of them were found in the prefix cache.
    """

    index: int
    score: float
    prompt_tokens: int
    cached_tokens: int


def embedding_of(completion: Completion, info: EmbeddingInfo, dimensions: int | None) -> Embedding:
    """The vector of a text that was read: its first `dimensions` numbers, or all, then normalized as `info` says."""
    pooled = _reading_of(completion, PooledState).values[:dimensions]
    length = float(np.sqrt(np.square(pooled).sum()))
    vector = pooled / length if info.normalize and length else pooled
    usage = completion.usage
    return Embedding(vector.astype(np.float32), usage.prompt_tokens, usage.cached_tokens)


def score_of(completion: Completion, index: int) -> DocumentScore:
    """The score of the document in the place `index`, whose prompt was read."""
    usage = completion.usage
    value = _reading_of(completion, TokenScore).value
    return DocumentScore(index, value, usage.prompt_tokens, usage.cached_tokens)


def best_first(scores: Iterable[DocumentScore], top_n: int | None = None) -> list[DocumentScore]:
    """The `top_n` best documents, or all; of equals those that came first."""
    return sorted(scores, key=lambda each: (-each.score, each.index))[:top_n]


def require_dimensions(dimensions: int | None, num_outputs: int) -> None:
    """Raise InvalidParameter if a vector cannot be cut to so many numbers."""
    if dimensions is not None and not 1 <= dimensions <= num_outputs:
        raise InvalidParameter(
            f"dimensions is {dimensions}; this model's vectors have {num_outputs}: ask for 1 to {num_outputs}",
            param="dimensions",
        )


def _reading_of(completion: Completion, kind: type[T]) -> T:
    found = next((reading for reading in completion.readings if isinstance(reading, kind)), None)
    if found is None:
        raise EngineClosed("the engine was closed before all of the text was computed; ask again later")
    return found
