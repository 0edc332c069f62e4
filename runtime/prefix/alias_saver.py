"""Keep on disk, too, how a template renders replies, and have a new process know what the one before it learned.

Knows aliases and which pages they belong to, not how they are found. The engine's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..cache.reply_alias import ReplyAlias, ReplyAliases, prompt_digest
from ..store.alias_record import StoredAlias, last_page_key
from ..store.store_state import PutResult
from .disk_writer import DiskWriter

if TYPE_CHECKING:
    from ..store import PageStore

MAX_WAITING = 1024  # aliases whose pages are not handed to the writer yet


class AliasSaver:
    """Stores what `aliases` records from here on, and gives it back what the store has."""

    def __init__(self, aliases: ReplyAliases, store: PageStore, writer: DiskWriter) -> None:
        self._aliases, self._store, self._writer = aliases, store, writer
        self._waiting: deque[tuple[bytes, tuple[int, ...], ReplyAlias]] = deque(maxlen=MAX_WAITING)
        self.load()
        aliases.recorded = self._wait

    def load(self) -> None:
        """Have memory know all that is on disk."""
        for stored in self._store.aliases():
            alias = ReplyAlias(stored.reply_ids, stored.rendered, stored.after)
            self._aliases.restore(stored.namespace, stored.num_prompt_tokens, stored.prompt_digest, alias)

    def save(self) -> None:
        """Store what waits, after all pages that the writer was given; an alias without its page is left out."""
        while self._waiting:
            self._writer.submit(partial(_put, *self._waiting.popleft()))

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        kept = [waiting for waiting in self._waiting if namespace is not None and waiting[0] != namespace]
        self._waiting = deque(kept, maxlen=MAX_WAITING)

    def _wait(self, namespace: bytes, prompt_ids: Sequence[int], alias: ReplyAlias) -> None:
        self._waiting.append((namespace, tuple(prompt_ids), alias))


def _put(namespace: bytes, prompt_ids: tuple[int, ...], alias: ReplyAlias, store: PageStore) -> PutResult:
    """In the writer's thread: the keys of a long prompt's pages take a while."""
    return store.put_beside(
        StoredAlias(
            namespace,
            # the last token of a reply that ended by its length is in no page: nobody computed it
            last_page_key(store.identity, namespace, (prompt_ids + alias.ids)[:-1]),
            len(prompt_ids),
            prompt_digest(prompt_ids),
            alias.ids,
            alias.rendered,
            alias.after,
        )
    )
