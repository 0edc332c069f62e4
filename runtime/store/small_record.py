"""Small records that belong to pages: re-rendered replies (aliases), and tool calls that a client received.

Knows ids, texts and bytes, not templates or tools. Such a record has no payload: it is stored in the details of its
header, and so in the index. It belongs to the last full page of prompt and reply, and is removed with that page.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Final, Self

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from .page_key import KEY_BYTES, NO_PARENT, PageKey, StoreIdentity
from .record import MAX_DETAILS_BYTES, Kind, RecordHeader

PROMPT_DIGEST_BYTES: Final = 16
_ALIAS: Final = struct.Struct(f"<Q{PROMPT_DIGEST_BYTES}sIII")  # prompt: length, digest; lengths of the fields after it
_CALL: Final = struct.Struct("<III")  # bytes of id, name and arguments, which follow
_ENCODING: Final = ("utf-8", "surrogatepass")


@dataclass(frozen=True)
class SmallRecord(ABC):
    """A small record of a namespace that belongs to `page_key`, the last full page of prompt and reply.

    Each subclass defines its details; `person` separates its keys from those of other kinds.
    """

    kind: ClassVar[Kind]
    person: ClassVar[bytes]
    namespace: bytes
    page_key: bytes

    @abstractmethod
    def details(self) -> bytes:
        """Encode the fields as bytes."""

    @classmethod
    @abstractmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """Decode the fields; None if the bytes are not valid."""

    def header(self, identity: StoreIdentity) -> RecordHeader | None:
        """Return the record's header; None if it would be too long, or if the record belongs to no page."""
        details = self.details()
        if len(details) > MAX_DETAILS_BYTES or self.page_key == NO_PARENT:
            return None
        hashed = blake2b(identity.digest, digest_size=KEY_BYTES, person=self.person)
        hashed.update(self.page_key + details)
        return RecordHeader(self.kind, hashed.digest(), self.page_key, self.namespace, details)

    @classmethod
    def of(cls, header: RecordHeader) -> Self | None:
        """Decode a record; None if it is of another kind, or its details are not valid."""
        fields = cls.read(header.details) if header.kind == cls.kind else None
        return None if fields is None else cls(header.namespace, header.parent_key, *fields)


@dataclass(frozen=True)
class StoredAlias(SmallRecord):
    """A re-rendered reply: its generated ids, and the bytes of a later prompt that they replace.

    These bytes are `rendered`, then the white space `after`. The record is found by the prompt that the reply answered.
    """

    kind = Kind.ALIAS
    person = b"radixlm/alias/1"
    num_prompt_tokens: int
    prompt_digest: bytes  # 16 bytes, of the prompt's ids
    reply_ids: tuple[int, ...]
    rendered: bytes
    after: bytes

    def details(self) -> bytes:
        """Encode the fields as bytes."""
        lengths = len(self.reply_ids), len(self.rendered), len(self.after)
        fields = _ALIAS.pack(self.num_prompt_tokens, self.prompt_digest, *lengths)
        return fields + np.array(self.reply_ids, "<u4").tobytes() + self.rendered + self.after

    @classmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """Decode the fields; None if the bytes are not valid."""
        if len(details) < _ALIAS.size:
            return None
        num_prompt_tokens, digest, num_ids, *lengths = _ALIAS.unpack_from(details)
        ids_end = _ALIAS.size + 4 * num_ids
        after_start = ids_end + lengths[0]
        if len(details) != after_start + lengths[1]:
            return None
        ids = tuple(np.frombuffer(details, "<u4", num_ids, _ALIAS.size).tolist())
        return num_prompt_tokens, digest, ids, details[ids_end:after_start], details[after_start:]


@dataclass(frozen=True)
class StoredCall(SmallRecord):
    """A tool call that a client of the namespace received, as the model wrote it; `arguments` are JSON."""

    kind = Kind.CALL
    person = b"radixlm/call/1"
    call_id: str
    name: str
    arguments: str

    def details(self) -> bytes:
        """Encode the fields as bytes."""
        texts = [text.encode(*_ENCODING) for text in (self.call_id, self.name, self.arguments)]
        return _CALL.pack(*map(len, texts)) + b"".join(texts)

    @classmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """Decode the fields; None if the bytes are not valid."""
        if len(details) < _CALL.size:
            return None
        lengths = _CALL.unpack_from(details)
        if len(details) != _CALL.size + sum(lengths):
            return None
        texts, at = [], _CALL.size
        for length in lengths:
            try:
                texts.append(details[at : at + length].decode(*_ENCODING))
            except UnicodeDecodeError:
                return None
            at += length
        return tuple(texts)


def last_page_key(identity: StoreIdentity, namespace: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the last full page of a prompt; `NO_PARENT` if it has no full page."""
    key = NO_PARENT
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        page = token_ids[start : start + PAGE_SIZE]
        key = PageKey.of(identity, namespace, key, page, bytes(PAGE_SIZE)).key
    return key
