"""A response that goes on from another: only its own turn is computed, and it is what sending everything gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ...engine.test_generated_turns import PLAIN
from ...thought_templates import HYBRID, OPENED
from ..scripted import END_OF_TURN, Scripted

if TYPE_CHECKING:
    from ..conftest import FakeEngine

ASKED = {"temperature": 0, "max_output_tokens": 12}


def ask(client: TestClient, said: object, **body: object) -> Any:
    response = client.post("/v1/responses", json={"input": said, **ASKED, **body})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    *_, last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return last["response"]


def words(reply: Any) -> str:
    return "".join(part["text"] for item in reply["output"] for part in item.get("content", ()))


def num_computed(reply: Any) -> int:
    usage = reply["usage"]
    return int(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def plain() -> Iterator[Scripted]:
    with Scripted.serving(PLAIN) as served:
        yield served


@pytest.fixture(scope="module")
def engine_of_smollm2(smollm2_artifact: Path) -> Iterator[Engine]:
    with Engine(smollm2_artifact, max_num_seqs=2, kv_cache_bytes=64 << 20, num_threads=1) as engine:
        yield engine


@contextmanager
def prompts_of(engine: Engine) -> Iterator[list[tuple[int, ...]]]:
    """The ids of the prompts of all conversations that are asked meanwhile."""
    asked: list[tuple[int, ...]] = []
    stream_chat = engine.stream_chat

    def watched(*args: Any, **more: Any) -> Any:
        stream = stream_chat(*args, **more)
        asked.append(stream.prompt_token_ids)
        return stream

    engine.stream_chat = watched  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        del engine.stream_chat


@pytest.mark.parametrize("streams", [False, True])
def test_a_branch_computes_its_own_turn_alone_and_says_what_sending_everything_says(
    engine_of_smollm2: Engine, streams: bool
) -> None:
    """Two branches, three turns deep, with all logprobs: beside a client that sends everything, and computed cold."""
    client = TestClient(create_app(engine_of_smollm2))
    wish = {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    first = [{"role": "user", "content": f"There was a tree, and a bird in it: {streams}."}]
    root = ask(client, first, stream=streams)
    for then in ("Why did it sing?", "Where was the tree, and who was in it?"):
        history, parent = [*first, *root["output"]], root
        for turn in range(3):
            new = f"{then} Say {turn}."
            with prompts_of(engine_of_smollm2) as asked:
                reply = ask(client, new, previous_response_id=parent["id"], stream=streams, **wish)
            num_new = reply["usage"]["input_tokens"] - parent["usage"]["total_tokens"]
            assert num_computed(reply) <= num_new + 1, "the turn, and the last token of the reply before it"
            history += [{"role": "user", "content": new}]
            whole = ask(client, history, **wish)
            assert reply["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
            assert [item["content"] for item in reply["output"]] == [item["content"] for item in whole["output"]]
            history += reply["output"]
            parent = reply
        cold = engine_of_smollm2.generate(
            list(asked[0]), temperature=0, max_tokens=12, logprobs=3, cache_match="off", speculate=False
        )
        told = [entry["logprob"] for item in reply["output"] for entry in item["content"][0]["logprobs"]]
        assert told and told == [entry.logprob for entry in (cold.logprobs or ())][: len(told)]


def test_ids_are_those_that_were_generated_however_their_text_is_encoded(plain: Scripted) -> None:
    tokenizer = plain.engine.tokenizer
    oddly = [token_id for letter in "Hello there" for token_id in tokenizer.encode_inside(letter)]
    plain.runner.script.clear()
    plain.runner.script.extend([*oddly, END_OF_TURN])
    first = ask(plain.client, "Say it in letters")
    assert words(first) == "Hello there"
    plain.say("Yes.")
    with prompts_of(plain.engine) as asked:
        then = ask(plain.client, "Again", previous_response_id=first["id"], cache_match="exact")
    assert num_computed(then) == then["usage"]["input_tokens"] - (first["usage"]["total_tokens"] - 1)
    assert ",".join(map(str, oddly)) in ",".join(map(str, asked[0]))


@pytest.mark.parametrize(("template", "is_kept"), [(HYBRID, True), (OPENED, False)])
def test_reasoning_is_in_the_next_prompt_if_the_template_keeps_it(template: str, is_kept: bool) -> None:
    with Scripted.serving(template) as model:
        thought = "I think so.\n</think>\n\nYes."
        model.say(thought if template is OPENED else f"<think>\n{thought}")
        first = ask(model.client, "Is it?", max_output_tokens=100)
        assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
        model.say("No.")
        then = ask(model.client, "And that?", previous_response_id=first["id"])
        history = [{"role": "user", "content": "Is it?"}, *first["output"], {"role": "user", "content": "And that?"}]
        model.say("No.")
        whole = ask(model.client, history)
        assert then["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        if is_kept:
            assert num_computed(then) < 16


def test_calls_and_their_results_go_on_from_the_call() -> None:
    tool = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    with Scripted.serving(HYBRID) as model:
        model.say('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
        first = ask(model.client, "When is it?", tools=[tool], max_output_tokens=100)
        [call] = first["output"]
        model.say("It is noon.")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
        then = ask(model.client, [result], tools=[tool], previous_response_id=first["id"])
        assert words(then) == "It is noon." and num_computed(then) < 40
        other = ask(model.client, "Thanks", previous_response_id=then["id"])
        assert other["status"] in ("completed", "incomplete"), "with other tools all of it is rendered"


def test_instructions_are_of_one_response_alone(client: TestClient, engine: FakeEngine) -> None:
    first = ask(client, "Hi", instructions="Be brief.")
    ask(client, "Go on", previous_response_id=first["id"])
    asked = engine.asked[-1][0]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]  # type: ignore[attr-defined]
    ask(client, "Go on", previous_response_id=first["id"], instructions="Be long.")
    assert engine.asked[-1][0][0] == {"role": "system", "content": "Be long."}  # type: ignore[index]
    assert engine.options[-1].earlier is None, "it was fed with other instructions"
    ask(client, "Go on", previous_response_id=first["id"], instructions="Be brief.")
    assert engine.options[-1].earlier is not None


@pytest.mark.parametrize("how", ["unknown", "deleted", "not stored", "match off", "other salt", "forgotten"])
def test_a_response_that_is_not_there_is_404_and_says_why(client: TestClient, how: str) -> None:
    body = {"not stored": {"store": False}, "match off": {"cache_match": "off"}}.get(how, {})
    first = ask(client, "Hi", **body)
    assert first["store"] is (not body)
    response_id = "resp_0" if how == "unknown" else first["id"]
    if how == "deleted":
        assert client.delete(f"/v1/responses/{response_id}").json()["deleted"] is True
    if how == "forgotten":
        client.delete("/v1/cache")
    more = {"cache_salt": "of another"} if how == "other salt" else {}
    for stream in (False, True):
        asked = {"input": "Go on", "previous_response_id": response_id, "stream": stream, **more}
        response = client.post("/v1/responses", json=asked)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "previous_response_not_found")
        assert error["param"] == "previous_response_id" and response_id in error["message"]
        said = {"deleted": "was deleted", "forgotten": "was deleted with the cache"}.get(how, "store set to false")
        assert said in error["message"]
    assert client.get(f"/v1/responses/{response_id}", params=more).status_code == 404


def test_what_was_kept_is_told_as_it_was(client: TestClient) -> None:
    sent = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hm"},
    ]
    first = ask(client, sent, metadata={"a": "b"})
    assert client.get(f"/v1/responses/{first['id']}").json() == first
    listed = client.get(f"/v1/responses/{first['id']}/input_items", params={"order": "asc", "limit": 2}).json()
    assert [item["content"][0]["type"] for item in listed["data"]] == ["input_text", "output_text"]
    assert listed["has_more"] and listed["last_id"] == listed["data"][1]["id"]
    rest = client.get(f"/v1/responses/{first['id']}/input_items", params={"order": "asc", "after": listed["last_id"]})
    assert [item["content"][0]["text"] for item in rest.json()["data"]] == ["Hm"]
    for wrong in (
        {"limit": "0"},
        {"limit": "x"},
        {"limit": "0000000019999"},
        {"limit": "9" * 5000},
        {"order": "up"},
        {"after": "x"},
        {"some": "1"},
    ):
        assert client.get(f"/v1/responses/{first['id']}/input_items", params=wrong).status_code == 400
    cancelled = client.post(f"/v1/responses/{first['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "response_ended")
    assert client.post("/v1/responses/resp_none/cancel").status_code == 404


def test_every_key_has_its_own(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, api_keys=["sk-1", "sk-2"]))  # type: ignore[arg-type]
    own, others = ({"authorization": f"Bearer {key}"} for key in ("sk-1", "sk-2"))
    first = client.post("/v1/responses", json={"input": "Hi"}, headers=own).json()
    made = client.post("/v1/conversations", json={}, headers=own).json()
    for path in (f"/v1/responses/{first['id']}", f"/v1/conversations/{made['id']}"):
        assert client.get(path, headers=own).status_code == 200
        assert client.get(path, headers=others).status_code == client.delete(path, headers=others).status_code == 404
    asked = {"input": "Hi", "previous_response_id": first["id"]}
    assert client.post("/v1/responses", json=asked, headers=others).status_code == 404
    assert client.post("/v1/responses", json=asked, headers=own).status_code == 200


def test_an_operator_may_keep_nothing(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, keeps_responses=False))  # type: ignore[arg-type]
    first = ask(client, "Hi", store=True)
    assert first["store"] is False
    response = client.post("/v1/responses", json={"input": "Hi", "previous_response_id": first["id"]})
    assert response.status_code == 404 and "--no-keep-responses" in response.json()["error"]["message"]
    for path in ("/v1/responses/a", "/v1/conversations/a", "/v1/files", "/v1/batches"):
        assert client.get(path).status_code == 404


def test_a_conversation_has_what_was_put_in_and_what_was_said(client: TestClient, engine: FakeEngine) -> None:
    said = {"role": "user", "content": "I am Bo."}
    made = client.post("/v1/conversations", json={"items": [said], "metadata": {"topic": "a"}}).json()
    path = f"/v1/conversations/{made['id']}"
    reply = ask(client, "Who am I?", conversation=made["id"])
    assert reply["conversation"] == {"id": made["id"]}
    ask(client, "Sure?", conversation={"id": made["id"]})
    contents = [message["content"] for message in engine.asked[-1][0]]  # type: ignore[attr-defined]
    assert contents == ["I am Bo.", "Who am I?", "Hello wörld!", "Sure?"]
    assert engine.options[-1].earlier is not None
    items = client.get(f"{path}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "user", "assistant", "user", "assistant"]
    assert client.get(f"{path}/items/{items[1]['id']}").json() == items[1]
    client.delete(f"{path}/items/{items[0]['id']}")
    client.post(f"{path}/items", json={"items": [{"role": "user", "content": "I am Al."}]})
    ask(client, "And now?", conversation=made["id"])
    contents = [message["content"] for message in engine.asked[-1][0]]  # type: ignore[attr-defined]
    assert contents[0] == "Who am I?" and contents[-2:] == ["I am Al.", "And now?"]
    assert engine.options[-1].earlier is None, "it was fed with the item that was taken out"
    assert client.post(path, json={"metadata": {"topic": "b"}}).json()["metadata"] == {"topic": "b"}
    assert client.get(f"{path}/items/{items[0]['id']}").status_code == 404
    assert client.delete(path).json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert client.post("/v1/responses", json={"input": "Hi", "conversation": made["id"]}).status_code == 404
    assert client.get(f"/v1/responses/{reply['id']}").status_code == 200, "its responses stay"


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runtime.server.real_server import real_engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient
engine, _ = real_engine(store=Path(sys.argv[1]))
client = TestClient(create_app(engine))
first = client.post("/v1/responses", json={"input": "once there was", "max_output_tokens": 4, "seed": 1}).json()
print(first["id"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_no_response(tmp_path: Path) -> None:
    from ..real_server import real_engine

    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    first = done.stdout.strip()
    engine, _ = real_engine(store=tmp_path)
    with engine:
        client = TestClient(create_app(engine))
        assert client.get(f"/v1/responses/{first}").json()["id"] == first
        then = ask(client, "in the tree", previous_response_id=first)
        assert then["previous_response_id"] == first
        client.delete("/v1/cache")
        assert client.get(f"/v1/responses/{first}").status_code == 404
