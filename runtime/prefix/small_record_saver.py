"""Save the small records and states that belong to saved pages: recurrent states, re-rendered replies, and tool calls.

Knows slots, keys, records and the writer, not how an alias or a call is found. The engine's thread owns it. Anything
that is not saved is computed again.
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
from ..store.page_key import PageKey, StoreIdentity
from ..store.small_record import SmallRecord, StoredAlias, StoredCall, last_page_key
from ..store.store_state import PutResult
from .disk_index import DiskIndex
from .disk_reader import EngineThread
from .disk_writer import DiskWriter
from .unsaved_pages import page_key_of

if TYPE_CHECKING:
    from ..store import PageStore


@dataclass
class StateSaver:
    """Stores each state snapshot after a full page once.

    Attributes:
        num_saved, num_dropped: states that the writer took, and states that it had no room for.
    """

    cache: PrefixCache
    io: StateIO
    index: DiskIndex
    writer: DiskWriter
    identity: StoreIdentity
    queue: EngineThread
    num_saved: int = 0
    num_dropped: int = 0
    _in_flight: set[bytes] = field(default_factory=set)  # keys of pages

    def save(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Store the states after full pages of these tokens, which were passed to the writer before."""
        states = self.cache.states
        if states is None:
            return
        for number, page_id in enumerate(self.cache.tree.find(namespace, token_ids).pages):
            slot, node = states.at_page_end(page_id), self.cache.tree.node_of(page_id)
            if slot is None or node is None:
                continue
            page = page_key_of(self.identity, node, number - node.start)
            key = page.key
            if key in self._in_flight or self.index.has_state(key):
                continue
            if self.writer.room_bytes < self.io.state_bytes:
                self.num_dropped += 1
                continue
            self._in_flight.add(key)
            self.num_saved += 1
            self.writer.submit(partial(self._put, page, self.io.read_state(slot)), num_bytes=self.io.state_bytes)

    def _put(self, page: PageKey, state: UInt8Array, store: PageStore) -> PutResult:
        """Store a state. Runs in the writer's thread."""
        is_stored = False
        try:
            result = store.states.put(page, state)
            is_stored = bool(result.stored)
            return result
        finally:
            self.queue.post(partial(self._wrote, page.key, is_stored))

    def _wrote(self, key: bytes, is_stored: bool) -> None:
        self._in_flight.discard(key)
        if is_stored:
            self.index.add_state(key)


MAX_WAITING = 1024  # records whose replies have not ended, or whose pages were not passed to the writer yet
MAX_KNOWN = 1 << 14  # tool calls that a new process loads: the most recently used

ReplyTokens = Callable[[], Sequence[int] | None]
"""Return the ids of a prompt and its reply, except the last one, which can be uncomputed and so in no page. None if
the reply has not ended."""
MakeRecord = Callable[[bytes], SmallRecord]
"""Make a record, given the key of its page; called in the writer's thread."""


class SmallRecordSaver:
    """Stores records of one kind, each after the pages of its reply."""

    def __init__(self, writer: DiskWriter) -> None:
        self._writer = writer
        self._waiting: deque[tuple[bytes, ReplyTokens, MakeRecord]] = deque(maxlen=MAX_WAITING)

    def keep(self, namespace: bytes, reply_tokens: ReplyTokens, make: MakeRecord) -> None:
        """Queue a record; the first `save` after the end of its reply stores it."""
        self._waiting.append((namespace, reply_tokens, make))

    def save(self) -> None:
        """Store queued records, after all pages that the writer was given; a record without its page is left out."""
        for _ in range(len(self._waiting)):
            namespace, reply_tokens, make = self._waiting.popleft()
            token_ids = reply_tokens()
            if token_ids is None:
                self._waiting.append((namespace, reply_tokens, make))
            else:
                self._writer.submit(partial(_put, namespace, token_ids, make))

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop queued records, of a namespace or all."""
        kept = [waiting for waiting in self._waiting if namespace is not None and waiting[0] != namespace]
        self._waiting = deque(kept, maxlen=MAX_WAITING)


def _put(namespace: bytes, token_ids: Sequence[int], make: MakeRecord, store: PageStore) -> PutResult:
    """Store a record. Runs in the writer's thread, because the keys of a long prompt's pages take a while."""
    return store.put_small(make(last_page_key(store.identity, namespace, token_ids)))


def keep_alias(saver: SmallRecordSaver, namespace: bytes, prompt_ids: Sequence[int], alias: ReplyAlias) -> None:
    """Store the alias of a reply to a prompt."""
    ids = tuple(prompt_ids)

    def make(page_key: bytes) -> StoredAlias:
        digest = prompt_digest(ids)
        return StoredAlias(namespace, page_key, len(ids), digest, alias.ids, alias.rendered, alias.after)

    saver.keep(namespace, lambda: (ids + alias.ids)[:-1], make)


def load_aliases(aliases: ReplyAliases, store: PageStore) -> None:
    """Load all aliases on disk into memory."""
    for stored in store.aliases():
        alias = ReplyAlias(stored.reply_ids, stored.rendered, stored.after)
        aliases.restore(stored.namespace, stored.num_prompt_tokens, stored.prompt_digest, alias)


def keep_call(saver: SmallRecordSaver, namespace: bytes, call: ToolCall, reply_tokens: ReplyTokens) -> None:
    """Store a tool call that a client received."""
    saver.keep(namespace, reply_tokens, lambda key: StoredCall(namespace, key, call.call_id, call.name, call.arguments))


def known_calls(store: PageStore) -> Iterator[tuple[bytes, ToolCall]]:
    """Yield the tool calls on disk with their namespaces, the least recently used first."""
    for stored in deque(store.calls(), maxlen=MAX_KNOWN):
        yield stored.namespace, ToolCall(stored.call_id, stored.name, stored.arguments)
