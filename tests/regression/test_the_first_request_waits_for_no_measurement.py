"""The first request after a start with a store waited for prefill to be measured: 0.8 to 1.7 s for 8 tokens.

It is measured when there was nothing else to do for a second, in steps; and once for an artifact on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine, SamplingParams
from radixlm.runtime.model.batch import Batch, Float32Array, UInt8Array
from radixlm.runtime.model.scripted_runner import ScriptedRunner

from ..runtime.fake_artifact import FakeArtifact
from .conftest import LoadArtifact

WAIT_S = 60.0  # only a hang takes that long
PROMPT = [10 + number % 300 for number in range(40)]


class Runner(ScriptedRunner):
    """Takes a millisecond a token, by a clock that stands still otherwise; notes which steps are of requests."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.now = 0.0
        self.of_requests: list[bool] = []

    def forward(self, batch: Batch) -> Float32Array:
        self.now += 0.001 * len(batch.arrays.token_ids)
        self.of_requests.append(len(batch.arrays.logit_rows) > 0)
        return super().forward(batch)

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        out[: len(page_ids)] = 0

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None: ...


class Server:
    """An engine with a store; `ask` is one request for one token."""

    def __init__(self, artifact: FakeArtifact, store: Path) -> None:
        self.runner = Runner(artifact.manifest.model.vocab_size)
        model: Any = artifact
        self.engine = Engine(
            model, open_runner=lambda *_: self.runner, max_num_seqs=4, store=store, clock=lambda: self.runner.now
        )

    def ask(self) -> None:
        self.engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))

    def idle(self) -> None:
        """Until all is done that can wait; the loop looks for it once a second."""
        deadline = time.monotonic() + WAIT_S
        while self.engine._loop.call(lambda core: core.wait_s) is not None:
            self.runner.now += 2.0
            time.sleep(0.01)
            assert time.monotonic() < deadline, "it is never done"

    @property
    def measured(self) -> tuple[float, ...] | None:
        tier = self.engine._core.tier
        assert tier is not None
        return tier.rates.compute_sums


Start = Callable[[], Server]


@pytest.fixture
def start(load_artifact: LoadArtifact, tmp_path: Path) -> Iterator[Start]:
    """Starts again and again over one store, in which one request was kept."""

    opened: list[Server] = []

    def start_again() -> Server:
        for server in opened:
            server.engine.close()
        opened.append(Server(load_artifact("tiny_spm"), tmp_path / "store"))
        return opened[-1]

    start_again().ask()
    yield start_again
    opened[-1].engine.close()


def test_the_first_request_is_served_before_anything_is_measured(start: Start) -> None:
    server = start()
    server.ask()
    assert all(server.runner.of_requests)
    server.idle()
    assert server.runner.of_requests.count(False) == 4


def test_what_was_measured_is_known_after_a_restart(start: Start) -> None:
    server = start()
    server.idle()
    measured = server.measured
    assert measured is not None
    server = start()
    assert server.measured == measured
    server.idle()
    server.ask()
    assert all(server.runner.of_requests)


def test_a_measurement_that_broke_is_made_again(start: Start, tmp_path: Path) -> None:
    start().idle()
    (tmp_path / "store" / "PREFILL").write_bytes(b"rubbish")
    server = start()
    assert server.measured is None
    server.idle()
    assert server.measured is not None and server.runner.of_requests.count(False) == 4
