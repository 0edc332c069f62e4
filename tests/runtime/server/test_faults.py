"""A client and an operator see one answer to a fault in any stage of a step, and the server goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from radixlm.runtime.cache.kv_transaction import KVTransaction
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.engine.completion import RequestOutput
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.engine.reply import Reply
from radixlm.runtime.engine.step import readers
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.server.choices import Choices

from .real_server import WAIT_S, RealServer, SlowModel, real_server, wait_until

STAGES: dict[str, tuple[Any, str]] = {
    "copy_rows": (SlowModel, "copy_rows"),
    "forward": (SlowModel, "forward"),
    "top_logits": (SlowModel, "top_logits"),
    "sample": (readers, "sample_row"),
    "accept": (Reply, "accept"),
    "commit": (KVTransaction, "commit"),
    "delivery": (GenerationStream, "deliver"),
    "allocation": (PagePool, "allocate"),
}


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


def once(wrapped: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Raises at its first call, and never again; where a prompt's progress is told, which is no part of a reply, it
    does not."""
    thrown = []

    def call(*args: Any, **kwargs: Any) -> Any:
        deltas = [arg.delta for arg in args if isinstance(arg, RequestOutput)]
        if not thrown and not any(delta is not None and delta.progress for delta in deltas):
            thrown.append(True)
            raise error
        return wrapped(*args, **kwargs)

    return call


def tokens(server: RealServer, **fields: Any) -> list[int]:
    answer = server.chat(max_tokens=8, return_token_ids=True, **fields)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize(
    ("error", "stream"), [(RuntimeError("thrown on purpose"), False), (MemoryError("no room"), True)]
)
@pytest.mark.parametrize("stage", list(STAGES))
def test_a_fault_is_one_answer_and_the_next_request_works(
    server: RealServer, monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception, stream: bool
) -> None:
    before = tokens(server)
    owner, name = STAGES[stage]
    monkeypatch.setattr(owner, name, once(getattr(owner, name), error))
    # part of a page is the same as before: its rows are copied
    messages = [{"role": "user", "content": "once there was a man"}]
    failed = server.chat(max_tokens=8, stream=stream, messages=messages)
    assert failed.status_code == (200 if stream else 500)
    assert '"error"' in failed.text and "[DONE]" not in failed.text and "Traceback" not in failed.text
    assert str(error) not in failed.text  # which may hold paths, and what others sent
    stats = server.engine.stats()
    assert sum(stats.failed_by_type.values()) + stats.finished_by_reason.get("cancelled", 0) == 1
    is_step = stage not in ("sample", "accept", "delivery")
    health = server.get("/health")
    assert health.status_code == 200
    assert (health.json()["status"], health.json()["num_failed_steps"]) == (
        ("degraded", 1) if is_step else ("ready", 0)
    )
    if is_step:
        assert type(error).__name__ in health.json()["reason"]
    assert tokens(server) == before
    assert server.get("/health").json()["status"] == "ready"
    server.check()


def test_a_stream_whose_callback_fails_loses_nothing_but_its_wake(
    server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tokens(server)
    submit = Choices.submit

    def submit_with_bad_wake(self: Choices, ask: Any) -> None:
        submit(self, lambda on_ready: ask(on_ready=once(on_ready, RuntimeError("thrown on purpose"))))

    monkeypatch.setattr(Choices, "submit", submit_with_bad_wake)
    text = server.chat(max_tokens=8, stream=True, return_token_ids=True).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", ())] == before
    monkeypatch.undo()
    assert tokens(server) == before
    server.check()


def test_a_kernel_that_returns_nan_fails_its_request_and_nothing_of_it_is_reused(server: RealServer) -> None:
    before = tokens(server)

    def spoil(batch: Batch, logits: Float32Array) -> None:
        logits[:, 7] = np.nan

    server.model.after = spoil
    failed = server.chat(max_tokens=8)
    assert failed.status_code == 500 and "not finite" in failed.json()["error"]["message"]
    server.model.after = lambda batch, logits: None
    again = server.chat(max_tokens=8, return_token_ids=True).json()
    assert again["choices"][0]["token_ids"] == before
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    server.check()


def test_a_fault_spares_those_who_wait(server: RealServer) -> None:
    """A step fails while as many run as may; the one that waits is answered."""
    entered, go_on = threading.Event(), threading.Event()

    def fail(batch: Batch) -> None:
        server.model.before = lambda batch: None
        entered.set()
        assert go_on.wait(WAIT_S)
        raise RuntimeError("thrown on purpose")

    server.model.before = fail
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda seed=seed: answers.append(server.chat(max_tokens=4, seed=seed).status_code))
        for seed in range(2)
    ]
    threads[0].start()
    assert entered.wait(WAIT_S)
    threads[1].start()
    wait_until(lambda: server.engine.stats().num_waiting == 1)
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(answers) == [200, 500]
    server.check()


def test_steps_that_fail_again_and_again_take_the_server_out_of_service(server: RealServer) -> None:
    def fail(batch: Batch) -> None:
        raise RuntimeError("thrown on purpose")

    server.model.before = fail
    for number in range(1, 4):
        assert server.chat(max_tokens=2).status_code == 500
        assert server.get("/health").status_code == (503 if number == 3 else 200)
    server.model.before = lambda batch: None
    assert server.chat(max_tokens=2).status_code == 200
    assert server.get("/health").status_code == 200
    server.check()
