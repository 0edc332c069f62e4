"""The routes of the server, over one engine.

Knows paths and which object answers each; `app_state.py` has the limits, `openai/` the answers.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .about import About, fingerprint_of
from .anthropic.messages import Messages
from .app_state import KEEP_ALIVE_S, AppState
from .cache import Cache
from .health import MAX_STALL_S, Health
from .http.door import App, Endpoint, door
from .http.request_body import MAX_BODIES, BodyRoom
from .lanes import Lanes
from .metrics import Metrics
from .model_names import ModelNames
from .openai.chat import ChatCompletions
from .openai.completions import Completions
from .openai.responses import Responses
from .openai.tokenize import Tokenization
from .openapi import OpenAPI
from .page import page_routes
from .request_log import RequestLog
from .truncation import Truncation

if TYPE_CHECKING:
    from ..engine.engine import Engine


def create_app(
    engine: Engine,
    *,
    model_ids: Sequence[str] = (),
    max_body_bytes: int = 16 << 20,
    api_keys: Sequence[str] = (),
    tells_cached_text: bool = True,
    max_stall_s: float = MAX_STALL_S,
    keep_alive_s: float = KEEP_ALIVE_S,
    logs_prompts: bool = False,
    cors_origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    truncation: Truncation = "none",
    is_strict: bool = False,
    ignores_prompt_cache_key: bool = False,
) -> Starlette:
    """An ASGI application that serves `engine`. The caller closes the engine.

    Args:
        model_ids: the model's names for clients, `*` among them for any; none: the artifact's own.
        max_body_bytes: longer request bodies are refused with 413.
        api_keys: clients must send one of them, and each key has a cache of its own; none: every client is answered.
        tells_cached_text: whether `why_not_more` shows some tokens of what is cached in the request's namespace, and
            `/v1/cache` the beginnings of runs. False for a server whose clients share a namespace and do not trust
            each other.
        max_stall_s: `/health` is 503 when the engine had work for so long and did none of it.
        keep_alive_s: a stream that was silent for so long gets a comment, so that no proxy closes it.
        logs_prompts: whether the log has the prompts, except of requests whose match is `off`.
        cors_origins: origins of the web pages that may send requests and read answers; `*`: any page; none: only the
            server's own.
        hosts: names that requests may be sent to; none: any.
        truncation: how to treat a history or prompt that does not fit, where a request does not say.
        is_strict: refuse fields that /openapi.json does not have, instead of ignoring those that may be; see
            `field_policy.py`.
        ignores_prompt_cache_key: requests with different ones share a cache, as if they had none. Agents send one for
            each conversation, of which all begin alike; `cache_salt` isolates all the same.

    Raises:
        InvalidParameter: an API key is empty, has white space around it or is too long; an origin is none.
    """
    models = ModelNames.of(model_ids, default=engine.manifest.name)
    created, lanes = int(time.time()), Lanes.of(engine)
    bodies = BodyRoom(MAX_BODIES * max_body_bytes)
    limits = max_body_bytes, bodies, tells_cached_text, keep_alive_s, truncation, is_strict, ignores_prompt_cache_key
    served = AppState(engine, lanes, models, fingerprint_of(engine, truncation), created, *limits)
    about, tokenization, messages = About(served), Tokenization(served), Messages(served)
    endpoints: dict[tuple[str, ...], Callable[[Request], Awaitable[Response]]] = {
        ("/v1/chat/completions", "POST"): ChatCompletions(served).create,
        ("/v1/completions", "POST"): Completions(served).create,
        ("/v1/responses", "POST"): Responses(served).create,
        ("/v1/messages", "POST"): messages.create,
        ("/v1/messages/count_tokens", "POST"): messages.count_tokens,
        ("/v1/embeddings", "POST"): about.embeddings,
        ("/v1/models", "GET"): about.models,
        ("/v1/models/{model_id:path}", "GET"): about.model,
        ("/v1/cache", "GET", "DELETE"): Cache(served).answer,
        ("/health", "GET"): Health(engine.stats, max_stall_s, has_keys=bool(api_keys)).answer,
        ("/tokenize", "POST"): tokenization.tokenize,
        ("/detokenize", "POST"): tokenization.detokenize,
        ("/tokenizer_info", "GET"): tokenization.info,
        ("/version", "GET"): about.version,
        ("/openapi.json", "GET"): OpenAPI(has_keys=bool(api_keys)).answer,
    }
    routes = [Route(path, Endpoint(answer), methods=methods) for (path, *methods), answer in endpoints.items()]
    routes += page_routes()
    metrics = Metrics(engine.stats, models.own, version("radixlm"), routes)
    for path in ("/metrics", "/prometheus/metrics"):  # NVIDIA's servers answer to the second; metrics counts these, too
        routes.append(Route(path, metrics.answer, methods=["GET"]))
    log = Middleware(RequestLog, count=metrics.count_response, has_prompts=logs_prompts, match=engine.match)
    return App(routes=routes, middleware=[log, *door(api_keys, hosts, cors_origins)])
