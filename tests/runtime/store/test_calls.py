"""A call of a tool lies beside the pages of its reply, leaves with them, and is found again after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from radixlm.runtime.store import PageKey, PageStore, StoredCall
from radixlm.runtime.store.page_key import NO_PARENT
from radixlm.runtime.store.record import MAX_DETAILS_BYTES

from .pages import ALICE, BOB, IDENTITY, chain, payload

MAX_BYTES = 1_000_000  # 80 pages, in segments of 9
ARGUMENTS = '{"path": "naïve.py", "lines": [1, 2.0], "text": "漢字"}'


def open_store(directory: Path) -> PageStore:
    return PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES)


def call_of(page: PageKey, call_id: str = "call_1", arguments: str = ARGUMENTS) -> StoredCall:
    return StoredCall(page.namespace, page.key, call_id, "edit", arguments)


def test_a_call_is_found_after_a_restart_with_or_without_the_index(tmp_path: Path) -> None:
    page_keys = chain(5)
    calls = [call_of(page_keys[4]), call_of(page_keys[4], "call_2"), call_of(page_keys[2], arguments="{}")]
    with open_store(tmp_path) as store:
        store.put(page_keys, payload(page_keys))
        for call in calls:
            assert len(store.put_small(call).stored) == 1
            store.put_small(call)
        assert store.stats().num_pages == 5
    for name in ("", "index.sqlite"):
        if name:
            (tmp_path / name).unlink()
        with open_store(tmp_path) as store:
            assert sorted(store.calls(), key=repr) == sorted(calls, key=repr)
            assert list(store.aliases()) == [] and list(store.page_keys()) == page_keys
            assert store.verify().bad == {}


def test_a_call_whose_page_is_not_there_or_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    page_keys = chain(5)
    with open_store(tmp_path) as store:
        store.put(page_keys[:3], payload(page_keys[:3]))
        assert store.put_small(call_of(page_keys[3])).stored == ()
        assert store.put_small(call_of(page_keys[2], arguments="x" * MAX_DETAILS_BYTES)).stored == ()
        assert store.put_small(replace(call_of(page_keys[2]), page_key=NO_PARENT)).stored == ()
        assert list(store.calls()) == []


@pytest.mark.parametrize("how", ["drop", "discard"])
def test_a_call_leaves_with_its_page_and_nothing_of_it_is_on_the_disk(tmp_path: Path, how: str) -> None:
    page_keys, other = chain(5), chain(5, 1, namespace=BOB)
    with open_store(tmp_path) as store:
        for each in (page_keys, other):
            store.put(each, payload(each))
        store.put_small(call_of(page_keys[3]))
        store.put_small(call_of(other[4]))
        if how == "drop":
            store.drop([page_keys[1].key])
        else:
            store.discard(ALICE)
        assert list(store.calls()) == [call_of(other[4])]
        on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert on_disk.count(ARGUMENTS.encode()) == 2  # the other one, in its record and in the index


def test_old_pages_make_room_for_new_ones_and_take_their_calls_with_them(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in range(60):
            page_keys = chain(5, number)
            store.put(page_keys, payload(page_keys))
            store.put_small(call_of(page_keys[4], f"call_{number}"))
        there = {head.key for head in store.page_keys()}
        calls = list(store.calls())
        assert 0 < len(calls) < 60 and all(call.page_key in there for call in calls)
        assert calls[-1].call_id == "call_59"
        assert store.stats().num_bytes <= MAX_BYTES
        store.touch([calls[0].page_key])  # a call is as old as its page
        store.put(chain(1, 99), payload(chain(1, 99)))
        assert list(store.calls())[-1] == calls[0]


def test_details_that_are_no_calls_are_passed_over() -> None:
    header = call_of(chain(1)[0]).header(IDENTITY)
    assert header is not None and StoredCall.of(header) == call_of(chain(1)[0])
    for details in (
        b"",
        header.details[:-1],
        header.details + b"x",
        header.details.replace("漢".encode(), b"\xff\xfe\xfd"),
    ):
        assert StoredCall.of(replace(header, details=details)) is None
