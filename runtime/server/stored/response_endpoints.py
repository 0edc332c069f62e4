"""`/v1/responses/{response_id}`: getting and deleting responses that are kept, and listing what was sent.

Knows paths and queries; `turns.py` has the responses.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...cache.cache_namespace import CacheScope
from ...errors import InvalidParameter
from ..errors import HTTPError
from ..http.door import api_key_of
from ..models import Models
from ..openai.kept_responses import NOT_KEPT
from ..served import json_response
from .lists import Deleted, page, require_parameters
from .stored import Stored

SALT = "cache_salt"


async def response(models: Models, request: Request) -> Response:
    """`GET` tells a response as it ended; `DELETE` has it found no more."""
    stored, scope = stored_by(models), scope_of(request)
    response_id: str = request.path_params["response_id"]
    require_parameters(request, SALT, "stream")
    if request.query_params.get("stream", "false") != "false":
        raise InvalidParameter("a response that has ended is not streamed again; leave stream out", param="stream")
    if request.method == "GET":
        told, _ = await stored.turns.response(scope, response_id)
        return Response(told, media_type="application/json")
    await stored.turns.delete(scope, response_id)
    return json_response(Deleted(response_id, "response.deleted"))


async def cancel(models: Models, request: Request) -> Response:
    """`POST /v1/responses/{response_id}/cancel`: 400, since a response is kept when it has ended.

    Raises:
        HTTPError: 400, as OpenAI's for a response that is not made in the background; 404, there is no such response.
    """
    require_parameters(request, SALT)
    await stored_by(models).turns.response(scope_of(request), request.path_params["response_id"])
    message = "the response has ended; cancel one that is being made by closing its connection"
    raise HTTPError(400, message, code="response_ended")


async def input_items(models: Models, request: Request) -> Response:
    """`GET`: the items that a response's request sent; those that it went on from are the earlier response's."""
    _, items = await stored_by(models).turns.response(scope_of(request), request.path_params["response_id"])
    return json_response(page(await asyncio.to_thread(msgspec.json.decode, items), request, SALT))


def stored_by(models: Models) -> Stored:
    """What clients leave on a server.

    Raises:
        HTTPError: 404, it keeps nothing.
    """
    if models.stored is None:
        raise HTTPError(404, f"{NOT_KEPT}, and no conversations, files and batches", code="not_found")
    return models.stored


def scope_of(request: Request) -> CacheScope:
    """Whose objects a request without a body may see: those of its key, and of the salt in its query."""
    return CacheScope(api_key_of(request), request.query_params.get(SALT))
