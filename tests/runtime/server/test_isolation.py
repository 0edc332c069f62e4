"""One real model behind the server: no client reuses or sees what another key or salt computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

ALICE, BOB = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
TALK = [
    {"role": "system", "content": "You are there to answer what is asked, and in the end to be of use to all of us."},
    {"role": "user", "content": "What is the use of a tree that is all roots?"},
]


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with Engine(tiny_artifact, max_num_seqs=4, kv_cache_bytes=64 << 20, num_threads=1, idle_work=False) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> TestClient:
    client = TestClient(create_app(engine, api_keys=("alice", "bob")))
    for headers in (ALICE, BOB):
        client.delete("/v1/cache", headers=headers)
    return client


def ask(client: TestClient, headers: dict[str, str], **fields: object) -> Any:
    body = {"messages": TALK, "max_tokens": 8, "seed": 1, **fields}
    response = client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def cached(reply: Any) -> int:
    number: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_a_key_reuses_its_own_and_no_others(client: TestClient) -> None:
    first = ask(client, ALICE)
    assert cached(first) == 0
    assert cached(ask(client, ALICE)) == first["usage"]["prompt_tokens"] - 1
    of_bob = ask(client, BOB)
    assert cached(of_bob) == 0
    assert of_bob["usage"]["prompt_tokens_details"]["why_not_more"]["kind"] == "unseen"
    assert of_bob["choices"] == first["choices"]


@pytest.mark.parametrize("is_ignored", [False, True], ids=["as by default", "ignored"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("chat/completions", {"messages": TALK, "max_tokens": 2}),
        ("completions", {"prompt": "".join(each["content"] for each in TALK), "max_tokens": 2}),
        ("responses", {"input": TALK, "max_output_tokens": 2}),
        ("messages", {"messages": TALK[1:], "system": TALK[0]["content"], "max_tokens": 2}),
    ],
)
def test_a_second_prompt_cache_key_finds_the_firsts_prefix_only_where_keys_are_ignored(
    engine: Engine, path: str, asked: dict[str, object], is_ignored: bool
) -> None:
    """Codex has one for each conversation, and computed its 9,800 tokens of instructions for each anew."""
    client = TestClient(create_app(engine, api_keys=("alice", "bob"), ignores_prompt_cache_key=is_ignored))

    def num_cached(headers: dict[str, str], **fields: str) -> int:
        response = client.post(f"/v1/{path}", json={**asked, **fields}, headers=headers)
        assert response.status_code == 200, response.text
        listed = response.headers.get("x-radixlm-ignored", "").split(", ")
        assert ("prompt_cache_key" in listed) is (is_ignored and "prompt_cache_key" in fields)
        usage = response.json()["usage"]
        return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])

    one, two, nobodys = (f"{name} {path} {is_ignored}" for name in ("one", "two", "nobody's"))
    for headers in (ALICE, BOB):
        client.delete("/v1/cache", headers=headers)
    assert num_cached(ALICE, prompt_cache_key=one) == 0
    assert num_cached(ALICE, prompt_cache_key=one) > 16
    assert (num_cached(ALICE, prompt_cache_key=two) > 16) is is_ignored
    assert (num_cached(ALICE) > 16) is is_ignored
    assert num_cached(ALICE, prompt_cache_key=one, cache_salt=one) == 0
    assert num_cached(BOB, prompt_cache_key=one) == 0
    shown = client.get("/v1/cache", headers=ALICE, params={"prompt_cache_key": nobodys}).json()
    assert bool(shown["num_tokens"]) is is_ignored


@pytest.mark.parametrize(
    ("path", "asked", "details_of"),
    [
        ("chat/completions", {"messages": TALK}, "prompt_tokens_details"),
        ("completions", {"prompt": TALK[1]["content"]}, "prompt_tokens_details"),
        ("responses", {"input": TALK[1]["content"]}, "input_tokens_details"),
        ("messages", {"messages": TALK}, "prompt_tokens_details"),
    ],
)
def test_a_request_whose_match_is_off_neither_sees_nor_changes_its_own_namespace(
    client: TestClient, path: str, asked: dict[str, object], details_of: str
) -> None:
    def details(**fields: object) -> Any:
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        response = client.post(f"/v1/{path}", json={**asked, limit: 8, **fields}, headers=ALICE)
        assert response.status_code == 200, response.text
        return response.json()["usage"][details_of]

    def tree() -> Any:
        picture = client.get("/v1/cache", headers=ALICE).json()
        return [(run["num_tokens"], run["num_pages"]) for run in picture["runs"]], len(picture["requests"])

    details()
    before = tree()
    off = details(cache_match="off")
    assert (off["cached_tokens"], off["cached_tokens_by_kind"], off["cache_match"]) == (0, {}, None)
    why = off["why_not_more"]
    assert (why["kind"], why["wanted_ids"], why["cached_ids"]) == ("off", [], []) and '"off"' in why["message"]
    assert tree() == before
    assert details()["cached_tokens"] > 0


@pytest.mark.parametrize("name", ["cache_salt", "prompt_cache_key"])
def test_a_salt_parts_a_key_in_two(client: TestClient, name: str) -> None:
    assert cached(ask(client, ALICE)) == 0
    for value in ("", "a", "b"):
        assert cached(ask(client, ALICE, **{name: value})) == 0
        assert cached(ask(client, ALICE, **{name: value})) > 0
    other = {"cache_salt": "prompt_cache_key", "prompt_cache_key": "cache_salt"}[name]
    assert cached(ask(client, ALICE, **{other: "a"})) == 0
    for fields in ({}, {name: ""}, {name: "a"}, {name: "b"}, {other: "a"}):
        client.delete("/v1/cache", params=fields, headers=ALICE)


def test_everybody_sees_and_clears_their_own_tree(client: TestClient) -> None:
    ask(client, ALICE)
    ask(client, BOB)
    ask(client, BOB, messages=[TALK[0], {"role": "user", "content": "And what is the use of a leaf?"}])
    trees = [client.get("/v1/cache", headers=headers).json() for headers in (ALICE, BOB)]
    assert 0 < trees[0]["num_tokens"] < trees[1]["num_tokens"]
    assert trees[0]["runs"][0]["begins"].startswith("<|im_start|>s")
    cleared = client.delete("/v1/cache", headers=BOB).json()
    assert (cleared["num_freed_pages"], cleared["num_kept_pages"]) == (trees[1]["num_pages"], 0)
    assert client.get("/v1/cache", headers=BOB).json()["num_runs"] == 0
    left = client.get("/v1/cache", headers=ALICE).json()
    assert [run["num_tokens"] for run in left["runs"]] == [run["num_tokens"] for run in trees[0]["runs"]]
    assert cached(ask(client, BOB)) == 0 and cached(ask(client, ALICE)) > 0


def test_the_ids_that_were_used_give_the_same_reply_cold(client: TestClient) -> None:
    first = ask(client, ALICE, return_token_ids=True)
    warm = ask(client, ALICE, return_token_ids=True)
    assert warm["prompt_token_ids"] == first["prompt_token_ids"] and cached(warm) > 0
    body = {"prompt": warm["prompt_token_ids"], "max_tokens": 8, "seed": 1, "return_token_ids": True}
    cold = client.post("/v1/completions", json=body, headers=BOB).json()
    assert cached(cold) == 0
    assert cold["choices"][0]["token_ids"] == warm["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]


def test_a_reply_in_a_later_prompt_is_reused_by_text_but_not_by_ids(client: TestClient) -> None:
    body = {"messages": TALK, "max_tokens": 12, "seed": 3, "temperature": 5.0, "logit_bias": bias_to_letters()}
    for policy, namespace in (("text", "a"), ("exact", "b")):
        reply = ask(client, ALICE, **body, cache_salt=namespace, return_token_ids=True)
        talk = [*TALK, reply["choices"][0]["message"], {"role": "user", "content": "Is it?"}]
        turn = ask(client, ALICE, messages=talk, cache_match=policy, cache_salt=namespace, return_token_ids=True)
        details = turn["usage"]["prompt_tokens_details"]
        num_before = len(reply["prompt_token_ids"])
        if policy == "text":
            assert details["cached_tokens"] == num_before + 11, "all but the last sampled token"
            assert details["cache_match"] == "text" and details["cached_tokens_by_kind"]["text"] > 0
            used = turn["prompt_token_ids"][num_before : num_before + 11]
            assert used == reply["choices"][0]["token_ids"][:11]
        else:
            assert details["cached_tokens"] < num_before + 11 and details["cache_match"] in ("exact", "seam")
            assert details["why_not_more"]["kind"] == "retokenized"
            assert details["why_not_more"]["cached_text"] and details["why_not_more"]["wanted_text"]


def bias_to_letters() -> dict[str, float]:
    """Only ids of single letters, of which the tokenizer would make `he` and `in`."""
    return {str(3 + ord(letter)): 100.0 for letter in "hein"}
