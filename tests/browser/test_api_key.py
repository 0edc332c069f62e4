"""A server with keys: the page is served without one, asks its user, sends it as a header, and keeps it in the tab."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from ..serve_process import ServeProcess
from .conftest import KEYS, OpenPage
from .test_chat import say


def test_the_page_asks_for_a_key_and_sends_it(open_page: OpenPage, locked_server: ServeProcess) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 401")
    page = open_page(locked_server)
    sent: list[str | None] = []
    page.on("request", lambda request: "/v1/" in request.url and sent.append(request.headers.get("authorization")))
    dialog = page.locator("#key-dialog")
    expect(dialog).to_contain_text("requires an API key")
    page.fill("#key-value", "sk-wrong")
    page.press("#key-value", "Enter")
    expect(page.locator("#key-error")).to_contain_text("does not accept this key")
    page.fill("#key-value", KEYS[0])
    page.press("#key-value", "Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#model")).to_contain_text("smol")
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "8")
    say(page, "Hi")
    expect(page.locator(".turn.assistant .cached")).to_be_visible()
    expect(page.locator(".request")).to_have_count(1)
    assert locked_server.json("/v1/cache")["requests"] == [], "another key sees nothing of it"
    page.reload()
    expect(page.locator("#model")).to_contain_text("smol")
    expect(dialog).to_be_hidden()
    assert set(sent) <= {None, "Bearer sk-wrong", f"Bearer {KEYS[0]}"} and sent[-1] == f"Bearer {KEYS[0]}"
    assert not any(key in address for key in KEYS for address in open_page.addresses), "nor in an address"
    kept = page.evaluate("JSON.stringify(localStorage)")
    assert not any(key in kept for key in KEYS) and page.context.cookies() == []


def test_without_a_key_the_page_says_so_and_asks_again_only_when_it_is_used(
    open_page: OpenPage, locked_server: ServeProcess
) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 401")
    page = open_page(locked_server)
    dialog = page.locator("#key-dialog")
    expect(dialog).to_be_visible()
    page.click("#key-cancel")
    expect(page.locator("#model")).to_contain_text("locked")
    expect(page.locator("#cache-error")).to_contain_text("API key is required")
    num_asked = len(open_page.addresses)
    page.wait_for_timeout(4000)  # neither the server is asked on and on, nor the user
    assert [a for a in open_page.addresses[num_asked:] if "/v1/" in a] == []
    expect(dialog).to_be_hidden()
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "8")
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(dialog).to_be_visible()
    page.fill("#key-value", KEYS[0])
    page.press("#key-value", "Enter")
    expect(page.locator(".turn.assistant .cached")).to_be_visible()
    expect(page.locator("#model")).to_contain_text("smol")


def test_a_server_without_keys_is_not_said_to_require_one(page: Page) -> None:
    page.click("#key-open")
    expect(page.locator("#key-dialog")).to_contain_text("The key is stored in this tab only")
    expect(page.locator("#key-required")).to_be_hidden()
