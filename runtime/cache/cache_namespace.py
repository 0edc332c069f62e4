"""Name the part of the cache that one client may see, by a keyed hash of all that sets it apart.

Knows strings and digests; not requests, trees or stores. What is kept by namespace is compared by its tokens, too.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from ..artifact.manifest import Manifest
from ..errors import InvalidParameter

MAX_LENGTH = 1024  # characters of what a client sends
_PERSON = b"radixlm/prefix/1"  # of the hash: no other use of the same secret gives these bytes


@dataclass(frozen=True)
class ModelIdentity:
    """What keys and values depend on besides the tokens; each is None or text, and None is unlike any text."""

    model_digest: str | None = None
    tokenizer_digest: str | None = None
    quantization: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> ModelIdentity:
        """The identity of an artifact: its manifest's digest covers weights, module and target as well."""
        tokenizer = manifest.files.get("tokenizer.json")
        return cls(
            model_digest=manifest.digest,
            tokenizer_digest=None if tokenizer is None else tokenizer.sha256,
            quantization=msgspec.json.encode(manifest.quantization, order="sorted").decode(),
        )


@dataclass(frozen=True)
class CacheScope:
    """What sets clients apart. Equal scopes share a cache, unequal ones never do; None is unlike any text, even "".

    Attributes:
        api_key, cache_salt, prompt_cache_key: as the client's request has them.
        adapter: what changes the model for this request only, by its content and not by its name. No request sets it
            yet; it is in every key, in memory and on disk, so that a LoRA adapter cannot reuse the KV of another.

    Raises:
        InvalidParameter: a text is longer than `MAX_LENGTH` characters, or is no Unicode.
    """

    api_key: str | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for name, text in vars(self).items():
            if text is not None and len(text) > MAX_LENGTH:
                raise InvalidParameter(f"{name} has {len(text)} characters; send at most {MAX_LENGTH}")
            if text is not None and not _is_unicode(text):
                raise InvalidParameter(f"{name} has a lone surrogate; send valid Unicode")


class CacheNamespaces:
    """Makes the namespaces of one model. A namespace reveals nothing of its scope, and needs the secret to be made.

    >>> namespaces = CacheNamespaces(ModelIdentity())
    >>> namespaces.of(CacheScope(cache_salt="a")) == namespaces.of(CacheScope(cache_salt="a"))
    True
    >>> namespaces.of(CacheScope(cache_salt="a")) == namespaces.of(CacheScope(prompt_cache_key="a"))
    False

    Args:
        secret: up to 64 bytes; a store on disk keeps one. None: random, so that namespaces end with the process.
    """

    def __init__(self, model: ModelIdentity, secret: bytes | None = None) -> None:
        secret = secrets.token_bytes(32) if secret is None else secret
        self._model = blake2b(key=secret, digest_size=32, person=_PERSON)
        self._model.update(_framed(model))

    def of(self, scope: CacheScope) -> bytes:
        """The namespace of a scope: 32 bytes."""
        hashed = self._model.copy()
        hashed.update(_framed(scope))
        return hashed.digest()


def _framed(dimensions: ModelIdentity | CacheScope) -> bytes:
    """Of each value whether it is there, its length and itself, so that no two lists of values are the same bytes."""
    framed = b""
    for value in vars(dimensions).values():  # in the order of the fields
        if value is None:
            framed += b"\0"
        else:
            encoded = value.encode()
            framed += b"\1" + len(encoded).to_bytes(8, "big") + encoded
    return framed


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
