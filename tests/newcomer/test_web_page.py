"""The page of a server that was started a moment ago, as a browser asks for it; tests/browser looks at it."""

from __future__ import annotations

import json
import re

import pytest

from .conftest import Newcomer


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_the_page_and_all_that_it_names_is_there(newcomer: Newcomer, root_path: str) -> None:
    newcomer.variables["RADIXLM_ROOT_PATH"] = root_path
    with newcomer.serving("radixlm serve smollm2.radixlm") as served:
        status, page = served.get(f"{root_path}/")
        assert status == 200
        named = set(re.findall(r'(?:src|href)="(?!data:)([^"]+)"', page))
        assert any(name.endswith(".js") for name in named) and any(name.endswith(".css") for name in named)
        assert {name: served.get(f"{root_path}/{name}")[0] for name in named} == dict.fromkeys(named, 200)
        assert not [name for name in named if "://" in name], "a page without a network"
        served.asks([{"role": "user", "content": "What is the capital of France, and why?"}])
        cache = json.loads(served.get("/v1/cache")[1])
        assert "helpful AI assistant" in json.dumps(cache)  # of the system prompt: texts of runs are cut
