"""`/v1/responses/{response_id}`: return and delete stored responses, and list their input items.

Knows paths and queries. `turns.py` stores the responses.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter
from ..errors import HTTPError
from ..http.api_keys import api_key_of
from ..models import Models
from ..openai.kept_responses import NOT_KEPT
from ..served import json_response
from .background import StoredStatus, as_lost
from .lists import Deleted, page, require_parameters
from .stored import Stored

SALT = "cache_salt"


async def response(models: Models, request: Request) -> Response:
    """`GET /v1/responses/{response_id}`: return a stored response. `DELETE`: delete it."""
    stored, scope = stored_by(models), scope_of(request)
    response_id: str = request.path_params["response_id"]
    require_parameters(request, SALT, "stream")
    if request.query_params.get("stream", "false") != "false":
        raise InvalidParameter("stored responses cannot be streamed; remove stream", param="stream")
    if request.method == "GET":
        is_running = stored.background.is_running(response_id)  # before reading: it may end in between
        content, _ = await stored.turns.response(scope, response_id)
        return _as_json(content if is_running else await asyncio.to_thread(as_lost, content))
    await stored.turns.delete(scope, response_id)
    await stored.background.cancel(response_id)
    return json_response(Deleted(response_id, "response.deleted"))


async def cancel(models: Models, request: Request) -> Response:
    """`POST /v1/responses/{response_id}/cancel`: cancel a response in the background; one that has ended stays.

    Raises:
        HTTPError: 400, as OpenAI's API for responses without `background`; 404, there is no such response.
    """
    require_parameters(request, SALT)
    stored, scope, response_id = stored_by(models), scope_of(request), request.path_params["response_id"]
    content, _ = await stored.turns.response(scope, response_id)
    if not StoredStatus.of(content).background:
        message = "the response has ended; to cancel one without background, close its connection"
        raise HTTPError(400, message, code="response_ended")
    await stored.background.cancel(response_id)
    await stored.turns.change_response(scope, response_id, as_lost)  # if no task was there to store its last status
    content, _ = await stored.turns.response(scope, response_id)
    return _as_json(content)


async def input_items(models: Models, request: Request) -> Response:
    """`GET /v1/responses/{response_id}/input_items`: list the request's own items, without those it continued."""
    _, items = await stored_by(models).turns.response(scope_of(request), request.path_params["response_id"])
    return json_response(page(await asyncio.to_thread(msgspec.json.decode, items), request, SALT))


def _as_json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def stored_by(models: Models) -> Stored:
    """Return the server's storage.

    Raises:
        HTTPError: 404 if the server stores nothing.
    """
    if models.stored is None:
        raise HTTPError(404, f"{NOT_KEPT}, and no conversations, files and batches", code="not_found")
    return models.stored


def scope_of(request: Request) -> CacheScope:
    """Return the scope of a request without a body: its API key, and the salt in its query."""
    return CacheScope(api_key_of(request), request.query_params.get(SALT))
