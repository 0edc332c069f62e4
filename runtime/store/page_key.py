"""Compute the key of a stored page: a hash chain over the model, the namespace and every token up to the page's end.

Knows ids and digests; not files, nor the contents of pages. Two pages have the same key only if everything they depend
on is equal. A page found by its key is still compared by namespace, parent and tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from ..artifact.manifest import PAGE_SIZE, KVLayout
from ..errors import StoreCorrupt, StoreError

if TYPE_CHECKING:
    from ..artifact.manifest import Manifest

KEY_BYTES = 32
NO_PARENT = bytes(KEY_BYTES)  # the parent key of the first page of a prompt
MAX_NAMESPACE_BYTES = 256
PAGE_DETAILS_BYTES = 80  # in a record's header: 16 token ids, 16 flags
MAX_PAGE_BYTES = 1 << 30
_TOKENS = struct.Struct(f"<{PAGE_SIZE}I")


@dataclass(frozen=True)
class StoreIdentity:
    """Everything besides namespace and tokens that a stored page depends on. Pages of another identity cannot be used.

    Raises:
        StoreError: a page would be empty or larger than 1 GiB.
    """

    model_digest: str  # the digest of the artifact's manifest, which covers weights, module and target
    tokenizer_digest: str
    quantization: str
    kv_layout: str
    page_bytes: int

    def __post_init__(self) -> None:
        if not 0 < self.page_bytes <= MAX_PAGE_BYTES:
            raise StoreError(f"a page has {self.page_bytes} bytes; the store keeps pages of 1 to {MAX_PAGE_BYTES}")

    @classmethod
    def of(cls, manifest: Manifest) -> StoreIdentity:
        """Return the identity of an artifact."""
        tokenizer = manifest.files.get("tokenizer.json")
        return cls(
            model_digest=manifest.digest,
            tokenizer_digest="" if tokenizer is None else tokenizer.sha256,
            quantization=msgspec.json.encode(manifest.quantization, order="sorted").decode(),
            kv_layout=msgspec.json.encode(manifest.kv, order="sorted").decode(),
            page_bytes=manifest.kv.page_bytes,
        )

    @cached_property
    def digest(self) -> bytes:
        """Digest of all fields, each preceded by its length: 32 bytes."""
        hashed = blake2b(digest_size=KEY_BYTES, person=b"radixlm/store/1")
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            hashed.update(len(value).to_bytes(8, "little") + value)
        return hashed.digest()

    @cached_property
    def kv(self) -> KVLayout:
        """Layout of a page in memory.

        Raises:
            StoreError: the identity does not contain a valid layout.
        """
        try:
            return msgspec.json.decode(self.kv_layout, type=KVLayout)
        except msgspec.MsgspecError as error:
            raise StoreError(f"pages of {self.kv_layout!r:.80} cannot be ordered: {error}") from None

    def to_json(self) -> bytes:
        """Encode all fields, always as the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> StoreIdentity:
        """Decode the identity that `to_json` wrote.

        Raises:
            StoreCorrupt: the text is something else.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, StoreError) as error:
            raise StoreCorrupt(f"this is no identity of a model: {error}") from None


@dataclass(frozen=True)
class PageKey:
    """The identity of a stored page: everything that its KV depends on, and the key computed from it."""

    key: bytes  # 32 bytes, a hash of all fields below except `generated`
    parent_key: bytes  # the key of the page before it; `NO_PARENT` at the start of a prompt
    namespace: bytes
    token_ids: tuple[int, ...]  # 16
    generated: bytes  # 16 flags: 1 if the model generated the token, 0 if a client wrote it

    @classmethod
    def of(
        cls,
        identity: StoreIdentity,
        namespace: bytes,
        parent_key: bytes,
        token_ids: Sequence[int],
        generated: bytes,
    ) -> PageKey:
        """Compute the key of a page of `token_ids` that comes after the page `parent_key`.

        Raises:
            StoreError: a length or a token id is not valid for a page.
        """
        if len(parent_key) != KEY_BYTES or len(generated) != PAGE_SIZE or len(namespace) > MAX_NAMESPACE_BYTES:
            raise StoreError(
                f"a page has a parent of {KEY_BYTES} bytes, {PAGE_SIZE} flags and a namespace of at most "
                f"{MAX_NAMESPACE_BYTES} bytes, got {len(parent_key)}, {len(generated)} and {len(namespace)}"
            )
        packed = pack_tokens(token_ids)
        hashed = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"radixlm/page/1")
        hashed.update(len(namespace).to_bytes(8, "little") + namespace)
        hashed.update(parent_key)
        hashed.update(packed)
        return cls(hashed.digest(), parent_key, namespace, tuple(token_ids), generated)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack the token ids of a page into 64 bytes; raise StoreError unless they are 16 ids below 2**32."""
    try:
        return _TOKENS.pack(*token_ids)
    except struct.error:
        raise StoreError(f"a page holds {PAGE_SIZE} token ids below 2**32, not {list(token_ids)!s:.200}") from None


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Unpack the token ids of a page from 64 bytes."""
    return _TOKENS.unpack(packed)
