"""A browser on a page of a real server. CHROMIUM names the browser's program; none is ever downloaded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ..serve_process import ServeProcess

PATIENCE_MS = 30_000  # CI's machines are slow, and two
SMALL = ("--kv-cache-gb", "0.07", "--context-length", "2600")  # a context that is soon full
KEYS = ("sk-alice", "sk-bob")
# Without these, the browser asks its maker's hosts for things at every start. The sandbox needs rights that root in a
# container lacks; the pages are our own.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with ServeProcess(*SMALL, log=tmp_path_factory.mktemp("server") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def locked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = (*SMALL, "--api-key", KEYS[0], "--api-key", KEYS[1])
    with ServeProcess(*options, log=tmp_path_factory.mktemp("locked") / "log", api_key=KEYS[1]) as server:
        yield server


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    opened = OpenPage(browser)
    yield opened
    opened.close()


@pytest.fixture
def page(open_page: OpenPage, server: ServeProcess) -> Page:
    """The page of a server with an empty cache, greedy and short."""
    server.json("/v1/cache", method="DELETE")
    page = open_page(server)
    page.click("#settings summary")
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "24")
    page.click("#settings summary")
    return page


class OpenPage:
    """Opens pages in a profile of its own; none may ask for anything elsewhere or have anything on its console."""

    def __init__(self, browser: Browser) -> None:
        self._context = browser.new_context(viewport={"width": 1280, "height": 800})
        self.addresses: list[str] = []
        self.complaints: list[str] = []
        self.expected: list[str] = []  # beginnings of complaints that a test provokes

    def __call__(self, server: ServeProcess) -> Page:
        page = self._context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self.addresses.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append("a dialog"), dialog.dismiss()))
        page.goto(server.url)
        self._origin = server.url
        return page

    def close(self) -> None:
        self._context.close()
        assert [address for address in self.addresses if not address.startswith(self._origin + "/")] == []
        unexpected = [c for c in self.complaints if not any(c.startswith(start) for start in self.expected)]
        assert unexpected == []


def shots(page: Page, name: str) -> None:
    """A picture for humans, if SCREENSHOTS names a folder."""
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")
