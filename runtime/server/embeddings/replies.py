"""Replies of `/v1/embeddings`, `/v1/rerank` and `/v1/score`, in the shapes of the servers that have these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, Self

import msgspec


class Counted(Protocol):
    """Something that was computed of a text."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class VectorUsage(msgspec.Struct):
    """Tokens of all texts together."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, counted: Iterable[Counted]) -> Self:
        """The sum."""
        counts = [(each.prompt_tokens, each.cached_tokens) for each in counted]
        num_tokens = sum(tokens for tokens, _ in counts)
        return cls(num_tokens, num_tokens, CachedTokens(sum(cached for _, cached in counts)))


class EmbeddingReply(msgspec.Struct):
    index: int
    embedding: list[float] | str  # base64: of float32, the lowest byte first
    object: str = "embedding"


class EmbeddingsReply(msgspec.Struct):
    data: list[EmbeddingReply]
    model: str
    usage: VectorUsage
    object: str = "list"


class DocumentReply(msgspec.Struct):
    text: str


class RankedReply(msgspec.Struct):
    """A document, by its place in the request."""

    index: int
    relevance_score: float
    document: DocumentReply | msgspec.UnsetType = msgspec.UNSET  # unset: not asked for


class RerankReply(msgspec.Struct):
    """The best documents first."""

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
