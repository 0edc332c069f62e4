"""Plain completions in OpenAI's shape, whole and streamed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from .scripted import events

if TYPE_CHECKING:
    from .conftest import FakeEngine


def ask(client: TestClient, **body: object) -> Any:
    return client.post("/v1/completions", json={"prompt": "Once", **body})


def test_a_whole_completion_has_text_finish_reason_and_usage(client: TestClient) -> None:
    reply = ask(client).json()
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    whole = {"text": "Hello wörld!", "finish_reason": "stop", "logprobs": None, "index": 0, "stop_reason": None}
    assert reply["choices"] == [whole]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_a_stream_joins_to_the_whole_completion(client: TestClient) -> None:
    response = ask(client, stream=True, stream_options={"include_usage": True})
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    *chunks, last = [json.loads(line) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello wörld!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 6


def test_ids_of_prompt_and_completion_are_returned_if_asked(client: TestClient) -> None:
    choice = ask(client, return_token_ids=True).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([1, 2, 3], [0, 1, 2])
    lines = [line.removeprefix("data: ") for line in ask(client, stream=True, return_token_ids=True).text.split("\n\n")]
    choices = [json.loads(line)["choices"][0] for line in lines if line and line != "[DONE]"]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == [0, 1, 2]
    assert [choice.get("prompt_token_ids") for choice in choices] == [None, None, [1, 2, 3]]


@pytest.mark.parametrize(("prompt", "fed"), [("Once", "Once"), (["Once"], "Once"), ([5, 6], [5, 6]), ([5], [5])])
def test_a_prompt_is_a_text_or_token_ids(client: TestClient, engine: FakeEngine, prompt: object, fed: object) -> None:
    assert ask(client, prompt=prompt).status_code == 200
    assert engine.asked[0][0] == fed


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": ["a", 5]}, "prompt mixes"),
        ({"prompt": [[5], "a"]}, "prompt mixes"),
        ({"prompt": ["a", ""]}, "the prompt has no tokens"),
        ({"prompt": [[5], []]}, "the prompt has no tokens"),
        ({"prompt": ["a"] * 65, "n": 2}, "65 prompts with n=2 are 130 replies"),
        ({"prompt": [2**31]}, "2147483647"),
        ({"n": 0}, "n is 0"),
        ({"n": 3, "best_of": 5}, "best_of is 5"),
        ({"suffix": "!"}, "suffix is not supported"),
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"prompt": {}}, "prompt"),
        ({"logprobs": 99}, "logprobs is 99"),
        ({"stop": ["a"] * 99}, "stop has 99 entries"),
    ],
)
def test_bad_input_is_400(client: TestClient, body: dict[str, object], says: str) -> None:
    response = ask(client, **body)
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_a_completion_has_openais_16_tokens_unless_asked(client: TestClient, engine: FakeEngine) -> None:
    ask(client)
    ask(client, max_tokens=None)
    assert [params.max_tokens for _, params in engine.asked] == [16, None]


def test_logprobs_say_where_in_the_text_each_token_begins(client: TestClient) -> None:
    logprobs = ask(client, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hello", " wörld", "!"]
    assert logprobs["text_offset"] == [0, 5, 11]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0] == {"Hello": -0.5}


def test_logprobs_tell_parts_of_characters_apart(client: TestClient, engine: FakeEngine) -> None:
    engine.words, engine.bytes_of_tokens = ["", "🎉", "!"], [b"\xf0\x9f", b"\x8e\x89", b"!"]
    logprobs = ask(client, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x8e\\x89", "!"]
    assert logprobs["top_logprobs"][1] == {"bytes:\\x8e\\x89": -0.5}
    assert logprobs["text_offset"] == [0, 0, 1]


def test_no_alternative_is_lost_where_several_tokens_spell_the_same(client: TestClient, engine: FakeEngine) -> None:
    """SentencePiece has bytes beside letters, and rows of logits that spell nothing: the last of a name was left."""
    engine.bytes_of_tokens = [b"A", b" A", b"A", b"", b"", b"\x41"]
    engine.top_logprobs = [(1, -0.1), (0, -0.5), (2, -1.0), (3, -1.5), (4, -2.0), (5, -2.5)]
    logprobs = ask(client, logprobs=5, max_tokens=3).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["A", " A", "A"]
    names = {" A": -0.1, "A": -0.5, "token_id:2": -1.0, "": -1.5, "token_id:4": -2.0, "token_id:5": -2.5}
    assert logprobs["top_logprobs"][0] == names
    assert logprobs["top_logprobs"][2] == {" A": -0.1, "token_id:0": -0.5, "A": -1.0, **dict(list(names.items())[3:])}


def test_streamed_offsets_are_those_of_the_whole(client: TestClient) -> None:
    lines = [line.removeprefix("data: ") for line in ask(client, stream=True, logprobs=0).text.split("\n\n")]
    choices = [json.loads(line)["choices"][0] for line in lines if line and line != "[DONE]"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 5, 11]


def test_streamed_offsets_do_not_wait_for_text_that_is_held_back(client: TestClient, engine: FakeEngine) -> None:
    """Text that may become a stop string comes later than its tokens, which were all said to begin where it was cut."""
    engine.words = ["", "", "Hello wörld"]
    engine.bytes_of_tokens = [b"Hello", b" w\xc3", b"\xb6rld"]
    lines = [line.removeprefix("data: ") for line in ask(client, stream=True, logprobs=0).text.split("\n\n")]
    choices = [json.loads(line)["choices"][0] for line in lines if line and line != "[DONE]"]
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 5, 7]
    assert ask(client, logprobs=0).json()["choices"][0]["logprobs"]["text_offset"] == offsets


def test_each_chunk_has_the_usage_so_far_if_asked(client: TestClient) -> None:
    """guidellm and the benches of vLLM and SGLang ask for it."""
    asked = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(ask(client, stream=True, prompt=["a", "b"], stream_options=asked))
    told: dict[int, list[dict[str, int]]] = {0: [], 1: []}
    for chunk in chunks:
        told[chunk["choices"][0]["index"]].append(chunk["usage"])
    so_far = [{"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n} for n in (1, 2, 3)]
    assert told == {0: so_far, 1: so_far}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)


def test_chunks_have_no_usage_without_that_of_the_end(client: TestClient) -> None:
    chunks = events(ask(client, stream=True, stream_options={"continuous_usage_stats": True}))
    assert not any("usage" in chunk for chunk in chunks)
