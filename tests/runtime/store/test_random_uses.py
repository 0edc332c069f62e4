"""Anything that may be asked of a store, in any order, beside a dictionary that forgets nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity

from .pages import ALICE, BOB, chain, keys, payload

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", 700)
MAX_BYTES = 300_000  # 36 pages
NUMBERS = st.integers(0, 11)


class Uses(RuleBasedStateMachine):
    """`there` has the pages that the store says it has."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.prompts: list[list[PageKey]] = []
        self.there: dict[bytes, PageKey] = {}
        self.open()

    def open(self) -> None:
        self.store = PageStore.open(self.directory, IDENTITY, max_bytes=MAX_BYTES)

    @rule(
        prompt=NUMBERS,
        at=NUMBERS,
        num_pages=st.integers(0, 6),
        seed=st.integers(0, 5),
        ns=st.sampled_from((ALICE, BOB)),
    )
    def put(self, prompt: int, at: int, num_pages: int, seed: int, ns: bytes) -> None:
        trunk = self.prompts[prompt % len(self.prompts)][:at] if self.prompts else []
        trunk = trunk if trunk and trunk[0].namespace == ns else []
        parent = trunk[-1].key if trunk else NO_PARENT
        page_keys = trunk + chain(num_pages, seed, namespace=ns, parent_key=parent, identity=IDENTITY)
        result = self.store.put(page_keys, payload(page_keys, IDENTITY.page_bytes))
        assert result.stored == keys(page_keys)
        assert not {*result.evicted} & {*result.stored}
        assert {*result.evicted} <= self.there.keys()
        for key in result.evicted:
            del self.there[key]
        for head in page_keys:
            self.there.setdefault(head.key, head)
        self.prompts.append(page_keys)

    @rule(prompt=NUMBERS, first=NUMBERS)
    def read(self, prompt: int, first: int) -> None:
        page_keys = self.prompts[prompt % len(self.prompts)][first:] if self.prompts else []
        out = np.empty((len(page_keys), IDENTITY.page_bytes), np.uint8)
        num_read = self.store.read(page_keys, out)
        assert (out[:num_read] == payload(page_keys[:num_read], IDENTITY.page_bytes)).all()
        expected = [head.key in self.there for head in page_keys]
        assert num_read == (expected.index(False) if False in expected else len(page_keys))

    @rule(prompt=NUMBERS, at=NUMBERS)
    def touch(self, prompt: int, at: int) -> None:
        self.store.touch(keys(self.prompts[prompt % len(self.prompts)][:at] if self.prompts else []))

    @rule(prompt=NUMBERS, at=NUMBERS)
    def drop(self, prompt: int, at: int) -> None:
        page_keys = self.prompts[prompt % len(self.prompts)][at : at + 1] if self.prompts else []
        for key in self.store.drop(keys(page_keys)):
            del self.there[key]
        assert not {*keys(page_keys)} & self.there.keys()

    @rule()
    def discard(self) -> None:
        gone = self.store.discard(BOB)
        assert sorted(gone) == sorted(key for key, head in self.there.items() if head.namespace == BOB)
        for key in gone:
            del self.there[key]

    @rule()
    def gc(self) -> None:
        report = self.store.gc()
        assert report.bytes_after <= report.bytes_before

    @rule(loses_index=st.booleans())
    def restart(self, loses_index: bool) -> None:
        self.store.close()
        before = self.there
        if loses_index:
            (self.directory / "index.sqlite").unlink()
        self.open()
        if loses_index:  # what was evicted with its parent may be found again when the parent is
            self.there = {head.key: head for head in self.store.page_keys()}
            assert before.items() <= self.there.items()

    @invariant()
    def everything_is_listed_and_right(self) -> None:
        listed = list(self.store.page_keys())
        assert {head.key: head for head in listed} == self.there
        stats = self.store.stats()
        assert stats.num_pages == len(listed)
        assert stats.num_bytes <= MAX_BYTES
        assert not stats.is_off
        assert self.store.verify().bad == {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


TestRandomUses = Uses.TestCase
TestRandomUses.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
