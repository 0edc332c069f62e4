"""What explain-cache says of conversations and of requests, with a model and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from radixlm.cli.explain_cache.playback import ReplyTo, Turn, read_turns
from radixlm.cli.main import cli
from radixlm.runtime.server.openai.chat_request import ChatRequest

SYSTEM = {"role": "system", "content": "You are there to answer what is asked."}
QUESTION = {"role": "user", "content": "What is the use of a tree?"}
THANKS = {"role": "user", "content": "And then?"}
HEIN = [ord(letter) + 3 for letter in "hein"]  # of the tiny tokenizer; it would make `he` and `in` of them


def message(text: str, *token_ids: int) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"token_ids": token_ids} if token_ids else {})}


class Explain:
    """The command on the tiny model."""

    def __init__(self, runner: CliRunner, artifact: Path) -> None:
        self._runner, self._arguments = runner, ["explain-cache", str(artifact), "--turns", "-", "--kv-cache-gb", "0.1"]

    def __call__(self, turns: object, *options: str) -> list[Any]:
        result = self._run(turns, "--json", *options)
        assert result.exit_code == 0, result.output
        explained: list[Any] = json.loads(result.output)
        return explained

    def text(self, turns: object, *options: str) -> str:
        result = self._run(turns, *options)
        assert result.exit_code == 0, result.output
        return result.output

    def error(self, turns: object, *options: str) -> str:
        result = self._run(turns, *options)
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        return result.output

    def _run(self, turns: object, *options: str) -> Any:
        data = turns if isinstance(turns, bytes) else json.dumps(turns)
        return self._runner.invoke(cli, [*self._arguments, *options], input=data)


@pytest.fixture
def explain(runner: CliRunner, tiny_artifact: Path) -> Explain:
    return Explain(runner, tiny_artifact)


def kinds(turns: Sequence[Any]) -> list[str]:
    return [turn["why_not_more"]["kind"] for turn in turns]


def test_a_conversation_without_replies_goes_on_with_the_models_own(explain: Explain) -> None:
    first, second, third = explain([SYSTEM, QUESTION, THANKS, THANKS], "--max-tokens", "8")
    assert (first["turn"], first["num_cached_tokens"]) == (1, 0)
    assert second["num_cached_tokens"] >= first["num_prompt_tokens"]
    assert third["num_cached_tokens"] >= second["num_prompt_tokens"]
    assert first["why_not_more"]["wanted_text"].startswith("<|im_start|>s")
    assert first["message"] in explain.text([SYSTEM, QUESTION, THANKS, THANKS], "--max-tokens", "8")


@pytest.mark.parametrize("options", [(), ("--no-generate",)])
def test_a_reply_in_other_ids_is_reused_by_text_and_explained_without(explain: Explain, options: Any) -> None:
    turns = [QUESTION, message("hein", *HEIN, 2), THANKS]
    first, second = explain(turns, *options)
    assert second["tokens_by_kind"]["text"] == 4
    assert second["num_cached_tokens"] == first["num_prompt_tokens"] + 4
    assert second["why_not_more"]["kind"] == "unseen"
    first, second = explain(turns, "--match", "exact", *options)
    why = second["why_not_more"]
    assert (why["kind"], why["position"]) == ("retokenized", first["num_prompt_tokens"])
    assert (why["cached_ids"], why["cached_text"]) == (HEIN, "hein")
    assert why["wanted_text"].startswith("hein<|im_end|>")
    assert 'match "text" reuses it' in second["message"]


def test_a_reply_that_is_known_by_its_text_is_taken_in_its_usual_ids(explain: Explain) -> None:
    first, second = explain([QUESTION, message("the end"), THANKS], "--no-generate")
    assert set(second["tokens_by_kind"]) <= {"exact", "seam"}
    assert second["num_cached_tokens"] > first["num_prompt_tokens"]


def test_an_edited_history_ends_the_reuse_at_the_edit(explain: Explain) -> None:
    edited = {"role": "user", "content": "What is the use of a leaf?"}
    requests = [
        {"messages": [QUESTION], "reply": "the end"},
        {"messages": [edited, message("the end"), THANKS]},
    ]
    text = explain.text(requests, "--no-generate")
    line = text.splitlines()[-1]
    assert "the cache has" in line and "tree?" in line and "leaf?" in line


def test_a_reply_is_found_in_the_messages_of_a_later_request(explain: Explain) -> None:
    requests = [{"messages": [QUESTION]}, {"messages": [QUESTION, message("hein", *HEIN, 2), THANKS]}]
    assert explain(requests, "--no-generate")[1]["tokens_by_kind"]["text"] == 4


def test_namespaces_are_named_here_and_only_here(explain: Explain) -> None:
    requests = [
        {"messages": [QUESTION], "reply": "the end"},
        {"messages": [QUESTION], "reply": "the end", "cache_salt": "a"},
        {"messages": [QUESTION], "reply": "the end", "cache_salt": "a"},
        {"messages": [QUESTION], "prompt_cache_key": "a"},
    ]
    turns = explain(requests, "--no-generate")
    assert kinds(turns) == ["unseen", "namespace", "complete", "namespace"]
    assert "another namespace" in turns[1]["message"]


def test_requests_have_their_own_policy_and_prompts(explain: Explain) -> None:
    requests = [
        {"prompt": "the end is ", "reply": HEIN},
        {"prompt": "the end is hein and", "cache_match": "exact"},
        {"prompt": "the end is hein and", "max_tokens": 2},
        {"prompt": [5, 6, 7]},
    ]
    turns = explain(requests)
    assert [turn["num_prompt_tokens"] for turn in turns][-1] == 3
    assert turns[1]["num_cached_tokens"] < turns[2]["num_cached_tokens"]


def test_with_match_off_every_turn_says_that_nothing_is_reused(explain: Explain) -> None:
    turns = explain([QUESTION, message("the end"), THANKS], "--no-generate", "--match", "off")
    assert kinds(turns) == ["off", "off"] and [turn["num_cached_tokens"] for turn in turns] == [0, 0]
    assert 'match is "off"' in turns[0]["message"]
    requests = [{"messages": [QUESTION]}, {"messages": [QUESTION], "cache_match": "off"}, {"messages": [QUESTION]}]
    assert kinds(explain(requests, "--no-generate")) == ["unseen", "off", "complete"]


@pytest.mark.parametrize(("reply", "num_said"), [("hein", 3), (" hein", 3), ([*HEIN, 2], 5), ([35, *HEIN, 2], 5)])
def test_a_known_reply_has_the_space_that_its_prompt_loses(explain: Explain, reply: Any, num_said: int) -> None:
    requests = [{"prompt": "the end is ", "reply": reply}, {"prompt": "the end is hein and"}]
    first, second = explain(requests, "--no-generate")
    assert (first["num_prompt_tokens"], second["num_cached_tokens"]) == (7, 7 + num_said)
    first, _ = explain(requests, "--no-generate", "--strip-suffix", "never")
    assert first["num_prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        (b"", "JSON"),
        (b"\xff", "JSON"),
        ([], "the file has no turns"),
        ({}, "Expected `array`"),
        ([SYSTEM], "the file has no turns"),
        ([{"role": "user"}], "content"),
        ([QUESTION, {"role": "robot", "content": "Hi"}], "robot"),
        ([{"messages": [QUESTION], "temprature": 1}], "temprature"),
        ([{"messages": "Hi"}], "messages"),
        ([{"messages": [7]}], "messages"),
        ([QUESTION, message("a"), {"role": "system"}], "content"),
        ([{"text": "Hi"}], "prompt"),
        ([{"prompt": "Hi", "reply": 7}], "Expected `str | array | null`"),
        ([QUESTION, message("hein", 9999)], "token id 9999"),
        ([{"prompt": "Hi", "cache_salt": "x" * 2000}], "1024"),
        ([{"prompt": ""}], "empty"),
    ],
)
def test_what_are_no_turns_is_one_line(explain: Explain, turns: object, says: str) -> None:
    assert says in explain.error(turns, "--no-generate")


def test_a_conversation_has_a_turn_before_each_reply_and_after_each_question_without() -> None:
    turns = read_turns(json.dumps([SYSTEM, QUESTION, THANKS, message("a"), message("b"), THANKS]).encode())
    assert turns == [
        Turn({"messages": [SYSTEM, QUESTION]}, None),
        Turn({"messages": [SYSTEM, QUESTION, ReplyTo(0), THANKS]}, "a"),
        Turn({"messages": [SYSTEM, QUESTION, ReplyTo(0), THANKS, message("a")]}, "b"),
        Turn({"messages": [SYSTEM, QUESTION, ReplyTo(0), THANKS, message("a"), message("b"), THANKS]}, None),
    ]
    request = turns[1].request(["said", "", "", ""])
    assert isinstance(request, ChatRequest)
    said, asked = request.messages[2:]
    assert (said.role, said.content, asked.content) == ("assistant", "said", "And then?")
