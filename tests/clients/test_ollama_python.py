"""Ollama's own Python package, which Home Assistant's integration uses too, and LangChain's on top of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaLLM
from pydantic import BaseModel

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, QUESTION

GREEDY = {"temperature": 0, "num_predict": 16}
HEADERS = {"Authorization": f"Bearer {KEY}"}
USER = {"role": "user", "content": QUESTION}


class City(BaseModel):
    """The name of a city."""

    size: bool


def get_weather(sunny: bool) -> str:
    """Tell the weather.

    Args:
        sunny: whether the sun shines
    """
    return f"{sunny}"


@pytest.fixture
def client(server: ServeProcess) -> Iterator[ollama.Client]:
    yield ollama.Client(server.url, headers=HEADERS, timeout=60)
    server.wait_until_idle()


@pytest.fixture
def chat(server: ServeProcess) -> ChatOllama:
    return ChatOllama(
        model=MODEL,
        base_url=server.url,
        client_kwargs={"headers": HEADERS, "timeout": 60},
        temperature=0,
        num_predict=16,
        validate_model_on_init=True,
    )


def test_it_lists_shows_and_finds_models(client: ollama.Client, server: ServeProcess) -> None:
    [listed] = client.list().models
    assert listed.model == f"{MODEL}:latest" and listed.size and listed.details.family == "llama"
    assert listed.details.parameter_size.endswith("M") and listed.details.quantization_level
    shown = client.show(MODEL)
    assert shown.modelinfo["llama.context_length"] > 1000
    assert shown.capabilities == ["completion", "tools"]
    [loaded] = client.ps().models
    assert loaded.model == listed.model and loaded.context_length == shown.modelinfo["llama.context_length"]


def test_it_chats_streams_and_counts(client: ollama.Client, said: str) -> None:
    reply = client.chat(MODEL, [USER], options=GREEDY, keep_alive="5m")
    assert reply.message.content == said and reply.done_reason in ("stop", "length")
    assert reply.prompt_eval_count > 10 and reply.eval_count > 3
    assert reply.total_duration >= reply.load_duration + reply.eval_duration > 0
    parts = list(client.chat(f"{MODEL}:latest", [USER], options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == said
    assert parts[-1].done and parts[-1].eval_count == reply.eval_count and not parts[0].done
    history = [USER, reply.message, {"role": "user", "content": "And of Spain?"}]
    assert client.chat(MODEL, history, options=GREEDY).message.content


def test_it_chats_from_an_event_loop(server: ServeProcess, said: str) -> None:
    async def ask() -> str:
        client = ollama.AsyncClient(server.url, headers=HEADERS, timeout=60)
        stream = await client.chat(MODEL, [USER], options=GREEDY, stream=True)
        return "".join([part.message.content async for part in stream])

    assert asyncio.run(ask()) == said


def test_it_generates(client: ollama.Client, said: str) -> None:
    assert client.generate(MODEL, QUESTION, options=GREEDY).response == said
    streamed = client.generate(MODEL, QUESTION, options=GREEDY, stream=True)
    assert "".join(part.response for part in streamed) == said
    assert client.generate(MODEL, "The capital of France is", raw=True, options=GREEDY).response
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"


def test_it_has_replies_of_a_format(client: ollama.Client) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Is Paris a city?"}]}
    options = {"temperature": 0, "num_predict": 60}
    reply = client.chat(**asked, format=City.model_json_schema(), options=options)
    assert isinstance(City.model_validate_json(reply.message.content), City)


def test_it_offers_functions_and_sends_results_back(client: ollama.Client) -> None:
    """A small model calls no tool unless it has seen one called: the history has a call."""
    call = {"function": {"name": "get_weather", "arguments": {"sunny": True}}}
    history: list[Any] = [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "True", "tool_name": "get_weather"},
    ]
    reply = client.chat(MODEL, history, tools=[get_weather], options={"temperature": 0, "num_predict": 40})
    assert reply.message.content or reply.message.tool_calls


def test_its_errors_have_statuses(client: ollama.Client, server: ServeProcess) -> None:
    for ask, status in (
        (lambda: client.chat("gpt-oss", [USER]), 404),
        (lambda: client.show("gpt-oss"), 404),
        (lambda: client.chat(MODEL, [USER], options={"temperature": -1}), 400),
        (lambda: client.chat(MODEL, [USER], think=True), 400),
        (lambda: client.pull("gpt-oss"), 403),
        (lambda: client.delete(MODEL), 403),
        (lambda: client.embed(MODEL, "Hi"), 400),
        (lambda: client.embeddings(MODEL, "Hi"), 400),
        (lambda: ollama.Client(server.url, headers={"Authorization": "Bearer sk-wrong"}).list(), 401),
    ):
        with pytest.raises(ollama.ResponseError) as raised:
            ask()
        assert raised.value.status_code == status and raised.value.error
    with pytest.raises(ollama.ResponseError, match="context"):
        list(client.chat(MODEL, [{"role": "user", "content": "word " * 9000}], stream=True))
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(MODEL, stream=True)] == ["success"]


def test_a_stream_that_is_left_ends(client: ollama.Client, server: ServeProcess) -> None:
    stream = client.chat(MODEL, [USER], options={"num_predict": 1500, "ignore_eos": True}, stream=True)
    for _ in range(3):
        next(stream)
    stream.close()
    server.wait_until_idle()


def test_langchain_chats_streams_and_counts(chat: ChatOllama, said: str) -> None:
    reply = chat.invoke([HumanMessage(QUESTION)])
    assert reply.content == said and reply.usage_metadata["input_tokens"] > 10
    assert reply.response_metadata["done_reason"] in ("stop", "length")
    chunks = list(chat.stream([HumanMessage(QUESTION)]))
    assert "".join(chunk.content for chunk in chunks) == said
    assert asyncio.run(chat.ainvoke(QUESTION)).content == said
    assert chat.invoke([HumanMessage(QUESTION), reply, HumanMessage("And of Spain?")]).content


def test_langchain_has_structured_replies_and_sends_calls_back(chat: ChatOllama) -> None:
    chat = chat.model_copy(update={"num_predict": 80})
    assert isinstance(chat.with_structured_output(City).invoke("Is Paris a city?"), City)
    call = {"name": "get_weather", "args": {"sunny": True}, "id": "8d1f3b5e"}
    history = [HumanMessage("Weather?"), AIMessage("", tool_calls=[call]), ToolMessage("True", tool_call_id="8d1f3b5e")]
    message = chat.bind_tools([get_weather]).invoke(history)
    assert message.content or message.tool_calls


def test_langchain_completes(server: ServeProcess, said: str) -> None:
    model = OllamaLLM(
        model=MODEL, base_url=server.url, client_kwargs={"headers": HEADERS}, temperature=0, num_predict=16
    )
    assert model.invoke(QUESTION) == said
    assert "".join(model.stream(QUESTION)) == said
