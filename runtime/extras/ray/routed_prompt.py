"""The parts of a request's body that decide which replica gets it: the text that its prompt begins with, its namespace.

Knows the bodies of the endpoints loosely: replicas find what is wrong with them. Knows no templates or ids: it is
enough that two prompts which begin alike give texts which begin alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ...cache.cache_namespace import CacheNamespaces, CacheScope
from ...cache.prefix_match import MatchPolicy
from ...errors import InvalidParameter
from ...server.anthropic.billing_line import without_billing_line

MAX_BODY_BYTES = 4 << 20  # more text than any context has room for; a longer body may go to any replica


@dataclass(frozen=True)
class RoutedPrompt:
    """The namespace of a request and the text of its prompt; both empty if there is none, or it must not be kept."""

    namespace: bytes = b""
    text: bytes = b""

    @classmethod
    def of(
        cls,
        body: bytes,
        api_key: str | None,
        namespaces: CacheNamespaces,
        max_bytes: int = 1 << 20,
        *,
        match: MatchPolicy = "text",
    ) -> RoutedPrompt:
        """The prompt of a body, with the first `max_bytes` of its text. Never raises: any replica may get a bad body.

        Args:
            match: the match of requests that do not name one.
        """
        if len(body) > MAX_BODY_BYTES:
            return cls()
        try:
            fields = msgspec.json.decode(body)
            if not isinstance(fields, dict) or (fields.get("cache_match") or match) == "off":
                return cls()
            scope = CacheScope(api_key, *(_text(fields.get(name)) for name in ("cache_salt", "prompt_cache_key")))
            return cls(namespaces.of(scope), _first(max_bytes, _parts(fields)))
        except (msgspec.DecodeError, InvalidParameter, UnicodeDecodeError, RecursionError):
            return cls()


def _first(max_bytes: int, parts: Iterator[str]) -> bytes:
    """What parts begin with, joined; those after it are not made."""
    text = bytearray()
    for part in parts:
        text += part[:max_bytes].encode(errors="replace")
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


def _parts(fields: dict[str, Any]) -> Iterator[str]:
    if "tools" in fields:
        yield msgspec.json.encode(fields["tools"]).decode()
    yield _text(fields.get("instructions")) or ""
    if fields.get("system"):
        yield _item({"role": "system", "content": without_billing_line(fields["system"])})
    for name in ("messages", "input", "prompt"):
        value = fields.get(name)
        if isinstance(value, list):
            yield from map(_item, value)
        else:
            yield _text(value) or ""


def _item(item: object) -> str:
    """A message, a token id, or a text among several."""
    if isinstance(item, dict):
        content = item.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = (_text(part.get("text") if isinstance(part, dict) else part) or "" for part in parts)
        return f"\0{item.get('role')}\0{''.join(texts)}"
    return f"{item}\0"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
