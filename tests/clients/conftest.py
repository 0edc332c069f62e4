"""One server with keys for all clients, and what they need to know of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices when it is imported
os.environ["LITELLM_LOG"] = "ERROR"

import openai

from ..serve_process import ServeProcess

KEY, OTHER_KEY = "sk-clients", "sk-others"
MODEL = "smollm2"
QUESTION = "Hey"  # the reply ends by itself, which some clients insist on
OPTIONS = ("--model-id", MODEL, "--kv-cache-gb", "0.2", "--api-key", KEY, "--api-key", OTHER_KEY)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with ServeProcess(*OPTIONS, log=tmp_path_factory.mktemp("server") / "log", api_key=KEY) as server:
        yield server


@pytest.fixture(scope="session")
def said(server: ServeProcess) -> str:
    """What the model says to QUESTION, greedily and in 16 tokens, as a plain client is told."""
    messages = [{"role": "user", "content": QUESTION}]
    reply = server.json("/v1/chat/completions", {"messages": messages, "max_tokens": 16, "temperature": 0})
    text: str = reply["choices"][0]["message"]["content"]
    assert len(text.split()) > 3
    return text


@pytest.fixture
def client(server: ServeProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's own, which does not try again: what fails is to be seen."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
    server.wait_until_idle()
