"""Batches of requests: answered as single requests are, in idle time, through cancellation and restarts."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.errors import EngineOverloaded, StoreOff
from radixlm.runtime.server import create_app
from radixlm.runtime.server.errors import HTTPError
from radixlm.runtime.server.stored import batch_runner
from radixlm.runtime.server.stored.batches import Batches
from radixlm.runtime.server.stored.database import FILE
from radixlm.runtime.server.stored.forms import FormField, read_form
from starlette.testclient import TestClient

from ..conftest import FakeEngine
from ..real_server import real_server, wait_until

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def line(custom_id: str, url: str = CHAT, **body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {**ASKED, **body}}).encode()


def upload(client: Any, *lines: bytes, base: str = "", purpose: str = "batch") -> Any:
    files = {"file": ("requests.jsonl", b"\n".join(lines))}
    return client.post(f"{base}/v1/files", files=files, data={"purpose": purpose})


def begin(client: Any, *lines: bytes, endpoint: str = CHAT, base: str = "") -> Any:
    file_id = upload(client, *lines, base=base).json()["id"]
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    response = client.post(f"{base}/v1/batches", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ended(client: Any, batch: Any, base: str = "") -> Any:
    found = [batch]

    def has_ended() -> bool:
        found[0] = client.get(f"{base}/v1/batches/{batch['id']}").json()
        return found[0]["status"] in ("completed", "failed", "cancelled", "expired")

    wait_until(has_ended)
    return found[0]


def lines_of(client: Any, file_id: str, base: str = "") -> list[Any]:
    return [json.loads(each) for each in client.get(f"{base}/v1/files/{file_id}/content").text.splitlines()]


@pytest.fixture
def looping(engine: FakeEngine) -> Iterator[TestClient]:
    """A client whose event loop goes on between requests."""
    with TestClient(create_app(engine)) as client:  # type: ignore[arg-type]
        yield client


def test_every_line_is_answered_as_the_request_alone_and_is_idle_work(looping: TestClient, engine: FakeEngine) -> None:
    alone = looping.post(CHAT, json=ASKED).json()["choices"]
    asked = [line("a"), b"", line("b", temperature=-5), line("c", stream=False)]
    batch = ended(looping, begin(looping, *asked))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
    answers = lines_of(looping, batch["output_file_id"])
    assert [each["custom_id"] for each in answers] == ["a", "c"]
    for answer in answers:
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        assert answer["response"]["body"]["choices"] == alone
    [failed] = lines_of(looping, batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 400)
    assert "temperature" in failed["response"]["body"]["error"]["message"]
    assert [options.idle for options in engine.options] == [False, True, True]
    assert looping.get("/v1/batches").json()["data"] == [batch]


def test_responses_of_a_batch_are_kept_if_they_ask_for_it_alone(looping: TestClient) -> None:
    url = "/v1/responses"
    asked = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"input": "Hi", **more}}).encode()
        for name, more in (("a", {}), ("b", {"store": True}))
    ]
    batch = ended(looping, begin(looping, *asked, endpoint=url))
    stored = [each["response"]["body"]["store"] for each in lines_of(looping, batch["output_file_id"])]
    assert stored == [False, True]


def test_a_full_queue_is_waited_for(looping: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, refusals = engine.stream, [EngineOverloaded(1, 1, 1)]
    monkeypatch.setattr("radixlm.runtime.server.stored.batch_runner.RETRY_S", 0.01)

    def refusing(*args: Any, **more: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return stream(*args, **more)

    monkeypatch.setattr(engine, "stream", refusing)
    batch = ended(looping, begin(looping, line("a")))
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"),
        ([b"{"], "invalid_json_line"),
        ([b'{"custom_id": "a"}'], "invalid_json_line"),
        ([line("a"), line("a")], "duplicate_custom_id"),
        ([line("a", url="/v1/completions")], "mismatched_endpoint"),
        ([line("a").replace(b"POST", b"GET")], "invalid_method"),
        ([line("a", stream=True)], "invalid_value"),
        ([line("a", background=True)], "invalid_value"),
    ],
)
def test_a_file_that_is_wrong_fails_the_batch_and_says_where(
    looping: TestClient, lines: list[bytes], code: str
) -> None:
    batch = ended(looping, begin(looping, *lines))
    assert batch["status"] == "failed" and batch["request_counts"]["total"] == 0
    [fault] = batch["errors"]["data"]
    assert fault["code"] == code
    assert fault["line"] == (len(lines) or None)


def test_a_batch_that_is_cancelled_keeps_its_answers(looping: TestClient, engine: FakeEngine) -> None:
    engine.go_on.clear()
    batch = begin(looping, *(line(str(number)) for number in range(50)))
    wait_until(lambda: len(engine.streams) > 0)
    assert looping.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    engine.go_on.set()
    batch = ended(looping, batch)
    assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
    counts = batch["request_counts"]
    assert len(lines_of(looping, batch["output_file_id"])) == counts["completed"] < counts["total"] == 50
    assert looping.post(f"/v1/batches/{batch['id']}/cancel").status_code == 409


def test_a_batch_that_waits_for_a_busy_server_can_be_cancelled(
    looping: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0
    monkeypatch.setattr("radixlm.runtime.server.stored.batch_runner.RETRY_S", 0.01)

    def refusing(*args: Any, **more: Any) -> Any:
        nonlocal num_refused
        num_refused += 1
        raise EngineOverloaded(1, 1, 1)

    monkeypatch.setattr(engine, "stream", refusing)
    batch = begin(looping, line("a"), line("b"))
    wait_until(lambda: num_refused > 2)
    assert looping.post(f"/v1/batches/{batch['id']}/cancel").json()["status"] == "cancelling"
    assert ended(looping, batch)["status"] == "cancelled"


def test_a_body_that_is_nested_too_deep_is_an_error_of_its_line() -> None:
    """It stopped the batches of all clients: the file was read in a thread, whose stack is less deep than the loop's.

    Which depths can be read but not written depends on the stacks, hence so many.
    """
    engine, (deep, others) = FakeEngine(), ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    engine.go_on.set()
    with TestClient(create_app(engine, api_keys=["sk-1", "sk-2"])) as client:  # type: ignore[arg-type]
        refused = set[str]()
        for depth in range(960, 1000, 2):
            client.headers = deep
            value = f"{'[' * depth}{']' * depth}".encode()
            asked = line("deep", metadata=0).replace(b'"metadata": 0', b'"metadata": ' + value)
            batch = ended(client, begin(client, line("flat"), asked))
            if batch["status"] == "completed":
                assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
                [failed] = lines_of(client, batch["error_file_id"])
                assert (failed["custom_id"], failed["response"]["status_code"]) == ("deep", 400)
                refused.add(failed["response"]["body"]["error"]["message"])
            else:
                [fault] = batch["errors"]["data"]
                assert (batch["status"], fault["code"], fault["line"]) == ("failed", "invalid_json_line", 2)
            client.headers = others
            assert ended(client, begin(client, line("a")))["status"] == "completed"
        assert any("nested too deep" in message for message in refused), refused


def test_a_body_that_was_read_but_cannot_be_written_is_an_error_of_its_line(
    looping: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nested deeper than Python's limit, whatever the stacks are."""

    def deeper(content: bytes | None, endpoint: str) -> Any:
        lines, faults = read(content, endpoint)
        value: list[Any] = []
        for _ in range(sys.getrecursionlimit() + 100):
            value = [value]
        lines[0].asked.body["metadata"] = value
        return lines, faults

    read = batch_runner.lines_of
    monkeypatch.setattr(batch_runner, "lines_of", deeper)
    batch = ended(looping, begin(looping, line("deep"), line("flat")))
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 2, "completed": 1, "failed": 1})
    [failed] = lines_of(looping, batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("deep", 400)
    assert "nested too deep" in failed["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("where", ["read", "answer", "answer, after StoreOff", "end"])
def test_an_unforeseen_error_fails_its_batch_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """It stopped the batches of all clients, also after a restart."""
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)
    read, answer, end = batch_runner.lines_of, Batches.answer, Batches.end
    num_off = 3 if "StoreOff" in where else 0

    def reading(content: bytes | None, endpoint: str) -> Any:
        if where == "read" and b"poison" in (content or b""):
            raise ZeroDivisionError("a secret")
        return read(content, endpoint)

    async def answering(self: Batches, batch_id: str, number: int, text: bytes, *, is_error: bool) -> bool:
        nonlocal num_off
        if where.startswith("answer") and b"poison" in text:
            if num_off:
                num_off -= 1
                raise StoreOff("the disk is full")
            raise ZeroDivisionError("a secret")
        return await answer(self, batch_id, number, text, is_error=is_error)

    async def ending(self: Batches, owner: bytes, batch_id: str, *args: Any) -> None:
        if where == "end" and batch_id == poisoned["id"]:
            raise ZeroDivisionError("a secret")
        await end(self, owner, batch_id, *args)

    monkeypatch.setattr(batch_runner, "lines_of", reading)
    monkeypatch.setattr(Batches, "answer", answering)
    monkeypatch.setattr(Batches, "end", ending)
    for _ in range(2):  # the second server has the store of the first
        engine = FakeEngine(store_directory=tmp_path)
        with TestClient(create_app(engine)) as client:  # type: ignore[arg-type]
            poisoned = begin(client, line("a"), line("poison"), line("b"))
            normal = begin(client, line("c"))  # waits while the engine is not answering
            engine.go_on.set()
            poisoned = ended(client, poisoned)
            assert poisoned["status"] == "failed" and poisoned["failed_at"]
            assert not poisoned["output_file_id"] and not poisoned["error_file_id"]
            [fault] = poisoned["errors"]["data"]
            assert (fault["code"], fault["line"]) == ("internal_error", None)
            assert "ZeroDivisionError" in fault["message"] and "log" in fault["message"]
            assert "secret" not in fault["message"]
            assert any(poisoned["id"] in record.getMessage() for record in caplog.records)
            assert ended(client, normal)["status"] == "completed"
            num_off = 3 if "StoreOff" in where else 0
    with sqlite3.connect(tmp_path / FILE) as sql:
        assert sql.execute("SELECT count(*) FROM batch_answers").fetchone() == (0,)
    sql.close()


def test_a_disk_that_failed_with_an_unforeseen_error_is_waited_for(
    looping: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch goes on, as the second error may come from the first."""
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)
    answer, num_failed = Batches.answer, 0

    async def failing(self: Batches, *args: Any, **more: Any) -> bool:
        nonlocal num_failed
        num_failed += 1
        if num_failed == 1:
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError  # in place of the cancellation
        if num_failed == 2:
            raise StoreOff("the disk is full")
        return await answer(self, *args, **more)

    monkeypatch.setattr(Batches, "answer", failing)
    batch = ended(looping, begin(looping, line("a"), line("b"), line("c")))
    assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 3)


def test_a_runner_that_is_cancelled_ends_though_a_line_fails_meanwhile(
    looping: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch stays open. A task group forgets the cancellation."""
    tasks, running = list[asyncio.Task[None]](), threading.Event()
    run = batch_runner.BatchRunner._run

    async def noted(self: batch_runner.BatchRunner) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        await run(self)

    async def failing(*args: Any, **more: Any) -> bool:
        try:
            running.set()
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    async def cancel() -> None:
        tasks[0].cancel()
        await asyncio.wait(tasks, timeout=5)

    monkeypatch.setattr(batch_runner.BatchRunner, "_run", noted)
    monkeypatch.setattr(Batches, "answer", failing)
    batch = begin(looping, line("a"))
    wait_until(running.is_set)
    assert looping.portal is not None
    looping.portal.call(cancel)
    assert tasks[0].cancelled()
    assert looping.get(f"/v1/batches/{batch['id']}").json()["status"] == "in_progress"


def test_each_line_of_a_batch_that_expires_is_in_one_of_its_files(
    looping: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the engine could not take in time are in the error file, as OpenAI has them."""
    stream = engine.stream
    monkeypatch.setattr("radixlm.runtime.server.stored.batch_runner.RETRY_S", 0.01)
    monkeypatch.setattr("radixlm.runtime.server.stored.batches.WINDOW_S", 6.0)

    def refusing(prompt: Any, params: Any, **more: Any) -> Any:
        if params.seed == 7:
            raise EngineOverloaded(1, 1, 1)
        return stream(prompt, params, **more)

    monkeypatch.setattr(engine, "stream", refusing)
    asked = [line("a"), line("b", temperature=-5), *(line(f"late-{number}", seed=7) for number in range(20))]
    batch = ended(looping, begin(looping, *asked))
    assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
    assert batch["request_counts"] == {"total": 22, "completed": 1, "failed": 21}
    assert [each["custom_id"] for each in lines_of(looping, batch["output_file_id"])] == ["a"]
    failed, *late = lines_of(looping, batch["error_file_id"])
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("b", 400)
    assert [each["custom_id"] for each in late] == [f"late-{number}" for number in range(20)]
    assert {(each["response"], each["error"]["code"]) for each in late} == {(None, "batch_expired")}


def test_a_batch_goes_on_once_the_disk_that_failed_is_back(
    looping: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All batches waited for the next one to be created."""
    monkeypatch.setattr("radixlm.runtime.server.stored.batch_runner.RETRY_S", 0.01)
    answer, num_failed = Batches.answer, 0

    async def failing(self: Batches, *args: Any, **more: Any) -> bool:
        nonlocal num_failed
        if num_failed < 3:
            num_failed += 1
            raise StoreOff("the disk is full")
        return await answer(self, *args, **more)

    monkeypatch.setattr(Batches, "answer", failing)
    batch = ended(looping, begin(looping, *(line(f"{number}") for number in range(20))))
    assert num_failed == 3 and batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}


def test_results_that_are_too_large_to_be_stored_end_the_batch(
    looping: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again for ever, and no later batch was begun."""
    monkeypatch.setattr("radixlm.runtime.server.stored.batches.MAX_OUTPUT_BYTES", 2000)
    large = begin(looping, *(line(f"{number}") for number in range(20)))
    small = begin(looping, line("small"))
    large = ended(looping, large)
    assert large["status"] == "failed" and large["failed_at"] and not large["output_file_id"]
    [fault] = large["errors"]["data"]
    assert fault["code"] == "output_too_large" and "fewer lines" in fault["message"]
    assert ended(looping, small)["status"] == "completed"


def test_a_batch_goes_on_after_a_restart_and_no_line_is_answered_twice(tmp_path: Path) -> None:
    lines = [line(str(number), max_tokens=40, ignore_eos=True, seed=number) for number in range(12)]
    with real_server(store=tmp_path) as server:
        server.model.step_s = 0.03
        batch = begin(server.client, *lines, base=server.url)
        wait_until(lambda: server.get(f"/v1/batches/{batch['id']}").json()["request_counts"]["completed"] >= 1)
        server.model.step_s = 1.0  # so that it is not complete before the server ends
    with real_server(store=tmp_path) as server:
        client, base = server.client, server.url
        assert client.get(f"{base}/v1/batches/{batch['id']}").json()["status"] == "in_progress"
        begin(
            client, line("next"), base=base
        )  # where there is no lifespan, the next batch goes on with the earlier one
        batch = ended(client, batch, base)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        answers = lines_of(client, batch["output_file_id"], base)
        assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(12)]
        for answer in answers[::4]:
            alone = client.post(base + CHAT, json=json.loads(lines[int(answer["custom_id"])])["body"]).json()
            assert answer["response"]["body"]["choices"] == alone["choices"]


def test_every_key_has_its_own_files_and_batches(engine: FakeEngine) -> None:
    own, others = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    with TestClient(create_app(engine, api_keys=["sk-1", "sk-2"]), headers=own) as client:  # type: ignore[arg-type]
        batch = ended(client, begin(client, line("a")))
        assert batch["status"] == "completed"
        namespace = engine.namespaces_asked[-1]
        client.post(CHAT, json=ASKED)
        assert engine.namespaces_asked[-1] == namespace, "it is the key's request"
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}"):
            assert client.get(path).status_code == 200
            assert client.get(path, headers=others).status_code == 404
        assert client.get("/v1/files", headers=others).json()["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert client.post("/v1/batches", json=body, headers=others).status_code == 404


def test_a_file_is_told_listed_read_and_deleted(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, response_bytes=300))  # type: ignore[arg-type]
    content = bytes(range(256))
    made = upload(client, content).json()
    assert (made["bytes"], made["filename"], made["purpose"]) == (256, "requests.jsonl", "batch")
    assert client.get(f"/v1/files/{made['id']}").json() == made
    assert client.get("/v1/files", params={"purpose": "batch"}).json()["data"] == [made]
    assert client.get("/v1/files", params={"purpose": "user_data"}).json()["data"] == []
    assert client.get(f"/v1/files/{made['id']}/content").content == content
    full = upload(client, content)
    assert (full.status_code, full.json()["error"]["code"]) == (413, "storage_full")
    assert client.delete(f"/v1/files/{made['id']}").json() == {"id": made["id"], "object": "file", "deleted": True}
    assert client.get(f"/v1/files/{made['id']}").status_code == 404
    assert upload(client, content, purpose="x").status_code == 400
    assert client.post("/v1/files", json={}).status_code == 400
    assert upload(client, content).status_code == 200


def test_the_number_of_files_is_limited_also_of_empty_ones(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixlm.runtime.server.stored.files.MAX_FILES", 2)
    client = TestClient(create_app(engine))  # type: ignore[arg-type]
    made = [upload(client) for _ in range(3)]
    assert [each.status_code for each in made] == [200, 200, 413]
    assert client.delete(f"/v1/files/{made[0].json()['id']}").status_code == 200
    assert upload(client).status_code == 200


@given(content=st.binary(max_size=60), name=st.text("ab.é ", min_size=1, max_size=8))
@settings(deadline=None)
def test_forms_are_read_as_they_were_written(content: bytes, name: str) -> None:
    head = f'Content-Disposition: form-data; name="file"; filename="{name}"'.encode("latin-1")
    body = b"--b0undary\r\n" + head + b"\r\nContent-Type: x/y\r\n\r\n" + content + b"\r\n--b0undary--\r\n"
    field = read_form("multipart/form-data; boundary=b0undary", body)["file"]
    assert field.content == content
    for cut in (body[:-6], b"", content):
        with pytest.raises(HTTPError):
            read_form("multipart/form-data; boundary=b0undary", cut)
    assert FormField(b"\xff").text == "\ufffd"


def test_what_expires_is_gone(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, response_ttl_s=0.05))  # type: ignore[arg-type]
    made = upload(client, b"{}").json()
    reply = client.post("/v1/responses", json={"input": "Hi"}).json()
    time.sleep(0.1)
    assert client.get(f"/v1/files/{made['id']}").status_code == 404
    response = client.get(f"/v1/responses/{reply['id']}")
    assert response.status_code == 404 and "has expired" in response.json()["error"]["message"]
