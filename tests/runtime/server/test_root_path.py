"""A server under a path of a proxy answers the same, whether the proxy drops the path or not."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.root_path import UnderRootPath, checked_root_path
from radixlm.runtime.server.page import PAGE_PATHS
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine


def test_both_kinds_of_proxies_reach_every_path(engine: FakeEngine) -> None:
    client = TestClient(UnderRootPath(create_app(engine, api_keys=("sk-one",)), "/llm"))  # type: ignore[arg-type]
    key = {"authorization": "Bearer sk-one"}
    for path in ("/", "/health", "/v1/models", "/static/main.js"):
        for prefix in ("", "/llm"):
            assert client.get(prefix + path, headers=key).status_code == 200, prefix + path
    assert client.get("/llm/v1/models").status_code == 401, "the path opened a door"
    for other in ("/llmx/v1/models", "/llm", "/other/llm/v1/models"):
        assert client.get(other, headers=key).status_code == 404


def test_the_page_names_only_addresses_relative_to_its_own(engine: FakeEngine) -> None:
    """An absolute one is lost under a proxy's path."""
    client = TestClient(create_app(engine))  # type: ignore[arg-type]
    for path in PAGE_PATHS - {"/static/icon.svg"}:
        response = client.get(path)
        assert response.status_code == 200, path
        absolute = r"""(?:src|href)="/|fetch\(["'`]/|\.(?:json|events)\(["'`]/|from "/"""
        assert re.findall(absolute, response.text) == [], path


@pytest.mark.parametrize("path", ["llm", "/a//b", "/a?b", "/a b", "//"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidParameter):
        checked_root_path(path)
