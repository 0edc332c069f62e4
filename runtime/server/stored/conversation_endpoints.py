"""`/v1/conversations`: create, return and delete conversations and their items.

Knows paths, bodies and items. `conversations.py` stores the conversations.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...cache.cache_namespace import CacheScope
from ..errors import HTTPError
from ..http.request_body import read_json
from ..models import Models
from ..openai.kept_responses import item_json
from ..openai.response_items import InputItem, leave_out_foreign
from ..request_fields import require_small
from ..request_log import record_of
from ..served import json_response
from ..unknown_fields import decode_body
from .conversations import StoredConversation
from .lists import Deleted, ObjectList, page, require_parameters
from .response_endpoints import SALT, scope_of, stored_by
from .stored import Stored
from .turns import Path

MAX_ITEMS = 20  # per request, as in OpenAI's API

Items = Annotated[list[InputItem], msgspec.Meta(max_length=MAX_ITEMS)]


class ConversationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/conversations`."""

    ACTS_ON: ClassVar = frozenset({"metadata"})

    items: Items | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}`."""

    ACTS_ON: ClassVar = frozenset({"metadata"})

    metadata: dict[str, str] | None = None


class ItemsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/conversations/{conversation_id}/items`."""

    items: Items


class ConversationReply(msgspec.Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


async def create(models: Models, request: Request) -> Response:
    """`POST /v1/conversations`: create a conversation."""
    body = await _read(models, request, ConversationRequest, may_be_empty=True)
    require_small("metadata", body.metadata)
    scope = scope_of(request)
    namespace = models.rows[0].namespace(request, scope.cache_salt, None)
    items = [item_json(item) for item in body.items or ()]
    made = await stored_by(models).conversations.create(scope, namespace, body.metadata or {}, items)
    return _reply(made)


async def conversation(models: Models, request: Request) -> Response:
    """`GET /v1/conversations/{conversation_id}`: return it. `POST`: replace its metadata. `DELETE`: delete it."""
    require_parameters(request, SALT)
    conversations, scope = stored_by(models).conversations, scope_of(request)
    conversation_id: str = request.path_params["conversation_id"]
    match request.method:
        case "GET":
            return _reply(await conversations.get(scope, conversation_id))
        case "POST":
            body = await _read(models, request, ConversationUpdate)
            require_small("metadata", body.metadata)
            return _reply(await conversations.update(scope, conversation_id, body.metadata or {}))
    await conversations.delete(scope, conversation_id)
    return json_response(Deleted(conversation_id, "conversation.deleted"))


async def items(models: Models, request: Request) -> Response:
    """`GET /v1/conversations/{conversation_id}/items`: list the items. `POST`: append items."""
    stored, scope = stored_by(models), scope_of(request)
    conversation_id: str = request.path_params["conversation_id"]
    if request.method == "GET":
        return json_response(page(await _items(stored, scope, conversation_id), request, SALT))
    added = [item_json(item) for item in (await _read(models, request, ItemsRequest)).items]
    await stored.conversations.add_items(scope, conversation_id, added)
    listed = [msgspec.json.decode(each) for each in added]
    ids = [each["id"] for each in listed]
    return json_response(
        ObjectList(data=listed, first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None, has_more=False)
    )


async def item(models: Models, request: Request) -> Response:
    """`GET /v1/conversations/{conversation_id}/items/{item_id}`: return an item. `DELETE`: remove it."""
    require_parameters(request, SALT)
    stored, scope = stored_by(models), scope_of(request)
    conversation_id, item_id = request.path_params["conversation_id"], request.path_params["item_id"]

    def split(items: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        found = [each for each in items if each["id"] == item_id]
        if not found:
            message = f"the conversation has no item {item_id!r:.80}"
            raise HTTPError(404, message, param="item_id", code="item_not_found")
        return found[0], [each for each in items if each["id"] != item_id]

    if request.method == "GET":
        found, _ = split(await _items(stored, scope, conversation_id))
        return Response(msgspec.json.encode(found), media_type="application/json")
    await stored.conversations.replace_items(
        scope, conversation_id, lambda path: [msgspec.json.encode(each) for each in split(listed_items(path))[1]]
    )
    return _reply(await stored.conversations.get(scope, conversation_id))


async def _items(stored: Stored, scope: CacheScope, conversation_id: str) -> list[dict[str, Any]]:
    """Return all items of a conversation, oldest first."""
    return await asyncio.to_thread(listed_items, await stored.conversations.path(scope, conversation_id))


def listed_items(path: Path) -> list[dict[str, Any]]:
    """Return the items of all turns of a path, in the form in which they are listed."""
    items: list[dict[str, Any]] = []
    for sent, response in path.turns:
        items += msgspec.json.decode(sent)
        items += [] if response is None else msgspec.json.decode(response)["output"]
    return items


async def _read(models: Models, request: Request, kind: Any, *, may_be_empty: bool = False) -> Any:
    """Read and decode the body of a request."""
    require_parameters(request, SALT)
    body = await read_json(request, max_bytes=models.options.max_body_bytes)
    is_strict = models.options.is_strict
    value, ignored = decode_body(
        b"{}" if may_be_empty and not body else body, kind, is_strict=is_strict, leave_out=leave_out_foreign_items
    )
    record_of(request).ignored = ignored
    return value


def leave_out_foreign_items(body: Any, ignored: Any, *, is_strict: bool) -> None:
    """Remove foreign items as `leave_out_foreign` does, from a body whose field is called `items`."""
    if isinstance(body, dict) and isinstance(body.get("items"), list):
        leave_out_foreign({"input": body["items"]}, ignored, is_strict=is_strict)


def _reply(conversation: StoredConversation) -> Response:
    return json_response(ConversationReply(conversation.id, conversation.created_at, conversation.metadata))
