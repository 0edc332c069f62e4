"""Replies in the form that a client asks for, by a model that would say anything."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..fake_artifact import fake_artifact
from ..fake_model import FakeModel

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tokenizers" / "smollm2.json.gz"
VOCAB_SIZE = 49152
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["good", "bad"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 9},
        "word": {"type": "string", "maxLength": 6},
    },
    "required": ["mood", "score", "word"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    artifact = fake_artifact(
        gzip.decompress(TOKENIZER.read_bytes()).decode(),
        TEMPLATE,
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=2,
        context_length=512,
    )
    with Engine(
        artifact,  # type: ignore[arg-type]
        max_num_seqs=8,
        open_runner=lambda _, num_pages, __: FakeModel(num_pages, VOCAB_SIZE),
    ) as engine:
        engine.grammars.answer_limit_s = 60.0  # what is found out is not to depend on how busy the machine is
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app(engine)) as client:
        yield client


def ask(client: TestClient, **body: object) -> Any:
    messages = [{"role": "user", "content": "How is it?"}]
    return client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 200, **body})


def said(client: TestClient, **body: object) -> str:
    [choice] = ask(client, **body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


def test_a_reply_keeps_to_a_strict_schema(client: TestClient) -> None:
    replies = {said(client, response_format=STRICT, seed=seed, temperature=1.0) for seed in range(2)}
    assert len(replies) > 1
    for reply in replies:
        jsonschema.validate(json.loads(reply), SCHEMA)


def test_a_stream_and_several_choices_keep_to_it_each(client: TestClient) -> None:
    response = ask(client, response_format=STRICT, seed=3, temperature=1.0, n=2, stream=True)
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    texts = {0: "", 1: ""}
    for line in lines:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    whole = [
        c["message"]["content"]
        for c in ask(client, response_format=STRICT, seed=3, n=2, temperature=1.0).json()["choices"]
    ]
    assert whole == list(texts.values()) and len(set(whole)) > 1
    for text in whole:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_json_object_is_one_also_where_the_reply_is_cut(client: TestClient) -> None:
    [choice] = ask(client, response_format={"type": "json_object"}, seed=1, max_tokens=30).json()["choices"]
    text = choice["message"]["content"]
    assert text.startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_text_is_anything(client: TestClient) -> None:
    plain = ask(client, seed=5, max_tokens=8).json()["choices"][0]["message"]
    assert ask(client, seed=5, max_tokens=8, response_format={"type": "text"}).json()["choices"][0]["message"] == plain


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no", "may be"]}, "yes|no|may be"),
        ({"guided_grammar": 'root ::= "<" [0-9]+ ">"'}, r"<\d+>"),
        ({"guided_json": {"enum": [1, 2, 3]}}, "[123]"),
        ({"guided_json": '{"enum": [1, 2, 3]}'}, "[123]"),
        ({"structured_outputs": {"regex": "[xyz]{5}"}}, "[xyz]{5}"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "[ab]"),
        ({"structured_outputs": {"grammar": 'start: "q" /[0-9]/'}}, "q[0-9]"),
        ({"structured_outputs": {"json": {"const": "c"}}}, '"c"'),
    ],
)
def test_vllms_fields_are_understood_by_both_endpoints(
    client: TestClient, fields: dict[str, object], pattern: str
) -> None:
    assert re.fullmatch(pattern, said(client, **fields))
    response = client.post("/v1/completions", json={"prompt": "It is", "max_tokens": 100, **fields})
    assert re.fullmatch(pattern, response.json()["choices"][0]["text"])


ODD = {"type": "odd"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": ODD}}},
            "odd",
        ),
        ({"guided_regex": "(a"}, "regular expression cannot be used"),
        ({"guided_regex": "a" * 200_000}, "at most 131072"),
        ({"guided_grammar": "nonsense"}, "grammar cannot be used"),
        ({"guided_json": "{"}, "JSON schema is not JSON"),
        ({"guided_json": {"type": "integer", "multipleOf": 1000003}}, "0.25 s"),
        ({"guided_choice": []}, "0 choices"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "name"),
        ({"response_format": {"type": "yaml"}}, "yaml"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"structured_outputs": {"xml": "a"}}, "xml"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(client: TestClient, fields: dict[str, object], words: str) -> None:
    response = ask(client, **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"] and error["type"] == "invalid_request_error"
    assert client.post("/v1/completions", json={"prompt": "It is", "max_tokens": 2}).status_code == 200


def test_what_a_grammar_makes_impossible_ends_that_stream_with_an_error(client: TestClient) -> None:
    body = {"guided_regex": r"(\w+\s?){1,500}", "max_tokens": 400, "temperature": 1.0, "logit_bias": {"2": -100}}
    response = ask(client, **body, stream=True)
    last = [line for line in response.text.split("\n\n") if line][-1]
    assert "cannot follow its grammar" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_a_bomb_stops_neither_the_event_loop_nor_the_engine(engine: Engine) -> None:
    """While one grammar is tried for a quarter of a second, others are answered: their replies come first."""
    bomb = {"type": "integer", "multipleOf": 1000033}
    order: list[str] = []
    started = threading.Event()
    compile = engine.grammars.compile_on_loop

    def compile_late(grammar: Any, **options: Any) -> Any:
        started.set()
        return compile(grammar, **options)

    async def both() -> None:
        from httpx import ASGITransport, AsyncClient

        transport = ASGITransport(create_app(engine))  # type: ignore[arg-type]
        async with AsyncClient(transport=transport, base_url="http://test") as client:

            async def hostile() -> None:
                response = await client.post("/v1/completions", json={"prompt": "a", "guided_json": bomb})
                assert response.status_code == 400
                order.append("bomb")

            async def friendly() -> None:
                while not started.is_set():
                    await asyncio.sleep(0.001)
                response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
                assert response.status_code == 200
                order.append("reply")

            await asyncio.gather(hostile(), friendly())

    engine.grammars.compile_on_loop = compile_late  # type: ignore[method-assign]
    try:
        asyncio.run(both())
    finally:
        engine.grammars.compile_on_loop = compile  # type: ignore[method-assign]
    assert order == ["reply", "bomb"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_trials_are_taken_by_key_or_by_address_whatever_the_salt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A client makes namespaces as it likes with its salts, and took more than its turn."""
    clients: list[str] = []
    compile = engine.grammars.compile_on_loop

    def compile_for(grammar: Any, *, client: str) -> Any:
        clients.append(client)
        return compile(grammar, client=client)

    monkeypatch.setattr(engine.grammars, "compile_on_loop", compile_for)
    form = {"type": "json_schema", "name": "n", "schema": {"const": 1}}
    wish = {"text": {"format": form}} if path == "/v1/responses" else {"guided_json": {"const": 1}}
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"input": "a"} if path == "/v1/responses" else body
    for keys, address in (((), "10.0.0.1"), ((), "10.0.0.2"), (("k1", "k2"), "10.0.0.3")):
        headers = {"Authorization": f"Bearer {keys[-1]}"} if keys else {}
        client = TestClient(create_app(engine, api_keys=keys), client=(address, 50000), headers=headers)
        for salt in ("a", "b"):
            response = client.post(path, json={**body, **wish, "cache_salt": salt})
            assert response.status_code == 200, response.text
    assert clients == ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2 + ["k2"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_keeps_to_its_text_format(client: TestClient, stream: bool) -> None:
    wish = {"type": "json_schema", "name": "mood", "schema": SCHEMA, "strict": True}
    body = {"input": "How is it?", "text": {"format": wish}, "seed": 3, "temperature": 1.0, "stream": stream}
    answer = client.post("/v1/responses", json={**body, "max_output_tokens": 200})
    response = answer.json() if not stream else json.loads(answer.text.split("data: ")[-1])["response"]
    assert response["status"] == "completed"
    jsonschema.validate(json.loads(response["output"][0]["content"][0]["text"]), SCHEMA)
    assert response["text"]["format"] == {**wish, "description": None}


def test_a_response_that_cannot_keep_to_its_format_is_400(client: TestClient) -> None:
    wish = {"type": "json_schema", "name": "mood", "schema": {"type": "strung"}, "strict": True}
    answer = client.post("/v1/responses", json={"input": "How is it?", "text": {"format": wish}})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {"guided_regex": "("}, "guided_regex"),
        ("completions", {"guided_json": {"type": "no such"}}, "guided_json"),
        (
            "chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": ODD}}},
            "response_format",
        ),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": ODD}}},
            "text.format.schema",
        ),
    ],
)
def test_the_field_of_a_grammar_that_is_wrong_is_named(
    client: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    response = client.post(f"/v1/{path}", json=body | ({"input": "Hi"} if path == "responses" else asked))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_name_ends_where_its_line_does(client: TestClient) -> None:
    """Python's `$` matches before a line end as well."""
    named = {"type": "json_schema", "json_schema": {"name": "a\n", "schema": {}}}
    tool = {"type": "function", "function": {"name": "f\n"}}
    for body in ({"response_format": named}, {"tools": [tool]}):
        response = ask(client, **body)
        assert response.status_code == 400 and "regex" in response.json()["error"]["message"]
