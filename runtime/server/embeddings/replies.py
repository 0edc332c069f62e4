"""Types of the replies of `/v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

import msgspec


class Counted(Protocol):
    """A result with token counts, such as an embedding or a score."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class VectorUsage(msgspec.Struct):
    """Token counts over all texts."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, counted: Iterable[Counted]) -> Self:
        """Return the sum of the counts."""
        counts = [(each.prompt_tokens, each.cached_tokens) for each in counted]
        num_tokens = sum(tokens for tokens, _ in counts)
        return cls(num_tokens, num_tokens, CachedTokens(sum(cached for _, cached in counts)))


class EmbeddingReply(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32
    object: str = "embedding"


class EmbeddingsReply(msgspec.Struct):
    data: list[EmbeddingReply]
    model: str
    usage: VectorUsage
    object: str = "list"


class DocumentReply(msgspec.Struct):
    text: str


class RankedReply(msgspec.Struct):
    """The score of a document, which is named by its index in the request."""

    index: int
    relevance_score: float
    document: DocumentReply | msgspec.UnsetType = msgspec.UNSET  # unset if not requested


class RerankReply(msgspec.Struct):
    """The scores of documents, best first."""

    id: str
    model: str
    results: list[RankedReply]
    usage: VectorUsage


class ScoreReply(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoresReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[ScoreReply]
    usage: VectorUsage
    object: str = "list"
