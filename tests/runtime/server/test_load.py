"""Impatient clients over real sockets, a pool that is far too small, and a model that notices every wrong row.

The same clients as `python -m bench.load` has, for some seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine

from bench.load.clients import Crowd
from bench.load.server import LoadedServer
from bench.load.survivors import differences

from ...goldens.tiny_models import BOS, CHAT_TEMPLATE, IM_END, tokenizer
from ..fake_artifact import fake_artifact
from ..fake_model import FakeModel

VOCAB_SIZE = 320
CONTEXT_LENGTH, NUM_PAGES = 512, 40  # one context and a little


def open_engine(**options: Any) -> Engine:
    artifact: Any = fake_artifact(
        json.dumps(tokenizer(VOCAB_SIZE)),
        CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        context_length=CONTEXT_LENGTH,
    )
    page_bytes = artifact.manifest.kv.page_bytes
    return Engine(
        artifact,
        kv_cache_bytes=NUM_PAGES * page_bytes,
        open_runner=lambda _, num_pages, __: FakeModel(num_pages, VOCAB_SIZE),
        **options,
    )


@pytest.fixture
def loaded() -> Iterator[LoadedServer]:
    server = LoadedServer(open_engine(max_num_seqs=12, max_queue=8))
    yield server
    server.close()


def test_everybody_is_answered_or_refused_as_they_should_and_survivors_are_what_their_ids_give_alone(
    loaded: LoadedServer, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = Crowd(loaded.port, loaded.facts, num_streams=40, seconds=6, seed=3, num_kept=60, hang_s=60)
    asyncio.run(crowd.run())
    books = loaded.books()
    assert not crowd.num_faults, crowd.faults
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings, "a client that leaves is no error"
    # far less than any machine reaches in the time: more would be for its speed to decide
    assert sum(crowd.answered.values()) > 40 and sum(crowd.left.values()) > 5 and len(crowd.refused) > 12
    assert crowd.refused["429 queue full"]
    assert books["num_preemptions"] > 0 and books["num_evicted_pages"] > 50 and not books["num_failed"]
    assert loaded.leaks() == {"num_states_lost": 0, "num_sequences": 0, "num_pages_in_use": 0, "num_pages_lost": 0}
    assert len(crowd.survivors) > 20
    assert {survivor.params["temperature"] == 0.0 for survivor in crowd.survivors} == {True, False}
    with open_engine(max_num_seqs=1) as engine:
        assert [differences(survivor, engine) for survivor in crowd.survivors] == [[]] * len(crowd.survivors)
