"""The page at `/` comes out of the package whole, fenced in, and without a key; what it does, tests/browser sees."""

from __future__ import annotations

import json
import re
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from radixlm.runtime.server import create_app
from radixlm.runtime.server.page import PAGE_PATHS
from starlette.testclient import TestClient

if TYPE_CHECKING:
    from .conftest import FakeEngine

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "runtime" / "server" / "static"
OURS = {path for path in STATIC.iterdir() if path.is_file()}
BROWSER = {"accept": "text/html, */*"}
VENDORED = set((STATIC / "vendor").iterdir())


@pytest.fixture
def locked(engine: FakeEngine) -> TestClient:
    return TestClient(create_app(engine, api_keys=("sk-one",)), headers=BROWSER)  # type: ignore[arg-type]


def test_every_file_is_served_without_a_key_and_nothing_beside_them_is(locked: TestClient) -> None:
    assert {f"/static/{path.relative_to(STATIC)}" for path in OURS | VENDORED} | {"/"} == PAGE_PATHS | {
        "/static/index.html"
    }
    for path in PAGE_PATHS:
        response = locked.get(path)
        assert response.status_code == 200 and response.content == (STATIC / _name(path)).read_bytes()
    for path in (
        "/static/",
        "/static/index.html",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/main.js/",
        "/static/vendor",
    ):
        assert locked.get(path).status_code == 401, path


def test_a_file_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/static/main.js")
    again = client.get("/static/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert client.get("/static/main.js", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_the_policy_lets_in_scripts_and_styles_of_the_server_only(client: TestClient, path: str) -> None:
    headers = client.get(path, headers=BROWSER).headers
    policy = dict(directive.split(" ", 1) for directive in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert headers["x-content-type-options"] == "nosniff"


def test_the_files_ask_for_nothing_elsewhere_and_parse_no_markup() -> None:
    for path in OURS:
        text = path.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|url\(|@import", text), path.name
        sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|Function\("
        assert not re.search(sinks, text), path.name
        used = re.findall(r'(?:src|href)="([^"]+)"', text) + re.findall(r'(?:from |import\()"\./([^"]+)"', text)
        folder = "/" if path.name == "index.html" else "/static/"
        assert {folder + name for name in used} <= PAGE_PATHS
    assert " on" not in re.sub(r">[^<]*<", "><", (STATIC / "index.html").read_text(encoding="utf-8")), "inline handlers"


def test_the_files_are_part_of_the_package() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["tool"]["setuptools"]["package-data"]["radixlm.runtime.server"] == [
        "static/*",
        "static/vendor/*",
    ]


def test_the_vendored_libraries_are_those_that_are_pinned_with_their_licences() -> None:
    notice = (STATIC / "vendor" / "NOTICE").read_text(encoding="utf-8")
    listed = dict(reversed(line.split("  ")) for line in notice.splitlines() if re.match("[0-9a-f]{64}  ", line))
    copies = VENDORED - {STATIC / "vendor" / "NOTICE"}
    assert listed == {path.name: sha256(path.read_bytes()).hexdigest() for path in copies}
    pinned = json.loads((ROOT / ".ci" / "vendor" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    lock = json.loads((ROOT / ".ci" / "vendor" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    for name, version in pinned.items():
        assert f"== {name} {version}, https://www.npmjs.com/package/{name}" in notice
        package = lock[f"node_modules/{name}"]
        assert package["version"] == version and package["integrity"].startswith("sha512-")
    assert notice.count("Permission is hereby granted, free of charge") == len(pinned)


def _name(path: str) -> str:
    return path.removeprefix("/static/") if path != "/" else "index.html"
