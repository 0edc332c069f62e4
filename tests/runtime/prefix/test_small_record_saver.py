"""What is recorded of a reply's rendering is on disk when its pages are, and known to the next process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from radixlm.runtime.cache.radix_node import encode_key
from radixlm.runtime.cache.reply_alias import ReplyAlias, ReplyAliases
from radixlm.runtime.prefix.small_record_saver import SmallRecordSaver, keep_alias, load_aliases
from radixlm.runtime.store import PageKey, PageStore

from ..store.pages import ALICE, BOB, IDENTITY, chain, payload

HEADS = {namespace: chain(3, namespace=namespace) for namespace in (ALICE, BOB)}


class Writer:
    """Changes the store at once."""

    def __init__(self, store: PageStore) -> None:
        self.store = store

    def submit(self, work: Callable[[PageStore], object]) -> None:
        work(self.store)


def saver_of(store: PageStore) -> tuple[ReplyAliases, SmallRecordSaver]:
    """One process."""
    writer: Any = Writer(store)
    aliases, saver = ReplyAliases(), SmallRecordSaver(writer)
    load_aliases(aliases, store)
    aliases.recorded = partial(keep_alias, saver)
    return aliases, saver


def ids_of(page_keys: list[PageKey]) -> list[int]:
    return [token for head in page_keys for token in head.token_ids]


def record(aliases: ReplyAliases, namespace: bytes) -> tuple[list[int], ReplyAlias]:
    """A reply to the first 20 tokens of the namespace's pages, of which it is the rest and a few more."""
    ids = ids_of(HEADS[namespace])
    alias = ReplyAlias((*ids[20:], 1, 2), b" Sure.", b" ")
    aliases.record(namespace, ids[:20], alias)
    return ids[:20], alias


def test_an_alias_is_known_to_the_next_process_if_its_pages_are_on_disk(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=1 << 20) as store:
        store.put(HEADS[ALICE], payload(HEADS[ALICE]))
        aliases, saver = saver_of(store)
        prompt, alias = record(aliases, ALICE)
        record(aliases, BOB)
        saver.save()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=1 << 20) as store:
        aliases, saver = saver_of(store)
        assert aliases.find(ALICE, 20, lambda: encode_key(prompt)) == (alias,)
        assert aliases.num_aliases(BOB) == 0, "its pages are not there"
        aliases.start_over()
        assert aliases.num_aliases(ALICE) == 0
        load_aliases(aliases, store)
        assert aliases.num_aliases(ALICE) == 1


def test_a_discarded_namespace_does_not_come_back_with_what_waited(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=1 << 20) as store:
        for page_keys in HEADS.values():
            store.put(page_keys, payload(page_keys))
        aliases, saver = saver_of(store)
        record(aliases, ALICE)
        record(aliases, BOB)
        saver.forget(BOB)
        saver.save()
        assert [alias.namespace for alias in store.aliases()] == [ALICE]
        record(aliases, BOB)
        saver.forget()
        saver.save()
        assert [alias.namespace for alias in store.aliases()] == [ALICE]
