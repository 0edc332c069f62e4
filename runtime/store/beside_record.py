"""Small records beside pages: how a chat template renders a reply, and which tool calls a client was given.

Knows ids, texts and bytes, not templates or tools. Such a record has no payload: all of it stands in the details of its
header, and so in the index. It belongs to the last full page of prompt and reply: it leaves with that page.
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
_ALIAS: Final = struct.Struct(f"<Q{PROMPT_DIGEST_BYTES}sIII")  # prompt: length, digest; lengths of what follows
_CALL: Final = struct.Struct("<III")  # bytes of id, name and arguments, which follow
_ENCODING: Final = ("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Beside(ABC):
    """A record of a namespace beside `page_key`, the last full page of prompt and reply.

    A kind of them says what its details are; `person` keeps its keys apart from those of the others.
    """

    kind: ClassVar[Kind]
    person: ClassVar[bytes]
    namespace: bytes
    page_key: bytes

    @abstractmethod
    def details(self) -> bytes:
        """Its fields as bytes."""

    @classmethod
    @abstractmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """The fields of such bytes; None if they are none."""

    def header(self, identity: StoreIdentity) -> RecordHeader | None:
        """Its record; None if it is too long for one, or belongs to no page."""
        details = self.details()
        if len(details) > MAX_DETAILS_BYTES or self.page_key == NO_PARENT:
            return None
        hashed = blake2b(identity.digest, digest_size=KEY_BYTES, person=self.person)
        hashed.update(self.page_key + details)
        return RecordHeader(self.kind, hashed.digest(), self.page_key, self.namespace, details)

    @classmethod
    def of(cls, header: RecordHeader) -> Self | None:
        """What a record says; None if its details are none of this kind."""
        fields = cls.read(header.details) if header.kind == cls.kind else None
        return None if fields is None else cls(header.namespace, header.parent_key, *fields)


@dataclass(frozen=True)
class StoredAlias(Beside):
    """A reply's ids, and the bytes that stand for them in a later prompt: `rendered`, then the white space `after`.

    It is found again by the prompt that was replied to.
    """

    kind = Kind.ALIAS
    person = b"radixlm/alias/1"
    num_prompt_tokens: int
    prompt_digest: bytes  # 16, over the prompt's ids
    reply_ids: tuple[int, ...]
    rendered: bytes
    after: bytes

    def details(self) -> bytes:
        """See `Beside`."""
        lengths = len(self.reply_ids), len(self.rendered), len(self.after)
        fields = _ALIAS.pack(self.num_prompt_tokens, self.prompt_digest, *lengths)
        return fields + np.array(self.reply_ids, "<u4").tobytes() + self.rendered + self.after

    @classmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """See `Beside`."""
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
class StoredCall(Beside):
    """A tool call that a namespace was given, as the model wrote it; `arguments` are JSON."""

    kind = Kind.CALL
    person = b"radixlm/call/1"
    call_id: str
    name: str
    arguments: str

    def details(self) -> bytes:
        """See `Beside`."""
        texts = [text.encode(*_ENCODING) for text in (self.call_id, self.name, self.arguments)]
        return _CALL.pack(*map(len, texts)) + b"".join(texts)

    @classmethod
    def read(cls, details: bytes) -> tuple[Any, ...] | None:
        """See `Beside`."""
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
    """The key of the last full page of a text's ids; `NO_PARENT` if it has none."""
    key = NO_PARENT
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        page = token_ids[start : start + PAGE_SIZE]
        key = PageKey.of(identity, namespace, key, page, bytes(PAGE_SIZE)).key
    return key
