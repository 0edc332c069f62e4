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
from ..fake_artifact import STATE_BYTES, fake_artifact
from ..fake_model import FakeModel, RecurrentModel

VOCAB_SIZE = 320
CONTEXT_LENGTH, NUM_PAGES = 512, 40  # one context and a little
NUM_STATES = 12  # fewer than twelve requests read and write


def open_engine(*, num_states: int = 0, **options: Any) -> Engine:
    def open_runner(_: object, num_pages: int, __: object) -> FakeModel:
        if num_states:
            return RecurrentModel(num_pages, VOCAB_SIZE, 1 + num_states, STATE_BYTES)
        return FakeModel(num_pages, VOCAB_SIZE)

    if num_states:
        options["state_cache_bytes"] = num_states * STATE_BYTES
    artifact: Any = fake_artifact(
        json.dumps(tokenizer(VOCAB_SIZE)),
        CHAT_TEMPLATE,
        vocab_size=VOCAB_SIZE,
        bos_token_id=BOS,
        eos_token_id=IM_END,
        context_length=CONTEXT_LENGTH,
        is_recurrent=num_states > 0,
    )
    page_bytes = artifact.manifest.kv.page_bytes
    return Engine(
        artifact,
        kv_cache_bytes=NUM_PAGES * page_bytes,
        open_runner=open_runner,
        **options,
    )


@pytest.fixture(params=[0, NUM_STATES], ids=["attention", "recurrent"])
def num_states(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def loaded(num_states: int) -> Iterator[LoadedServer]:
    server = LoadedServer(open_engine(num_states=num_states, max_num_seqs=12, max_queue=8))
    yield server
    server.close()


def test_everybody_is_answered_or_refused_as_they_should_and_survivors_are_what_their_ids_give_alone(
    loaded: LoadedServer, num_states: int, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = Crowd(loaded.port, loaded.facts, num_streams=40, seconds=6, seed=3, num_kept=60, hang_s=60)
    asyncio.run(crowd.run())
    books = loaded.books()
    assert not crowd.num_faults, crowd.faults
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warnings, "a client that leaves is no error"
    # far less than any machine reaches in the time: more would be for its speed to decide
    few = 15 if num_states else 40
    assert sum(crowd.answered.values()) > few and sum(crowd.left.values()) > 5 and len(crowd.refused) > 12
    assert crowd.refused["429 queue full"]
    assert books["num_preemptions"] > 0 and books["num_evicted_pages"] > 50 and not books["num_failed"]
    assert loaded.leaks() == {"num_states_lost": 0, "num_sequences": 0, "num_pages_in_use": 0, "num_pages_lost": 0}
    states = loaded._engine.stats().states
    assert states.num_evicted > 0 if num_states and states is not None else states is None
    assert len(crowd.survivors) > few // 2
    assert {survivor.params["temperature"] == 0.0 for survivor in crowd.survivors} == {True, False}
    with open_engine(num_states=num_states, max_num_seqs=1) as engine:
        assert [differences(survivor, engine) for survivor in crowd.survivors] == [[]] * len(crowd.survivors)
