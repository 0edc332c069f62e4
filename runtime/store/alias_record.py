"""An alias as a record: how a chat template renders a reply, found again by the prompt that was replied to.

Knows ids and bytes, not templates. An alias has no payload: all of it stands in the details of its header, and so in
the index. It belongs to the last full page of prompt and reply: it leaves with that page.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from .page_key import KEY_BYTES, NO_PARENT, PageKey, StoreIdentity
from .record import MAX_DETAILS_BYTES, Kind, RecordHeader

PROMPT_DIGEST_BYTES: Final = 16
_FIELDS: Final = struct.Struct(f"<Q{PROMPT_DIGEST_BYTES}sIII")  # prompt: length, digest; lengths of what follows


@dataclass(frozen=True)
class StoredAlias:
    """A reply's ids, and the bytes that stand for them in a later prompt: `rendered`, then the white space `after`."""

    namespace: bytes
    page_key: bytes  # of the last full page of prompt and reply
    num_prompt_tokens: int
    prompt_digest: bytes  # 16, over the prompt's ids
    reply_ids: tuple[int, ...]
    rendered: bytes
    after: bytes

    def header(self, identity: StoreIdentity) -> RecordHeader | None:
        """Its record; None if it is too long for one, or belongs to no page."""
        lengths = len(self.reply_ids), len(self.rendered), len(self.after)
        details = _FIELDS.pack(self.num_prompt_tokens, self.prompt_digest, *lengths)
        details += np.array(self.reply_ids, "<u4").tobytes() + self.rendered + self.after
        if len(details) > MAX_DETAILS_BYTES or self.page_key == NO_PARENT:
            return None
        hashed = blake2b(identity.digest, digest_size=KEY_BYTES, person=b"radixlm/alias/1")
        hashed.update(self.page_key + details)
        return RecordHeader(Kind.ALIAS, hashed.digest(), self.page_key, self.namespace, details)

    @classmethod
    def of(cls, header: RecordHeader) -> StoredAlias | None:
        """The alias of a record; None if its details are no alias's."""
        details = header.details
        if header.kind != Kind.ALIAS or len(details) < _FIELDS.size:
            return None
        num_prompt_tokens, digest, num_ids, *lengths = _FIELDS.unpack_from(details)
        ids_end = _FIELDS.size + 4 * num_ids
        after_start = ids_end + lengths[0]
        if len(details) != after_start + lengths[1]:
            return None
        ids = tuple(np.frombuffer(details, "<u4", num_ids, _FIELDS.size).tolist())
        rendered, after = details[ids_end:after_start], details[after_start:]
        return cls(header.namespace, header.parent_key, num_prompt_tokens, digest, ids, rendered, after)


def last_page_key(identity: StoreIdentity, namespace: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the last full page of a text's ids; `NO_PARENT` if it has none."""
    key = NO_PARENT
    for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
        page = token_ids[start : start + PAGE_SIZE]
        key = PageKey.of(identity, namespace, key, page, bytes(PAGE_SIZE)).key
    return key
