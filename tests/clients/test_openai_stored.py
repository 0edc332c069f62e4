"""The `openai` package on what a server keeps: responses, conversations, files and batches."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import openai
import pytest

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, OPTIONS, QUESTION

GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 16}
CHAT = "/v1/chat/completions"


def last_response(client: openai.OpenAI, streams: bool, **asked: object) -> openai.types.responses.Response:
    if not streams:
        return client.responses.create(**GREEDY, **asked)
    *_, last = client.responses.create(**GREEDY, **asked, stream=True)
    return last.response


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_goes_on_from_another(client: openai.OpenAI, streams: bool) -> None:
    first = last_response(client, streams, input=f"{QUESTION}, I am Bo {streams}.")
    then = last_response(client, streams, input="Who am I?", previous_response_id=first.id)
    assert then.previous_response_id == first.id and then.store is True
    computed = then.usage.input_tokens - then.usage.input_tokens_details.cached_tokens
    assert computed <= then.usage.input_tokens - first.usage.total_tokens + 1
    said = [{"role": "user", "content": f"{QUESTION}, I am Bo {streams}."}, *first.output]
    whole = client.responses.create(**GREEDY, input=[*said, {"role": "user", "content": "Who am I?"}])
    assert whole.output_text == then.output_text and whole.usage.input_tokens == then.usage.input_tokens
    assert client.responses.retrieve(then.id).output_text == then.output_text
    [item] = client.responses.input_items.list(then.id)
    assert item.role == "user" and item.content[0].text == "Who am I?"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="was deleted") as caught:
        client.responses.create(**GREEDY, input="And now?", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert client.responses.create(**GREEDY, input="And now?", previous_response_id=then.id).output_text


def test_a_response_that_is_not_kept_cannot_be_continued(client: openai.OpenAI) -> None:
    reply = client.responses.create(**GREEDY, input=QUESTION, store=False)
    assert reply.store is False
    with pytest.raises(openai.NotFoundError, match="store set to false"):
        client.responses.create(**GREEDY, input="Go on", previous_response_id=reply.id)


def test_a_response_in_the_background_is_polled_continued_and_cancelled(client: openai.OpenAI) -> None:
    asked = {"input": f"{QUESTION} in the background", "background": True}
    response = client.responses.create(**GREEDY, **asked)
    assert response.status == "in_progress" and response.background is True
    deadline = time.monotonic() + 60
    while response.status == "in_progress":
        assert time.monotonic() < deadline, "the response does not end"
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    alone = client.responses.create(**GREEDY, input=asked["input"])
    assert response.output_text == alone.output_text and response.status == alone.status
    assert client.responses.create(**GREEDY, input="Go on", previous_response_id=response.id).output_text
    endless = {"max_output_tokens": 4096, "extra_body": {"ignore_eos": True}}
    long = client.responses.create(**(GREEDY | endless), **asked)
    assert client.responses.cancel(long.id).status == "cancelled" == client.responses.retrieve(long.id).status
    assert client.responses.cancel(response.id) == response, "one that has ended stays as it is"
    with pytest.raises(openai.BadRequestError, match="not streamed"):
        client.responses.create(**GREEDY, **asked, stream=True)


def test_a_conversation_is_gone_on_with(client: openai.OpenAI) -> None:
    made = client.conversations.create(items=[{"role": "user", "content": "I am Bo."}], metadata={"topic": "a"})
    assert client.conversations.retrieve(made.id).metadata == {"topic": "a"}
    first = client.responses.create(**GREEDY, input="Who am I?", conversation=made.id)
    then = client.responses.create(**GREEDY, input="Sure?", conversation=made.id)
    assert then.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert client.conversations.items.retrieve(items[1].id, conversation_id=made.id).content[0].text == "Who am I?"
    client.conversations.items.create(made.id, items=[{"role": "user", "content": "Hm."}])
    client.conversations.items.delete(items[0].id, conversation_id=made.id)
    assert len(list(client.conversations.items.list(made.id))) == 5
    assert client.conversations.update(made.id, metadata={"topic": "b"}).metadata == {"topic": "b"}
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def requests_of(count: int, max_tokens: int = 8) -> bytes:
    body = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0}
    lines = (
        {"custom_id": str(at), "method": "POST", "url": CHAT, "body": {**body, "messages": message_of(at)}}
        for at in range(count)
    )
    return b"\n".join(json.dumps(line).encode() for line in lines)


def message_of(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{QUESTION} {number}"}]


def ended(client: openai.OpenAI, batch_id: str) -> openai.types.Batch:
    deadline = time.monotonic() + 120
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline, "the batch does not end"
        time.sleep(0.1)
    return batch


def test_a_batch_is_answered(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", requests_of(3)), purpose="batch")
    assert client.files.retrieve(file.id).bytes == file.bytes == len(requests_of(3))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    batch = ended(client, batch.id)
    assert batch.status == "completed" and batch.request_counts.completed == 3 and batch.metadata == {"a": "b"}
    answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    asked = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    alone = client.chat.completions.create(messages=message_of(1), **asked)
    assert answers[1]["response"]["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
    assert batch.id in [each.id for each in client.batches.list(limit=1)]
    assert {each.id for each in client.files.list()} >= {file.id, batch.output_file_id}
    assert client.files.delete(file.id).deleted


def test_a_killed_server_goes_on_with_responses_and_batches(tmp_path: Path) -> None:
    options = (*OPTIONS, "--store", str(tmp_path / "store"))
    with ServeProcess(*options, log=tmp_path / "first", api_key=KEY) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60)
        first = client.responses.create(**GREEDY, input=QUESTION)
        file = client.files.create(file=("in.jsonl", requests_of(40, 64)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while client.batches.retrieve(batch.id).request_counts.completed == 0:
            time.sleep(0.02)
        server._process.send_signal(signal.SIGKILL)
        server._process.wait()
    with ServeProcess(*options, log=tmp_path / "second", api_key=KEY) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60)
        then = client.responses.create(**GREEDY, input="Go on.", previous_response_id=first.id)
        assert then.output_text and then.previous_response_id == first.id
        batch = ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 40
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(40)]
