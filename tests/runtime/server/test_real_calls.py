"""Qwen2.5-Coder makes the call that it wants, and none that it does not want."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime import Engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

SEEDS = range(24)
TEMPERATURES = (0.7, 1.0)


def tool(name: str, description: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("get_weather", "Current weather of a city", "city"), tool("delete_file", "Delete a file", "path")]


@pytest.fixture(scope="module")
def client(qwen2_artifact: Path) -> Iterator[TestClient]:
    with Engine(qwen2_artifact) as engine, TestClient(create_app(engine)) as client:
        yield client


@pytest.mark.long
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_question_about_the_weather_deletes_no_file(client: TestClient, choice: str) -> None:
    """After the first call a token of `>` and a line feed is as likely as `>`; it asks for no second call."""

    def called(case: tuple[float, int]) -> list[str]:
        temperature, seed = case
        body = {
            "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
            "tools": TOOLS,
            "tool_choice": choice,
            "temperature": temperature,
            "seed": seed,
            "max_tokens": 200,
        }
        message = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        return [call["function"]["name"] for call in message.get("tool_calls") or ()]

    with ThreadPoolExecutor(8) as threads:
        calls = list(threads.map(called, product(TEMPERATURES, SEEDS)))
    assert not any("delete_file" in names for names in calls)
    assert sum("get_weather" in names for names in calls) >= (len(calls) if choice == "required" else len(calls) // 2)
