"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from ...engine.vectors.results import Embedding, best_first
from ..models import ModelEndpoint
from ..request_log import new_id
from ..served import Served, json_response
from .replies import (
    DocumentReply,
    EmbeddingReply,
    EmbeddingsReply,
    RankedReply,
    RerankReply,
    ScoreReply,
    ScoresReply,
    VectorUsage,
)
from .requests import EmbeddingsRequest, RerankRequest, ScoreRequest
from .vectors import encoded, scores_of, vectors_of


async def embed(served: Served, request: Request, body: EmbeddingsRequest) -> Response:
    """`POST /v1/embeddings`: return the embedding of each text."""
    texts, options = body.texts, body.options(served, request)
    vectors = await vectors_of(
        served, request, texts, options, dimensions=body.dimensions, prompt_name=body.prompt_name
    )

    def reply() -> Response:
        data = _base64_of(vectors) if body.encoding_format == "base64" else [each.vector.tolist() for each in vectors]
        replies = [EmbeddingReply(index, vector) for index, vector in enumerate(data)]
        return json_response(EmbeddingsReply(replies, served.called(body.model), VectorUsage.of(vectors)))

    return await encoded(vectors, reply)


async def rerank(served: Served, request: Request, body: RerankRequest) -> Response:
    """`POST /v1/rerank`: return the best documents for a query, with their scores."""
    texts, options = body.texts, body.options(served, request)
    pairs = [(body.query, text) for text in texts]
    scores = await scores_of(served, request, pairs, options, instruction=body.instruction)
    results = [RankedReply(each.index, each.score) for each in best_first(scores, body.top_n)]
    if body.return_documents:
        for result in results:
            result.document = DocumentReply(texts[result.index])
    return json_response(RerankReply(new_id("rerank-"), served.called(body.model), results, VectorUsage.of(scores)))


async def score(served: Served, request: Request, body: ScoreRequest) -> Response:
    """`POST /v1/score`: return the score of each pair of texts, in order."""
    scores = await scores_of(served, request, body.pairs, body.options(served, request), instruction=body.instruction)
    data = [ScoreReply(each.index, each.score) for each in scores]
    usage = VectorUsage.of(scores)
    return json_response(ScoresReply(new_id("score-"), int(time.time()), served.called(body.model), data, usage))


EMBEDDINGS = ModelEndpoint(EmbeddingsRequest, lambda served, request, body: body, embed)
RERANK = ModelEndpoint(RerankRequest, lambda served, request, body: body, rerank)
SCORE = ModelEndpoint(ScoreRequest, lambda served, request, body: body, score)


def _base64_of(vectors: Sequence[Embedding]) -> list[str]:
    return [base64.b64encode(each.vector.astype("<f4").tobytes()).decode() for each in vectors]
