"""The routes of the server, and the ASGI application made of them.

Knows paths. `models.py` has the models, `openai/`, `anthropic/` and `ollama/` the endpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..version import VERSION
from .about import describe_model, list_models, tell_version
from .anthropic.messages import COUNT_TOKENS, MESSAGES
from .cache import cache
from .embeddings.endpoints import EMBEDDINGS, RERANK, SCORE
from .health import health, live
from .http.access import App, Endpoint, access_middleware
from .metrics import Metrics
from .models import ModelEndpoint, Models
from .ollama import about as ollama
from .ollama.chat import CHAT
from .ollama.embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from .ollama.generate import GENERATE
from .openai.chat import CHAT_COMPLETIONS
from .openai.completions import COMPLETIONS
from .openai.responses import RESPONSES
from .openai.tokenize import DETOKENIZE, TOKENIZE, tokenizer_info
from .openapi import OpenAPI
from .page import page_routes
from .request_log import METRICS_PATHS, RequestLog
from .server_options import ServerOptions
from .stored import conversation_endpoints
from .stored.batch_endpoints import batch_routes, runner_of
from .stored.response_endpoints import cancel, input_items, response

if TYPE_CHECKING:
    from ..engine.engine import Engine

OF_A_MODEL: Mapping[str, ModelEndpoint[Any, Any]] = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/api/chat": CHAT,
    "/api/generate": GENERATE,
    "/api/embed": OLLAMA_EMBED,
    "/api/embeddings": OLLAMA_EMBEDDINGS,
    "/api/show": ollama.SHOW,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/v1/score": SCORE,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
"""Endpoints that one model answers: the model named in the body of the POST."""

OF_ALL: dict[tuple[str, ...], Callable[[Models, Request], Awaitable[Response]]] = {
    ("/v1/models", "GET"): list_models,
    ("/v1/models/{model_id:path}", "GET"): describe_model,
    ("/v1/responses/{response_id}", "GET", "DELETE"): response,
    ("/v1/responses/{response_id}/cancel", "POST"): cancel,
    ("/v1/responses/{response_id}/input_items", "GET"): input_items,
    ("/v1/conversations", "POST"): conversation_endpoints.create,
    ("/v1/conversations/{conversation_id}", "GET", "POST", "DELETE"): conversation_endpoints.conversation,
    ("/v1/conversations/{conversation_id}/items", "GET", "POST"): conversation_endpoints.items,
    ("/v1/conversations/{conversation_id}/items/{item_id}", "GET", "DELETE"): conversation_endpoints.item,
    ("/v1/cache", "GET", "DELETE"): cache,
    ("/api/tags", "GET"): ollama.list_tags,
    ("/api/ps", "GET"): ollama.list_loaded,
    ("/api/version", "GET"): ollama.tell_version,
    ("/api/pull", "POST"): ollama.pull,
    ("/api/delete", "DELETE"): ollama.delete,
    ("/health", "GET"): health,
    ("/health/ready", "GET"): health,
    ("/health/live", "GET"): live,
    ("/tokenizer_info", "GET"): tokenizer_info,
    ("/version", "GET"): tell_version,
}
"""Endpoints of the server as a whole."""


def create_app(engine: Engine | Mapping[str, Engine], **options: Any) -> Starlette:
    """Return an ASGI application that serves one engine, or several by model name. The caller closes the engines.

    Args:
        options: the fields of `ServerOptions`, such as `create_app(engine, api_keys=["sk-one"])`.

    Raises:
        InvalidParameter: an API key is empty, too long or surrounded by white space; an origin is invalid; an option is
            outside its range; two models have the same name.
    """
    return app_of(Models.of(engine, ServerOptions(**options)))


def app_of(models: Models) -> Starlette:
    """Return an ASGI application that serves these models, as `create_app` does.

    If the ASGI server does not run its lifespan, call `app.state.resume` on its event loop to resume batches.
    """
    options = models.options
    described = OpenAPI(has_keys=bool(options.api_keys), has_choice=models.has_choice)
    routes = [
        Route(path, Endpoint(partial(models.answer, endpoint)), methods=["POST"])
        for path, endpoint in OF_A_MODEL.items()
    ]
    runner = runner_of(models, OF_A_MODEL)
    routes += [
        Route(path, Endpoint(partial(answer, models)), methods=methods)
        for (path, *methods), answer in (OF_ALL | batch_routes(runner)).items()
    ]
    routes.append(Route("/openapi.json", Endpoint(described.answer), methods=["GET"]))
    routes += page_routes()
    responses = Counter[tuple[str, str]]()
    metrics = Metrics(models, VERSION, responses)
    for path in METRICS_PATHS:
        routes.append(Route(path, metrics.answer, methods=["GET"]))
    log = Middleware(
        RequestLog,
        routes=routes,
        responses=responses,
        has_prompts=options.logs_prompts,
        match=models.match_of_unnamed,
    )
    app = App(routes=routes, middleware=[log, *access_middleware(options)])
    app.state.resume = _nothing if runner is None else runner.begin
    app.router.lifespan_context = _resume_batches
    return app


@asynccontextmanager
async def _resume_batches(app: Starlette) -> AsyncIterator[None]:
    """Resume unfinished batches of an earlier process when the server starts (ASGI's lifespan)."""
    app.state.resume()
    yield


def _nothing() -> None:
    pass
