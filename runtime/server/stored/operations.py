"""The table of endpoints of responses, conversations, files and batches for `/openapi.json`.

Knows types. `openapi.py` describes them.
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
    ("get", _RESPONSE, "Return a stored response", ResponseReply, None, (*_SALT, "stream")),
    ("delete", _RESPONSE, "Delete a response", Deleted, None, _SALT),
    ("post", f"{_RESPONSE}/cancel", "Cancel a response in the background", ResponseReply, None, _SALT),
    ("get", f"{_RESPONSE}/input_items", "List the input items of a response", ObjectList, None, _PAGED),
    ("post", "/v1/conversations", "Create a conversation", ConversationReply, ConversationRequest, _SALT),
    ("get", _CONVERSATION, "Return a conversation", ConversationReply, None, _SALT),
    ("post", _CONVERSATION, "Change a conversation's metadata", ConversationReply, ConversationUpdate, _SALT),
    ("delete", _CONVERSATION, "Delete a conversation", Deleted, None, _SALT),
    ("get", f"{_CONVERSATION}/items", "List a conversation's items", ObjectList, None, _PAGED),
    ("post", f"{_CONVERSATION}/items", "Add items to a conversation", ObjectList, ItemsRequest, _SALT),
    ("get", f"{_CONVERSATION}/items/{{item_id}}", "Return an item", dict[str, Any], None, _SALT),
    ("delete", f"{_CONVERSATION}/items/{{item_id}}", "Remove an item", ConversationReply, None, _SALT),
    ("get", "/v1/files", "List files", ObjectList, None, ("limit", "order", "after", "purpose")),
    ("post", "/v1/files", "Upload a file, as multipart/form-data", FileReply, None, ()),
    ("get", "/v1/files/{file_id}", "Describe a file", FileReply, None, ()),
    ("delete", "/v1/files/{file_id}", "Delete a file", Deleted, None, ()),
    ("get", "/v1/files/{file_id}/content", "Download a file", "application/octet-stream", None, ()),
    ("get", "/v1/batches", "List batches", ObjectList, None, ("limit", "order", "after")),
    ("post", "/v1/batches", "Create a batch, whose requests are processed in idle time", BatchReply, BatchRequest, ()),
    ("get", "/v1/batches/{batch_id}", "Return the state of a batch", BatchReply, None, ()),
    ("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch", BatchReply, None, ()),
)
"""Rows of method, path, summary, reply type, body type and query parameters."""

BODILESS = frozenset({"/v1/conversations"})
"""Paths whose POST may have no body."""


def names_in(path: str) -> tuple[str, ...]:
    """Return the names of a path's parameters.

    >>> names_in("/v1/conversations/{conversation_id}/items/{item_id}")
    ('conversation_id', 'item_id')
    """
    return tuple(re.findall(r"{(\w+)}", path))
