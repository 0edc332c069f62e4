"""The results of embedding models and rerankers: vectors of texts, and scores of documents.

Frozen values, made from the completions of requests. Knows numbers, not models or steps.
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
from .score_readers import Score

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
    """The relevance of a document for a query.

    Attributes:
        index: the document's index among the documents.
        score: from 0 to 1.
        prompt_tokens: of the prompt with both; `cached_tokens` of them were found in the prefix cache.
    """

    index: int
    score: float
    prompt_tokens: int
    cached_tokens: int


def embedding_of(completion: Completion, info: EmbeddingInfo, dimensions: int | None) -> Embedding:
    """Return the embedding of a computed text: its first `dimensions` numbers, or all, normalized if `info` says so."""
    pooled = _reading_of(completion, PooledState).values[:dimensions]
    length = float(np.sqrt(np.square(pooled).sum()))
    vector = pooled / length if info.normalize and length else pooled
    usage = completion.usage
    return Embedding(vector.astype(np.float32), usage.prompt_tokens, usage.cached_tokens)


def score_of(completion: Completion, index: int) -> DocumentScore:
    """Return the score of the document at this index of a rerank request, from the completion of its prompt."""
    usage = completion.usage
    value = _reading_of(completion, Score).value
    return DocumentScore(index, value, usage.prompt_tokens, usage.cached_tokens)


def best_first(scores: Iterable[DocumentScore], top_n: int | None = None) -> list[DocumentScore]:
    """Return the `top_n` best documents, or all; on ties in their order."""
    return sorted(scores, key=lambda each: (-each.score, each.index))[:top_n]


def require_dimensions(dimensions: int | None, num_outputs: int) -> None:
    """Raise InvalidParameter unless a vector can be cut to `dimensions` numbers."""
    if dimensions is not None and not 1 <= dimensions <= num_outputs:
        raise InvalidParameter(
            f"dimensions is {dimensions}; this model's vectors have {num_outputs}: ask for 1 to {num_outputs}",
            param="dimensions",
        )


def _reading_of(completion: Completion, kind: type[T]) -> T:
    """Return the result of this kind that a reader left in the completion.

    Raises:
        EngineClosed: the prompt was not computed to its end.
    """
    found = next((reading for reading in completion.readings if isinstance(reading, kind)), None)
    if found is None:
        raise EngineClosed("the engine was closed before all of the text was computed; ask again later")
    return found
