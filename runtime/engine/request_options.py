"""What a caller may ask of one request beside its prompt and its parameters, by name.

Types only: for the signatures that take the same options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from ..cache.prefix_match import MatchPolicy
from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource
from ..chat.tool_format import Tool


class RequestOptions(TypedDict, total=False):
    """Of any request; what they do is said where they are taken: `Engine.stream`."""

    namespace: bytes
    cache_match: MatchPolicy | None
    kv_budget: float | None
    constraint: Grammar | ConstraintSource | None
    request_id: str | None


class CompletionOptions(RequestOptions, total=False):
    """Of a raw prompt."""

    strip_suffix: bool | None


class ChatOptions(RequestOptions, total=False):
    """Of a conversation."""

    tools: Sequence[Tool]
