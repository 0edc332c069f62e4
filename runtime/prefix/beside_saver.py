"""Keep on disk, too, what belongs to saved pages: states, how a template renders replies, and calls that were given.

Knows slots, keys, records and the writer, not how an alias or a call is found. The engine's thread owns it. What is not
taken is computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..cache.prefix_cache import PrefixCache
from ..cache.reply_alias import ReplyAlias, ReplyAliases, prompt_digest
from ..chat.tools.tool_calls import ToolCall
from ..model.batch import StateIO, UInt8Array
from ..store.beside_record import Beside, StoredAlias, StoredCall, last_page_key
from ..store.page_key import PageKey, StoreIdentity
from ..store.store_state import PutResult
from .disk_index import DiskIndex
from .disk_reader import EngineThread
from .disk_writer import DiskWriter
from .unsaved_pages import head_of

if TYPE_CHECKING:
    from ..store import PageStore


@dataclass
class StateSaver:
    """Stores each snapshot behind a full page once.

    Attributes:
        num_saved, num_dropped: states that the writer took, and that it had no room for.
    """

    cache: PrefixCache
    io: StateIO
    index: DiskIndex
    writer: DiskWriter
    identity: StoreIdentity
    queue: EngineThread
    num_saved: int = 0
    num_dropped: int = 0
    _on_their_way: set[bytes] = field(default_factory=set)  # keys of pages

    def save(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Store the states behind full pages of these tokens, which the writer was given before."""
        states = self.cache.states
        if states is None:
            return
        for number, page_id in enumerate(self.cache.tree.find(namespace, token_ids).pages):
            slot, node = states.at_page_end(page_id), self.cache.tree.node_of(page_id)
            if slot is None or node is None:
                continue
            page = head_of(self.identity, node, number - node.start)
            key = page.key
            if key in self._on_their_way or self.index.has_state(key):
                continue
            if self.writer.room_bytes < self.io.state_bytes:
                self.num_dropped += 1
                continue
            self._on_their_way.add(key)
            self.num_saved += 1
            self.writer.submit(partial(self._put, page, self.io.read_state(slot)), num_bytes=self.io.state_bytes)

    def _put(self, page: PageKey, state: UInt8Array, store: PageStore) -> PutResult:
        """In the writer's thread."""
        result = store.states.put(page, state)
        self.queue.post(partial(self._wrote, page.key, bool(result.stored)))
        return result

    def _wrote(self, key: bytes, is_stored: bool) -> None:
        self._on_their_way.discard(key)
        if is_stored:
            self.index.add_state(key)


MAX_WAITING = 1024  # records whose replies have not ended, or whose pages are not handed to the writer yet
MAX_KNOWN = 1 << 14  # calls that a new process is told of: those that were used last

MadeBy = Callable[[], Sequence[int] | None]
"""The ids of a prompt and its reply, but for the last one, which may be in no page: nobody computed it. None: the reply
has not ended."""
MakeRecord = Callable[[bytes], Beside]
"""Makes a record of the key of its page; called in the writer's thread."""


class BesideSaver:
    """Stores the records of one kind that it is told of, each after the pages of its reply."""

    def __init__(self, writer: DiskWriter) -> None:
        self._writer = writer
        self._waiting: deque[tuple[bytes, MadeBy, MakeRecord]] = deque(maxlen=MAX_WAITING)

    def keep(self, namespace: bytes, made_by: MadeBy, make: MakeRecord) -> None:
        """Have a record stored by the next `save` behind the end of its reply."""
        self._waiting.append((namespace, made_by, make))

    def save(self) -> None:
        """Store what waits, after all pages that the writer was given; a record without its page is left out."""
        for _ in range(len(self._waiting)):
            namespace, made_by, make = self._waiting.popleft()
            token_ids = made_by()
            if token_ids is None:
                self._waiting.append((namespace, made_by, make))
            else:
                self._writer.submit(partial(_put, namespace, token_ids, make))

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        kept = [waiting for waiting in self._waiting if namespace is not None and waiting[0] != namespace]
        self._waiting = deque(kept, maxlen=MAX_WAITING)


def _put(namespace: bytes, token_ids: Sequence[int], make: MakeRecord, store: PageStore) -> PutResult:
    """In the writer's thread: the keys of a long prompt's pages take a while."""
    return store.put_beside(make(last_page_key(store.identity, namespace, token_ids)))


def keep_alias(saver: BesideSaver, namespace: bytes, prompt_ids: Sequence[int], alias: ReplyAlias) -> None:
    """Have it stored how the reply to a prompt is rendered."""
    ids = tuple(prompt_ids)

    def make(page_key: bytes) -> StoredAlias:
        digest = prompt_digest(ids)
        return StoredAlias(namespace, page_key, len(ids), digest, alias.ids, alias.rendered, alias.after)

    saver.keep(namespace, lambda: (ids + alias.ids)[:-1], make)


def load_aliases(aliases: ReplyAliases, store: PageStore) -> None:
    """Have memory know all aliases that are on disk."""
    for stored in store.aliases():
        alias = ReplyAlias(stored.reply_ids, stored.rendered, stored.after)
        aliases.restore(stored.namespace, stored.num_prompt_tokens, stored.prompt_digest, alias)


def keep_call(saver: BesideSaver, namespace: bytes, call: ToolCall, made_by: MadeBy) -> None:
    """Have a tool call stored that a client was given."""
    saver.keep(namespace, made_by, lambda key: StoredCall(namespace, key, call.call_id, call.name, call.arguments))


def known_calls(store: PageStore) -> Iterator[tuple[bytes, ToolCall]]:
    """The calls on disk, by namespaces, the one used longest ago first."""
    for stored in deque(store.calls(), maxlen=MAX_KNOWN):
        yield stored.namespace, ToolCall(stored.call_id, stored.name, stored.arguments)
