"""The `anthropic` package: messages whole and streamed, tools, counts, keys, errors and what it tries again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import pytest

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, OTHER_KEY, QUESTION

HI = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 16, "extra_body": {"temperature": 0}}
WEATHER = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def anthropic_client(server: ServeProcess) -> Iterator[anthropic.Anthropic]:
    """What fails is to be seen: nothing is tried again."""
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
    server.wait_until_idle()


def num_prompt(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_a_message_and_its_usage(anthropic_client: anthropic.Anthropic, said: str) -> None:
    message = anthropic_client.messages.create(**GREEDY)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    [block] = message.content
    assert (block.type, block.text) == ("text", said)
    assert message.stop_reason in ("end_turn", "max_tokens") and message.stop_sequence is None
    again = anthropic_client.messages.create(**GREEDY).usage
    assert again.cache_read_input_tokens == num_prompt(again) - 1 == num_prompt(message.usage) - 1


def test_a_streamed_message_is_the_whole_one(anthropic_client: anthropic.Anthropic) -> None:
    whole = anthropic_client.messages.create(**GREEDY)
    with anthropic_client.messages.stream(**GREEDY) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text == streamed.content[0].text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert num_prompt(streamed.usage) == num_prompt(whole.usage)


def test_the_raw_events_come_in_their_order(anthropic_client: anthropic.Anthropic) -> None:
    events = list(anthropic_client.messages.create(**GREEDY, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}, "the package keeps pings to itself"
    assert num_prompt(events[0].message.usage) > 10 and events[-2].usage.output_tokens > 3


def test_the_model_is_listed(anthropic_client: anthropic.Anthropic) -> None:
    [model] = anthropic_client.models.list()
    assert (model.id, model.type, model.lifecycle) == (MODEL, "model", "active") and model.max_input_tokens > 1000
    assert anthropic_client.models.retrieve(MODEL) == model


def test_tokens_are_counted(anthropic_client: anthropic.Anthropic) -> None:
    counted = anthropic_client.messages.count_tokens(model=MODEL, messages=HI, system="Be brief.", tools=[WEATHER])
    message = anthropic_client.messages.create(**GREEDY, system="Be brief.", tools=[WEATHER])
    assert counted.input_tokens == num_prompt(message.usage)


def test_a_tool_is_called_and_answered(anthropic_client: anthropic.Anthropic) -> None:
    hello = [{"role": "user", "content": "Hello"}]  # to which the model has a short call
    asked = {**GREEDY, "messages": hello, "max_tokens": 100, "tools": [WEATHER]}
    with anthropic_client.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
        inputs = [event.snapshot for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and inputs
    calls = [block for block in message.content if block.type == "tool_use"]
    assert {call.name for call in calls} == {"get_weather"} and all(type(c.input["sunny"]) is bool for c in calls)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."} for call in calls]
    history = [*hello, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    after = anthropic_client.messages.create(**{**asked, "messages": history})
    assert after.usage.cache_read_input_tokens > 0 and num_prompt(after.usage) > num_prompt(message.usage)


def test_what_is_ignored_is_told(anthropic_client: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    raw = anthropic_client.messages.with_raw_response.create(
        **GREEDY, system=system, metadata={"user_id": "me"}, thinking=thinking
    )
    assert raw.headers["x-radixlm-ignored"] == "metadata, system.cache_control, thinking.budget_tokens"
    assert raw.parse().content


def test_the_beta_client_is_served(anthropic_client: anthropic.Anthropic, said: str) -> None:
    message = anthropic_client.beta.messages.create(**GREEDY, betas=["interleaved-thinking-2025-05-14"])
    assert message.content[0].text == said


def test_stop_sequences(anthropic_client: anthropic.Anthropic, said: str) -> None:
    message = anthropic_client.messages.create(**GREEDY, stop_sequences=["no such", said[5:9]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", said[5:9])
    assert message.content[0].text == said[: said.index(said[5:9])]


def test_a_key_is_taken_in_either_header_and_is_one_namespace(server: ServeProcess, said: str) -> None:
    system = "You like to be brief, and to answer in verse. " * 8
    with anthropic.Anthropic(base_url=server.url, api_key=OTHER_KEY, max_retries=0) as by_key:
        by_key.messages.create(**GREEDY, system=system)
    with anthropic.Anthropic(base_url=server.url, auth_token=OTHER_KEY, max_retries=0) as by_token:
        usage = by_token.messages.create(**GREEDY, system=system).usage
    assert usage.cache_read_input_tokens == num_prompt(usage) - 1
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as other:
        assert other.messages.create(**GREEDY, system=system).usage.cache_read_input_tokens < 32


def test_every_error_has_its_type(anthropic_client: anthropic.Anthropic, server: ServeProcess) -> None:
    wrong = anthropic.Anthropic(base_url=server.url, api_key="sk-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
        wrong.messages.create(**GREEDY)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        anthropic_client.messages.create(**{**GREEDY, "model": "claude"})
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="image blocks cannot be read"):
        anthropic_client.messages.create(**{**GREEDY, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: "):
        anthropic_client.messages.create(**{**GREEDY, "messages": [{"role": "user", "content": "word " * 20_000}]})


def test_the_package_waits_as_it_is_told_and_tries_again_while_the_queue_is_full(tmp_path: Path) -> None:
    options = ("--model-id", MODEL, "--kv-cache-gb", "0.1", "--max-num-seqs", "1", "--max-queue", "0")
    with ServeProcess(*options, log=tmp_path / "log") as server:
        once = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
        long = {**GREEDY, "max_tokens": 400, "extra_body": {"temperature": 1, "ignore_eos": True}}
        with once, once.messages.stream(**long) as running:
            next(iter(running))
            with pytest.raises(anthropic.RateLimitError, match="rate_limit_error") as refused:
                once.messages.create(**GREEDY)
            assert int(refused.value.response.headers["retry-after"]) >= 1
        server.wait_until_idle()
        client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=10, timeout=60)
        with client, ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(lambda _: client.messages.create(**GREEDY).content[0].text, range(3)))
        assert len(set(texts)) == 1


def test_a_server_that_goes_ends_a_stream_with_an_error(tmp_path: Path) -> None:
    options = ("--model-id", MODEL, "--kv-cache-gb", "0.1", "--shutdown-timeout", "0")
    with ServeProcess(*options, log=tmp_path / "log") as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=60)
        asked = {**GREEDY, "max_tokens": 2000, "extra_body": {"temperature": 1, "seed": 1, "ignore_eos": True}}
        deadline = time.monotonic() + 60
        with client, pytest.raises(anthropic.APIError), client.messages.stream(**asked) as stream:
            next(iter(stream))
            server.terminate()
            for _ in stream:
                assert time.monotonic() < deadline
