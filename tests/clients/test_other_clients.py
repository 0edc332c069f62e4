"""What others build on OpenAI's API: langchain-openai, litellm, the `llm` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import litellm
import pytest
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, QUESTION


class City(BaseModel):
    """The name of a city."""

    size: bool


@tool
def get_weather(sunny: bool) -> str:
    """The weather."""
    return f"{sunny}"


@pytest.fixture
def chat(server: ServeProcess) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key=KEY, temperature=0, max_retries=0, max_tokens=16, timeout=60
    )


def test_langchain_chats_streams_and_counts(chat: ChatOpenAI, said: str) -> None:
    reply = chat.invoke([HumanMessage(QUESTION)])
    assert reply.content == said and reply.usage_metadata["input_tokens"] > 10
    chunks = list(chat.stream([HumanMessage(QUESTION)], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == reply.content
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 0
    assert len(chat.batch([QUESTION, QUESTION])) == 2
    history = [HumanMessage(QUESTION), reply, HumanMessage("And of Spain?")]
    assert chat.invoke(history).usage_metadata["input_token_details"]["cache_read"] > 10


def test_langchain_responses(server: ServeProcess, said: str) -> None:
    model = ChatOpenAI(
        model=MODEL, base_url=server.url + "/v1", api_key=KEY, temperature=0, max_tokens=16, use_responses_api=True
    )
    assert model.invoke(QUESTION).text == said


def test_langchain_completes(server: ServeProcess) -> None:
    model = OpenAI(model=MODEL, base_url=server.url + "/v1", api_key=KEY, temperature=0, max_tokens=8, max_retries=0)
    assert model.invoke("The capital of France is")
    assert model.generate(["One, two,", "A, B,"]).generations[1][0].text


def test_langchain_tools_and_structure(chat: ChatOpenAI) -> None:
    chat = chat.model_copy(update={"max_tokens": 80})
    message = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("How is the weather?")
    assert isinstance(message, AIMessage)
    (call,) = message.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["sunny"], bool)
    history = [HumanMessage("How is the weather?"), message, get_weather.invoke(call)]
    assert chat.invoke(history).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method).invoke("Is Paris a city?"), City), method


def test_litellm_chats_streams_and_maps_errors(server: ServeProcess, said: str) -> None:
    asked = {
        "model": f"openai/{MODEL}",
        "api_base": server.url + "/v1",
        "api_key": KEY,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 16,
        "temperature": 0,
        "num_retries": 0,
    }
    reply = litellm.completion(**asked)
    assert reply.choices[0].message.content == said
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == reply.choices[0].message.content
    text = litellm.text_completion(**{k: v for k, v in asked.items() if k != "messages"}, prompt="One, two,")
    assert text.choices[0].text
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**asked, "api_key": "sk-wrong"})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asked, "model": "openai/gpt-none"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**asked, "messages": [{"role": "user", "content": "word " * 9000}]})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**asked, "temperature": -1})


def test_the_llm_command_asks_and_goes_on(server: ServeProcess, said: str, tmp_path: Path) -> None:
    models = f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n  api_key_name: ours\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    (tmp_path / "keys.json").write_text(json.dumps({"ours": KEY}))
    command = Path(sys.executable).parent / "llm"

    def llm(*arguments: str) -> str:
        environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run(
            [command, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "ours" in llm("models")
    options = ("-o", "temperature", "0", "-o", "max_tokens", "16")
    assert llm("-m", "ours", *options, QUESTION).strip() == said.strip()
    assert llm("-m", "ours", "--no-stream", *options, QUESTION).strip() == said.strip()
    assert llm("-c", *options, "And of Spain?").strip()
    used = server.json("/v1/cache")["requests"][0]
    assert used["num_cached_tokens"] > 30, "the conversation goes on from what is cached"
