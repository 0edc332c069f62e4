"""A call of a tool as a record: that a client was given it, and how the model wrote its arguments.

Knows texts and bytes, not how a call is found again. A call has no payload: all of it stands in the details of its
header, and so in the index. It belongs to the last full page of the prompt and the reply that made it: it leaves with
that page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from .page_key import KEY_BYTES, NO_PARENT, StoreIdentity
from .record import MAX_DETAILS_BYTES, Kind, RecordHeader

_FIELDS: Final = struct.Struct("<III")  # bytes of id, name and arguments, which follow
_ENCODING: Final = ("utf-8", "surrogatepass")


@dataclass(frozen=True)
class StoredCall:
    """A call that a namespace was given; `arguments` are JSON."""

    namespace: bytes
    page_key: bytes  # of the last full page of prompt and reply
    call_id: str
    name: str
    arguments: str

    def header(self, identity: StoreIdentity) -> RecordHeader | None:
        """Its record; None if it is too long for one, or belongs to no page."""
        texts = [text.encode(*_ENCODING) for text in (self.call_id, self.name, self.arguments)]
        details = _FIELDS.pack(*map(len, texts)) + b"".join(texts)
        if len(details) > MAX_DETAILS_BYTES or self.page_key == NO_PARENT:
            return None
        hashed = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"radixlm/call/1")
        hashed.update(self.page_key + details)
        return RecordHeader(Kind.CALL, hashed.digest(), self.page_key, self.namespace, details)

    @classmethod
    def of(cls, header: RecordHeader) -> StoredCall | None:
        """The call of a record; None if its details are no call's."""
        details = header.details
        if header.kind != Kind.CALL or len(details) < _FIELDS.size:
            return None
        lengths = _FIELDS.unpack_from(details)
        if len(details) != _FIELDS.size + sum(lengths):
            return None
        texts, at = [], _FIELDS.size
        for length in lengths:
            try:
                texts.append(details[at : at + length].decode(*_ENCODING))
            except UnicodeDecodeError:
                return None
            at += length
        return cls(header.namespace, header.parent_key, *texts)
