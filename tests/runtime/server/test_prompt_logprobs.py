"""Logprobs of prompts over HTTP: echoed as OpenAI's were, and in vLLM's field, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from .real_server import real_engine
from .scripted import events

TEXT = "once there was a time"
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine, _ = real_engine(num_pages=2000, context_length=30_000)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> TestClient:
    return TestClient(create_app(engine))


def ask(client: TestClient, **body: object) -> Any:
    return client.post("/v1/completions", json={"prompt": TEXT, **GREEDY, **body})


def choice(client: TestClient, **body: object) -> Any:
    response = ask(client, **body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice


@pytest.fixture(scope="module")
def told(engine: Engine) -> Any:
    """What the engine says of the same prompt, in Python."""
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3)
    found = engine.generate(TEXT, params).prompt_logprobs
    assert found is not None and found.is_complete and len(found) > 5
    return found


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_an_echo_has_the_logprobs_of_the_prompt_and_of_what_follows(
    client: TestClient, engine: Engine, told: Any, max_tokens: int
) -> None:
    echoed = choice(client, echo=True, logprobs=3, max_tokens=max_tokens)
    plain = choice(client, logprobs=3, max_tokens=max_tokens)
    logprobs = echoed["logprobs"]
    num_prompt = len(told)
    assert echoed["text"] == TEXT + plain["text"]
    assert {len(each) for each in logprobs.values()} == {num_prompt + max_tokens}
    assert logprobs["token_logprobs"][:num_prompt] == [None, *(each.logprob for each in told[1:])]
    assert logprobs["token_logprobs"][num_prompt:] == plain["logprobs"]["token_logprobs"]
    assert logprobs["top_logprobs"][0] is None
    assert sorted(logprobs["top_logprobs"][1].values(), reverse=True) == [value for _, value in told[1].top]
    assert "prompt_logprobs" not in echoed
    assert echoed["finish_reason"] == plain["finish_reason"] == "length"


def test_tokens_of_an_echo_begin_where_they_stand_in_the_text(client: TestClient) -> None:
    """The space that SentencePiece puts before the first word is none of the text."""
    echoed = choice(client, echo=True, logprobs=0, max_tokens=0)
    tokens, offsets = echoed["logprobs"]["tokens"], echoed["logprobs"]["text_offset"]
    text = echoed["text"]
    ends = [*offsets[1:], len(text)]
    spelled = [text[start:end] for start, end in zip(offsets, ends, strict=True)]
    assert (tokens[0], spelled[0]) == (" ", "")
    assert "".join(spelled) == text
    assert all(token.endswith(part) for token, part in zip(tokens, spelled, strict=True))


def test_the_field_of_vllm_has_each_place_by_id(client: TestClient, engine: Engine, told: Any) -> None:
    found = choice(client, prompt_logprobs=2, max_tokens=1)
    by_id = found["prompt_logprobs"]
    assert len(by_id) == len(told) and by_id[0] is None and found["logprobs"] is None
    for place, logprob in zip(by_id[1:], told[1:], strict=True):
        own = place[str(logprob.token_id)]
        assert (own["logprob"], own["rank"]) == (logprob.logprob, logprob.rank)
        assert own["decoded_token"] == engine.tokenizer.token_bytes(logprob.token_id).decode(errors="replace")
        assert {str(token_id) for token_id, _ in logprob.top[:2]} | {str(logprob.token_id)} == set(place)
        assert [place[str(token_id)]["rank"] for token_id, _ in logprob.top[:2]] == [1, 2]
    assert all(len(place) == 1 for place in choice(client, prompt_logprobs=0)["prompt_logprobs"][1:])


def test_both_fields_have_as_many_as_each_asks_for(client: TestClient) -> None:
    found = choice(client, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1)
    assert {len(place) for place in found["logprobs"]["top_logprobs"][1:]} == {1}
    assert {len(place) for place in found["prompt_logprobs"][1:]} <= {4, 5}


def test_ids_and_several_prompts_are_scored_each(client: TestClient, engine: Engine, told: Any) -> None:
    """As lm-evaluation-harness asks."""
    ids = list(told.token_ids)
    body = {"prompt": [ids, ids[:3]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    first, second = ask(client, **body).json()["choices"]
    assert first["logprobs"]["token_logprobs"][:-1] == [None, *(each.logprob for each in told[1:])]
    assert second["logprobs"]["token_logprobs"][1:-1] == [each.logprob for each in told[1:3]]
    assert len(second["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 2, "logprobs": 1}])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_joins_to_the_whole(client: TestClient, fields: dict[str, Any], max_tokens: int) -> None:
    whole = choice(client, max_tokens=max_tokens, **fields)
    streamed = events(ask(client, max_tokens=max_tokens, stream=True, **fields))
    choices = [chunk["choices"][0] for chunk in streamed]
    assert "".join(each["text"] for each in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [each["logprobs"][name] for each in choices if each["logprobs"] is not None]
        assert [value for part in parts for value in part] == whole["logprobs"][name]
    given = [each["prompt_logprobs"] for each in choices if "prompt_logprobs" in each]
    assert given == ([whole["prompt_logprobs"]] if "prompt_logprobs" in fields else [])
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_them_beside_its_choices(client: TestClient, stream: bool) -> None:
    messages = [{"role": "user", "content": TEXT}]
    body = {"messages": messages, "prompt_logprobs": 1, "max_tokens": 2, "return_token_ids": True, **GREEDY}
    response = client.post("/v1/chat/completions", json=body | {"stream": stream})
    chunks = events(response) if stream else [response.json()]
    [by_id] = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    [ids] = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert by_id[0] is None and len(by_id) == len(ids)
    assert all(str(token_id) in place for token_id, place in zip(ids[1:], by_id[1:], strict=True))


def test_the_usage_says_that_all_was_computed(client: TestClient) -> None:
    for _ in range(2):
        usage = ask(client, prompt_logprobs=0, max_tokens=0).json()["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (0, 0)
    assert ask(client, max_tokens=0).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 5


def test_each_of_several_replies_has_its_prompts(client: TestClient, told: Any) -> None:
    choices = ask(client, n=2, echo=True, logprobs=0, max_tokens=1).json()["choices"]
    for each in choices:
        assert each["logprobs"]["token_logprobs"][1:-1] == [logprob.logprob for logprob in told[1:]]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1"),
        ({"prompt": [5] * 7000, "prompt_logprobs": 20}, "prompt_logprobs", "147000 logprobs"),
        ({"prompt": [[5] * 3000] * 3, "prompt_logprobs": 20}, "prompt_logprobs", "189000 logprobs"),
        ({"prompt": [5] * 3000, "n": 3, "echo": True, "logprobs": 20}, "prompt_logprobs", "189000 logprobs"),
        ({"echo": True, "logprobs": 1, "strip_suffix": True}, "strip_suffix", "remove strip_suffix"),
    ],
)
def test_what_is_too_much_is_400(client: TestClient, engine: Engine, body: Any, param: str, says: str) -> None:
    response = ask(client, **{"max_tokens": 0, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and says in error["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_dialects_refuse_the_field_by_name(client: TestClient, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2} if "messages" in path else {"input": "a"}
    response = client.post(path, json=body | {"prompt_logprobs": 1})
    assert response.status_code == 400 and "prompt_logprobs" in response.json()["error"]["message"]


def test_no_request_is_left_running(client: TestClient, engine: Engine) -> None:
    json.loads(client.get("/health").content)
    engine.check()


def test_the_chunk_of_the_prompt_counts_no_token_of_the_reply(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = ask(client, echo=True, logprobs=1, max_tokens=3, stream=True, stream_options=options)
    *chunks, _ = events(response)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3]
