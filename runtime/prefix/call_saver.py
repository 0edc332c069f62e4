"""Keep on disk, too, which calls of tools clients were given, so that a new process knows them when they come back.

Knows calls and the replies that made them, not how they are compared. The engine's thread owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..chat.tools.tool_calls import ToolCall
from ..store.alias_record import last_page_key
from ..store.call_record import StoredCall
from ..store.store_state import PutResult
from .disk_writer import DiskWriter

if TYPE_CHECKING:
    from ..store import PageStore

MAX_WAITING = 1024  # calls whose replies have not ended, or whose pages are not handed to the writer yet
MAX_KNOWN = 1 << 14  # that a new process is told of: those that were used last

MadeBy = Callable[[], Sequence[int] | None]
"""The ids of a prompt and the reply that made a call, but for the last one; None: the reply has not ended."""


class CallSaver:
    """Stores the calls that it is told of, each after the pages of its reply."""

    def __init__(self, store: PageStore, writer: DiskWriter) -> None:
        self._store, self._writer = store, writer
        self._waiting: deque[tuple[bytes, ToolCall, MadeBy]] = deque(maxlen=MAX_WAITING)

    def known(self) -> Iterator[tuple[bytes, ToolCall]]:
        """What is on disk, by namespaces, the call used longest ago first."""
        for stored in deque(self._store.calls(), maxlen=MAX_KNOWN):
            yield stored.namespace, ToolCall(stored.call_id, stored.name, stored.arguments)

    def keep(self, namespace: bytes, call: ToolCall, made_by: MadeBy) -> None:
        """Have a call stored by the next `save` behind the end of its reply."""
        self._waiting.append((namespace, call, made_by))

    def save(self) -> None:
        """Store what waits, after all pages that the writer was given; a call without its page is left out."""
        for _ in range(len(self._waiting)):
            namespace, call, made_by = self._waiting.popleft()
            token_ids = made_by()
            if token_ids is None:
                self._waiting.append((namespace, call, made_by))
            else:
                self._writer.submit(partial(_put, namespace, call, token_ids))

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits, of a namespace or all."""
        kept = [waiting for waiting in self._waiting if namespace is not None and waiting[0] != namespace]
        self._waiting = deque(kept, maxlen=MAX_WAITING)


def _put(namespace: bytes, call: ToolCall, token_ids: Sequence[int], store: PageStore) -> PutResult:
    """In the writer's thread: the keys of a long prompt's pages take a while."""
    page_key = last_page_key(store.identity, namespace, token_ids)
    return store.put_beside(StoredCall(namespace, page_key, call.call_id, call.name, call.arguments))
