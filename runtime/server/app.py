"""The routes of the server: which function answers each path.

Knows paths; `models.py` has the models, `openai/` and `anthropic/` the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .about import describe_model, list_models, refuse_embeddings, tell_version
from .anthropic.messages import COUNT_TOKENS, MESSAGES
from .cache import cache
from .health import health
from .http.door import App, Endpoint, door
from .metrics import Metrics
from .models import ModelEndpoint, Models
from .openai.chat import CHAT_COMPLETIONS
from .openai.completions import COMPLETIONS
from .openai.responses import RESPONSES
from .openai.tokenize import DETOKENIZE, TOKENIZE, tokenizer_info
from .openapi import OpenAPI
from .page import page_routes
from .request_log import RequestLog
from .server_options import ServerOptions

if TYPE_CHECKING:
    from ..engine.engine import Engine

OF_A_MODEL: Mapping[str, ModelEndpoint[Any, Any]] = {
    "/v1/chat/completions": CHAT_COMPLETIONS,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": COUNT_TOKENS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
}
"""Endpoints of the model that the body of a POST names."""

OF_ALL: Mapping[tuple[str, ...], Callable[[Models, Request], Awaitable[Response]]] = {
    ("/v1/embeddings", "POST"): refuse_embeddings,
    ("/v1/models", "GET"): list_models,
    ("/v1/models/{model_id:path}", "GET"): describe_model,
    ("/v1/cache", "GET", "DELETE"): cache,
    ("/health", "GET"): health,
    ("/tokenizer_info", "GET"): tokenizer_info,
    ("/version", "GET"): tell_version,
}
"""Endpoints of all models."""


def create_app(engine: Engine | Mapping[str, Engine], **options: Any) -> Starlette:
    """An ASGI application that serves an engine, or several by the names of their models. The caller closes them.

    Args:
        options: how they are served; the fields of `ServerOptions`: `create_app(engine, api_keys=["sk-one"])`.

    Raises:
        InvalidParameter: an API key is empty, has white space around it or is too long; an origin is none; an option is
            outside its range; two models have one name.
    """
    return app_of(Models.of(engine, ServerOptions(**options)))


def app_of(models: Models) -> Starlette:
    """An ASGI application that serves these models, as `create_app`."""
    options = models.options
    described = OpenAPI(has_keys=bool(options.api_keys), has_several=models.has_several)
    routes = [
        Route(path, Endpoint(partial(models.answer, endpoint)), methods=["POST"])
        for path, endpoint in OF_A_MODEL.items()
    ]
    routes += [
        Route(path, Endpoint(partial(answer, models)), methods=methods) for (path, *methods), answer in OF_ALL.items()
    ]
    routes.append(Route("/openapi.json", Endpoint(described.answer), methods=["GET"]))
    routes += page_routes()
    responses = Counter[tuple[str, str]]()
    metrics = Metrics(models, version("radixlm"), responses)
    for path in ("/metrics", "/prometheus/metrics"):  # NVIDIA's servers answer to the second; metrics counts these, too
        routes.append(Route(path, metrics.answer, methods=["GET"]))
    log = Middleware(
        RequestLog,
        routes=routes,
        responses=responses,
        has_prompts=options.logs_prompts,
        match=models.match_of_unnamed,
    )
    return App(routes=routes, middleware=[log, *door(options)])
