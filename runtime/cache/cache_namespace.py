"""Name the part of the cache that one client can see, by a keyed hash of everything that separates it from others.

Knows strings and digests; not requests, trees or stores. Entries of a namespace are still compared by their tokens.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec

from ..artifact.manifest import Manifest
from ..errors import InvalidParameter

MAX_LENGTH = 1024  # characters of a text that a client sends
_PERSON = b"radixlm/prefix/1"  # BLAKE2 personalization: no other use of the same secret gives these bytes
_ADAPTED = b"radixlm/lora/1"  # the first bytes of each namespace of an adapter
_HASH_BYTES = 32


@dataclass(frozen=True)
class ModelIdentity:
    """Everything besides the tokens that determines the KV of a prompt.

    Each field is text or None, and None differs from every text.
    """

    model_digest: str | None = None
    tokenizer_digest: str | None = None
    quantization: str | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> ModelIdentity:
        """Return the identity of an artifact. Its manifest's digest covers weights, module and target as well."""
        tokenizer = manifest.files.get("tokenizer.json")
        return cls(
            model_digest=manifest.digest,
            tokenizer_digest=None if tokenizer is None else tokenizer.sha256,
            quantization=msgspec.json.encode(manifest.quantization, order="sorted").decode(),
        )


@dataclass(frozen=True)
class CacheScope:
    """The values of a request that separate clients from each other in the cache.

    Requests with equal scopes share a cache, others never do. None differs from any text, even from "".

    Attributes:
        api_key, cache_salt, prompt_cache_key: as the client's request has them.
        adapter: the digest of the request's LoRA adapter; an engine adds it to the namespace of its requests itself.
            Another file can have the same name later, so a name would not do. It is in every key, in memory and on
            disk, so that no adapter reuses another's KV.

    Raises:
        InvalidParameter: a text is longer than `MAX_LENGTH` characters, or is not Unicode.
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
    """Makes the namespaces of one model. A namespace does not reveal its scope, and cannot be made without the secret.

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
        self._model.update(_encode_values(model))

    def of(self, scope: CacheScope) -> bytes:
        """Return the namespace of a scope: 32 bytes."""
        hashed = self._model.copy()
        hashed.update(_encode_values(replace(scope, adapter=None)))
        return hashed.digest() if scope.adapter is None else adapted_namespace(hashed.digest(), scope.adapter)


def adapted_namespace(namespace: bytes, adapter: str) -> bytes:
    """Return the part of a namespace for KV that was computed with an adapter of this digest: 78 bytes."""
    return adapted_prefix(namespace) + _hashed(adapter.encode())


def adapted_prefix(namespace: bytes) -> bytes:
    """Return what the namespaces of all adapters within a namespace begin with."""
    return _ADAPTED + _hashed(namespace)


def is_within(part: bytes, namespace: bytes) -> bool:
    """Return whether `part` is the namespace, or that of an adapter within it."""
    return part == namespace or part.startswith(adapted_prefix(namespace))


def is_adapted(namespace: bytes) -> bool:
    """Return whether a namespace is for KV that was computed with a LoRA adapter."""
    return namespace.startswith(_ADAPTED)


def adapted_digits(namespace: bytes) -> tuple[str, str] | None:
    """Return the hashes of the client's own namespace and of the adapter, in hexadecimal; None without an adapter."""
    if not is_adapted(namespace):
        return None
    digits = namespace.removeprefix(_ADAPTED).hex()
    return digits[: 2 * _HASH_BYTES], digits[2 * _HASH_BYTES :]


def _hashed(value: bytes) -> bytes:
    return blake2b(value, digest_size=_HASH_BYTES, person=_ADAPTED).digest()


def _encode_values(dimensions: ModelIdentity | CacheScope) -> bytes:
    """Encode each value as a presence byte, its length and itself, so that different values give different bytes."""
    framed = b""
    for value in vars(dimensions).values():  # in the order of the fields
        if value is None:
            framed += b"\0"
        else:
            encoded = value.encode()
            framed += b"\1" + len(encoded).to_bytes(8, "big") + encoded
    return framed


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8, that is, has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
