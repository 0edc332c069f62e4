"""Several replies to one request: `n`, lists of prompts, and what becomes of the others when one fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from radixlm.runtime.engine.completion import CacheMatch, Completion, Delta, KVPruning, Timings, Usage
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import EmptyPrompt, StepFailed
from radixlm.runtime.server import create_app
from radixlm.runtime.server.choices import Choices, Waker, params_of_choices
from radixlm.runtime.server.openai.reply_parts import usage_of
from radixlm.runtime.server.request_log import RequestRecord
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def post(client: TestClient, **body: object) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return client.post(path, json=body)


def chunks(client: TestClient, **body: object) -> list[Any]:
    *lines, done = [
        line.removeprefix("data: ") for line in post(client, stream=True, **body).text.split("\n\n") if line
    ]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("body", [{**CHAT, "n": 3}, {"prompt": "Once", "n": 3}, {"prompt": ["a", "b", "c"]}])
def test_every_choice_has_its_index_and_its_text(client: TestClient, body: dict[str, object]) -> None:
    choices = post(client, **body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == "Hello wörld!"


@pytest.mark.parametrize("body", [{**CHAT, "n": 3}, {"prompt": "Once", "n": 3}, {"prompt": [[1], [2], [3]]}])
def test_the_chunks_of_each_choice_join_to_its_text(client: TestClient, body: dict[str, object]) -> None:
    texts, reasons = ["", "", ""], ([], [], [])
    for chunk in chunks(client, **body):
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == ["Hello wörld!"] * 3
    for of_one in reasons:
        assert of_one[-1] == "stop" and not any(of_one[:-1])


def test_every_choice_of_a_chat_begins_with_its_role(client: TestClient) -> None:
    begun = set()
    for chunk in chunks(client, **CHAT, n=3):
        [choice] = chunk["choices"]
        if choice["index"] not in begun:
            assert choice["delta"] == {"role": "assistant", "content": ""}
        begun.add(choice["index"])
    assert begun == {0, 1, 2}


def test_choices_are_asked_for_prompt_by_prompt_each_with_a_seed_of_its_own(
    client: TestClient, engine: FakeEngine
) -> None:
    post(client, prompt=["a", "b"], n=2, seed=7)
    assert [(prompt, params.seed) for prompt, params in engine.asked] == [("a", 7), ("a", 8), ("b", 7), ("b", 8)]


def test_without_a_seed_none_is_made_up() -> None:
    assert params_of_choices(SamplingParams(), 2) == [SamplingParams()] * 2


def test_the_seed_after_the_last_is_the_first() -> None:
    assert [params.seed for params in params_of_choices(SamplingParams(seed=2**64 - 1), 2)] == [2**64 - 1, 0]


def test_usage_counts_a_prompt_once_and_every_reply(client: TestClient) -> None:
    usage = post(client, prompt=["a", "b"], n=2).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (6, 12, 18)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    assert usage["prompt_tokens_details"]["cached_tokens_by_kind"] == {"exact": 4}
    streamed = chunks(client, prompt=["a", "b"], n=2, stream_options={"include_usage": True})[-1]
    assert (streamed["choices"], streamed["usage"]) == ([], usage)


def test_what_the_first_choice_computed_is_not_called_cached_because_others_reused_it() -> None:
    def completion(num_cached: int, kind: str | None) -> Completion:
        by_kind = {kind: num_cached} if kind else {}
        usage, match = Usage(10, 4, num_cached, by_kind), CacheMatch(kind, num_cached, None)
        return Completion("", (), (), None, "stop", usage, Timings(None, None, 0.0), match)

    parts = [completion(9, "exact"), completion(0, None), completion(6, "text"), completion(9, "exact")]
    usage = usage_of(parts, 2, tells_cached_text=True)
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 16)
    assert usage.prompt_tokens_details.cached_tokens_by_kind == {"text": 6}
    assert usage.prompt_tokens_details.cache_match == "text"


def test_the_prompt_of_which_least_was_loaded_labels_them_all() -> None:
    def completion(pruning: KVPruning | None) -> Completion:
        usage, match = Usage(10, 4, 8, {"exact": 8}, {"exact": 8}, pruning), CacheMatch("exact", 8, None)
        return Completion("", (), (), None, "stop", usage, Timings(None, None, 0.0), match)

    exact, some, few = completion(None), completion(KVPruning(0.5, 0.05)), completion(KVPruning(0.25, 0.21))
    details = usage_of([some, exact, few], tells_cached_text=True).prompt_tokens_details
    assert (details.kv_loaded, details.kv_dropped_mass) == (0.25, 0.21)
    details = usage_of([exact, exact], tells_cached_text=True).prompt_tokens_details
    assert b"kv_" not in msgspec.json.encode(details), "what is exact needs no label"


def test_all_choices_are_admitted_or_none(client: TestClient, engine: FakeEngine) -> None:
    engine.go_on.clear()
    submit = engine.stream

    def submit_two(*args: Any, **kwargs: Any) -> Any:
        if len(engine.streams) == 2:
            raise EmptyPrompt("no third one")
        return submit(*args, **kwargs)

    engine.stream = submit_two  # type: ignore[method-assign]
    response = post(client, prompt="Once", n=3)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no third one")
    assert all(stream.cancelled.wait(10) for stream in engine.streams)


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_choice_fails_the_request_does_and_the_others_are_cancelled(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    submit = engine.stream

    def fail_the_second(*args: Any, **kwargs: Any) -> Any:
        engine.words = ["Hello", StepFailed("the step failed") if engine.streams else " wörld", "!"]
        return submit(*args, **kwargs)

    engine.num_free_words = 2
    engine.go_on.clear()
    engine.stream = fail_the_second  # type: ignore[method-assign]
    response = post(client, prompt="Once", n=2, stream=stream)
    assert "the step failed" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 500)
    assert all(stream.cancelled.wait(10) for stream in engine.streams)


@pytest.mark.parametrize("prompt", ["Once", [0, 1]])
def test_an_echoed_prompt_comes_before_the_reply(client: TestClient, prompt: object) -> None:
    text = "Once" if prompt == "Once" else "Hello wörld"
    choices = post(client, prompt=prompt, echo=True, n=2).json()["choices"]
    assert [choice["text"] for choice in choices] == [text + "Hello wörld!"] * 2
    joined = ["", ""]
    for chunk in chunks(client, prompt=prompt, echo=True, n=2):
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == [text + "Hello wörld!"] * 2


@pytest.fixture(scope="module")
def real(tiny_artifact: Path) -> Iterator[TestClient]:
    with Engine(tiny_artifact, max_num_seqs=8, kv_cache_bytes=32 << 20, num_threads=1) as engine:
        yield TestClient(create_app(engine))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_choice_is_what_its_seed_alone_gives(real: TestClient, path: str) -> None:
    asked = CHAT if "chat" in path else {"prompt": "Once upon a time"}
    wishes = {**asked, "max_tokens": 6, "temperature": 1.0, "return_token_ids": True, "cache_match": "exact"}
    together = real.post(path, json={**wishes, "n": 3, "seed": 5}).json()
    alone = [real.post(path, json={**wishes, "seed": seed}).json()["choices"][0] for seed in (5, 6, 7)]
    ids = [choice["token_ids"] for choice in together["choices"]]
    assert ids == [choice["token_ids"] for choice in alone]
    assert len(set(map(tuple, ids))) > 1
    assert together["usage"]["completion_tokens"] == sum(map(len, ids))


def test_a_list_of_prompts_gives_what_each_alone_does_and_streams_the_same(real: TestClient) -> None:
    prompts = ["Once upon a time", "The use of a tree is", "What"]
    wishes = {"max_tokens": 5, "temperature": 0, "return_token_ids": True, "cache_match": "exact"}
    together = real.post("/v1/completions", json={**wishes, "prompt": prompts}).json()["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        [alone] = real.post("/v1/completions", json={**wishes, "prompt": prompt}).json()["choices"]
        assert (choice["token_ids"], choice["text"]) == (alone["token_ids"], alone["text"])
        assert choice["prompt_token_ids"] == alone["prompt_token_ids"]
    ids: list[list[int]] = [[], [], []]
    for chunk in chunks(real, prompt=prompts, **wishes):
        [choice] = chunk["choices"]
        ids[choice["index"]] += choice["token_ids"]
    assert ids == [choice["token_ids"] for choice in together]


def test_all_choices_are_left_at_once() -> None:
    """Each cancelled one was waited for by itself, a second at most: 128 of them held a task for two minutes."""

    asked: list[Leaving] = []

    class Leaving:
        """It ends once all were cancelled."""

        is_cancelled = False

        def cancel(self) -> None:
            self.is_cancelled = True

        def skip_to_end(self) -> None: ...

        def poll(self) -> Delta | None:
            return Delta("", (), finish_reason="cancelled") if all(each.is_cancelled for each in asked) else None

        def result(self) -> str:
            return "cancelled"

    def ask(*, on_ready: Callable[[], None]) -> Any:
        asked.append(Leaving())
        return asked[-1]

    async def leave() -> list[Any]:
        record = RequestRecord("", 0.0)
        async with Choices(Waker(), record) as choices:
            for _ in range(5):
                choices.submit(ask)
        return record.completions

    assert asyncio.run(leave()) == ["cancelled"] * 5
