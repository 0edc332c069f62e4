"""Compute the embeddings of many texts, or the scores of many documents, for any endpoint.

Knows how many texts of one request the engine gets at a time, not what bodies and replies look like.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ...engine.calls.batch import naming
from ...engine.completion import Completion
from ...engine.generation_stream import GenerationStream, StartRequest
from ...engine.request_options import Prompt, RequestOptions
from ...engine.sampling_params import SamplingParams
from ...engine.vectors.results import DocumentScore, Embedding, embedding_of, require_dimensions, score_of
from ..choices import Choices
from ..http.connection import while_connected
from ..served import Served

_MAX_NUMBERS_AT_ONCE = 1 << 14  # of a response that is encoded on the event loop
AT_ONCE = 64  # texts per group; two groups are in the engine, so that it is never idle between groups
_NOTHING = SamplingParams(max_tokens=0)


async def encoded(vectors: Sequence[Embedding], reply: Callable[[], Response]) -> Response:
    """Return the response that `reply` makes of embeddings, in a thread if they are many."""
    is_large = sum(each.vector.size for each in vectors) > _MAX_NUMBERS_AT_ONCE
    return await asyncio.to_thread(reply) if is_large else reply()


async def vectors_of(
    served: Served,
    request: Request,
    texts: Sequence[Prompt],
    options: RequestOptions,
    *,
    dimensions: int | None = None,
    prompt_name: str | None = None,
) -> list[Embedding]:
    """Return the embedding of each text, in order.

    Raises:
        InvalidRequest: the model makes no embeddings, or a text is not valid; the message has its index.
        EngineError: computing one failed; the others are cancelled.
        ClientGone: the client disconnected.
    """
    engine = served.engine
    info = engine.vector_prompts.embedding
    require_dimensions(dimensions, engine.manifest.model.num_outputs)
    ask = partial(engine.stream_embedding, prompt_name=prompt_name, options=options)
    completions = await _completions(served, request, [partial(ask, text) for text in texts])
    return [embedding_of(each, info, dimensions) for each in completions]


async def scores_of(
    served: Served,
    request: Request,
    pairs: Sequence[tuple[str, str]],
    options: RequestOptions,
    *,
    instruction: str | None = None,
) -> list[DocumentScore]:
    """Return the score of each pair of a query and a document, in order. Raises as `vectors_of` does."""
    ask = partial(served.engine.stream_score, instruction=instruction, options=options)
    completions = await _completions(served, request, [partial(ask, *pair) for pair in pairs])
    return [score_of(each, index) for index, each in enumerate(completions)]


async def _completions(served: Served, request: Request, asks: Sequence[StartRequest]) -> list[Completion]:
    """Run requests in groups, two groups at a time, and return their completions in order.

    A group is at most a quarter of the engine's queue, so that half of it stays free for others.
    """
    most = served.engine.queue.max_num_requests
    size = AT_ONCE if most is None else max(1, min(AT_ONCE, most // 4))
    named = [partial(_named, index, ask) for index, ask in enumerate(asks)] if len(asks) > 1 else asks
    found: list[Completion] = []
    running: deque[Choices] = deque()
    async with AsyncExitStack() as opened:
        for start in range(0, len(named), size):
            choices = await served.open(request, named[start : start + size], _NOTHING)
            running.append(await opened.enter_async_context(choices))
            if len(running) == 2:
                found += await while_connected(request.receive, running.popleft().results())
        for choices in running:
            found += await while_connected(request.receive, choices.results())
    return found


def _named(index: int, ask: StartRequest, *, on_ready: Callable[[], None]) -> GenerationStream:
    """Start a request; an error names it by its index."""
    with naming(index):
        return ask(on_ready=on_ready)
