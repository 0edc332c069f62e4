"""Choose the replica with a prompt's longest prefix, unless it is overloaded.

Knows texts as bytes, roughly the bodies of the endpoints, namespaces, names of replicas and how many requests they
have; not where replicas are or how they are called. A replica is assumed to have the texts that were sent to it. They
are kept as digests of their blocks, up to a limit per replica. It is enough that prompts with a common beginning have
texts with a common beginning: replicas validate bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import msgspec
from cachetools import Cache, LRUCache

from ...cache.cache_namespace import CacheNamespaces, CacheScope
from ...cache.why_not_more import MatchPolicy
from ...errors import InvalidParameter
from ...server.anthropic.conversation import without_billing_line


@dataclass(frozen=True)
class RouterPolicy:
    """The limits of remembered texts, and how much busier than others the holder of a prefix may be.

    A text is cut into blocks of `block_bytes`, of which the first `max_blocks_of_text` count; for each replica the
    `max_blocks` most recently used are remembered, 260 bytes of memory each. A replica is overloaded when it has
    `max_lead` requests more than the one with the fewest.
    """

    block_bytes: int = 64
    max_blocks_of_text: int = 4096
    max_blocks: int = 1 << 17
    max_lead: int = 8


class PrefixRouter:
    """Remembers which texts each of `replicas` was sent. For one thread.

    >>> router = PrefixRouter(["a", "b"])
    >>> talk = b"A long conversation about radix trees, from its very first word on..."
    >>> router.choose(b"", talk, {"a": 1, "b": 0})
    'b'
    >>> router.record("b", b"", talk)
    >>> router.choose(b"", talk + b" and on", {"a": 1, "b": 7}), router.choose(b"", talk, {"a": 1, "b": 9})
    ('b', 'a')
    """

    def __init__(self, replicas: Iterable[str], policy: RouterPolicy | None = None) -> None:
        self._policy = policy or RouterPolicy()
        self._held = {name: self._nothing() for name in replicas}

    @property
    def max_text_bytes(self) -> int:
        """The most bytes of a text that count."""
        return self._policy.block_bytes * self._policy.max_blocks_of_text

    def choose(self, namespace: bytes, text: bytes, loads: Mapping[str, int]) -> str:
        """Return one of the replicas in `loads`, which maps at least one replica to the number of its requests.

        Of the replicas that are not overloaded the one with the longest prefix wins, then the one with the fewest
        requests, then the one that holds least, so that new conversations spread.
        """
        most = min(loads.values()) + self._policy.max_lead
        blocks = self._blocks(namespace, text)
        return min(
            (name for name in loads if loads[name] < most or loads[name] == min(loads.values())),
            key=lambda name: (-self._num_held(name, blocks), loads[name], len(self._held[name])),
        )

    def record(self, replica: str, namespace: bytes, text: bytes) -> None:
        """Record that the replica gets this text, and will have its prefix cached."""
        held = self._held[replica]
        for block in reversed(self._blocks(namespace, text)):  # the first ones are forgotten last
            held[block] = namespace

    def num_held_bytes(self, replica: str, namespace: bytes, text: bytes) -> int:
        """Return how many bytes of the text the replica was sent before, in whole blocks."""
        return self._num_held(replica, self._blocks(namespace, text)) * self._policy.block_bytes

    def forget(self, replica: str) -> None:
        """Record that the replica has nothing cached, because it was restarted."""
        self._held[replica] = self._nothing()

    def forget_namespace(self, namespace: bytes) -> None:
        """Record that no replica has anything of the namespace cached."""
        for held in self._held.values():
            held.forget(namespace)

    def _nothing(self) -> _HeldBlocks:
        """Return an empty record for a new replica."""
        return _HeldBlocks(self._policy.max_blocks)

    def _num_held(self, replica: str, blocks: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self._held[replica].__contains__, blocks))

    def _blocks(self, namespace: bytes, text: bytes) -> list[bytes]:
        """Return a digest for each whole block, of everything up to its end and of the namespace."""
        size = self._policy.block_bytes
        num_blocks = min(len(text) // size, self._policy.max_blocks_of_text)
        digest = blake2b(len(namespace).to_bytes(8, "big") + namespace, digest_size=16)
        blocks = []
        for number in range(num_blocks):
            digest.update(text[number * size : (number + 1) * size])
            blocks.append(digest.digest())
        return blocks


class _HeldBlocks(LRUCache[bytes, bytes]):
    """The most recently used digests of blocks, with their namespaces."""

    def __init__(self, max_blocks: int) -> None:
        super().__init__(max_blocks)
        self._by_namespace: dict[bytes, set[bytes]] = {}

    def __setitem__(self, block: bytes, namespace: bytes) -> None:
        super().__setitem__(block, namespace)
        self._by_namespace.setdefault(namespace, set()).add(block)

    def __delitem__(self, block: bytes) -> None:
        namespace = Cache.__getitem__(self, block)  # the subclass's method counts as a use
        super().__delitem__(block)
        blocks = self._by_namespace[namespace]
        blocks.remove(block)
        if not blocks:
            del self._by_namespace[namespace]

    def forget(self, namespace: bytes) -> None:
        """Drop the blocks of a namespace, without visiting those of others, because any client can request it."""
        for block in [*self._by_namespace.get(namespace, ())]:
            del self[block]


MAX_BODY_BYTES = 4 << 20  # more text than any context has room for; a longer body can go to any replica


@dataclass(frozen=True)
class RoutedPrompt:
    """The namespace of a request and the text of its prompt; both empty if there is none, or it must not be cached."""

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
        """Read the prompt of a body, with the first `max_bytes` of its text.

        Never raises: the prompt of an unreadable or too long body is empty, so any replica gets it, and rejects it.

        Args:
            match: the match of requests that do not set one.
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
    """Return the beginning of the joined parts; later ones are not made."""
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
    """Return the text of a message, a token id, or a text among several."""
    if isinstance(item, dict):
        content = item.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = (_text(part.get("text") if isinstance(part, dict) else part) or "" for part in parts)
        return f"\0{item.get('role')}\0{''.join(texts)}"
    return f"{item}\0"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
