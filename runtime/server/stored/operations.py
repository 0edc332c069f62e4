"""What the endpoints of responses, conversations, files and batches take and give, for `/openapi.json`.

Knows types; `openapi.py` describes them.
"""

from __future__ import annotations

import re
from typing import Any

from ..openai.response_replies import ResponseReply
from .batch_endpoints import BatchRequest
from .batches import BatchReply
from .conversation_endpoints import ConversationReply, ConversationRequest, ConversationUpdate, ItemsRequest
from .files import FileReply
from .lists import Deleted, ObjectList

Row = tuple[str, str, str, Any, Any, tuple[str, ...]]
_SALT = ("cache_salt",)
_PAGED = ("cache_salt", "limit", "order", "after")
_RESPONSE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"

STORED: tuple[Row, ...] = (
    ("get", _RESPONSE, "Tell a response that is kept", ResponseReply, None, (*_SALT, "stream")),
    ("delete", _RESPONSE, "Delete a response", Deleted, None, _SALT),
    ("post", f"{_RESPONSE}/cancel", "Cancel a response, which is 400 for one that has ended", ResponseReply, None, _SALT),
    ("get", f"{_RESPONSE}/input_items", "List what a response's request sent", ObjectList, None, _PAGED),
    ("post", "/v1/conversations", "Begin a conversation", ConversationReply, ConversationRequest, _SALT),
    ("get", _CONVERSATION, "Tell a conversation", ConversationReply, None, _SALT),
    ("post", _CONVERSATION, "Change a conversation's metadata", ConversationReply, ConversationUpdate, _SALT),
    ("delete", _CONVERSATION, "Delete a conversation", Deleted, None, _SALT),
    ("get", f"{_CONVERSATION}/items", "List a conversation's items", ObjectList, None, _PAGED),
    ("post", f"{_CONVERSATION}/items", "Add items to a conversation", ObjectList, ItemsRequest, _SALT),
    ("get", f"{_CONVERSATION}/items/{{item_id}}", "Tell an item", dict[str, Any], None, _SALT),
    ("delete", f"{_CONVERSATION}/items/{{item_id}}", "Take an item out", ConversationReply, None, _SALT),
    ("get", "/v1/files", "List files", ObjectList, None, ("limit", "order", "after", "purpose")),
    ("post", "/v1/files", "Upload a file, as multipart/form-data", FileReply, None, ()),
    ("get", "/v1/files/{file_id}", "Tell of a file", FileReply, None, ()),
    ("delete", "/v1/files/{file_id}", "Delete a file", Deleted, None, ()),
    ("get", "/v1/files/{file_id}/content", "Read a file", "application/octet-stream", None, ()),
    ("get", "/v1/batches", "List batches", ObjectList, None, ("limit", "order", "after")),
    ("post", "/v1/batches", "Have the requests of a file answered in idle time", BatchReply, BatchRequest, ()),
    ("get", "/v1/batches/{batch_id}", "Tell how far a batch is", BatchReply, None, ()),
    ("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch", BatchReply, None, ()),
)
"""Method, path, summary, type of the reply, type of the body, parameters of the query."""

BODILESS = frozenset({"/v1/conversations"})
"""Paths whose POST may have no body."""


def names_in(path: str) -> tuple[str, ...]:
    """The parameters of a path.

    >>> names_in("/v1/conversations/{conversation_id}/items/{item_id}")
    ('conversation_id', 'item_id')
    """
    return tuple(re.findall(r"{(\w+)}", path))
