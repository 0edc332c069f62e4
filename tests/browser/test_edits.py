"""A refused message leaves the conversation as it was; sent messages are edited and deleted; no draft is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Page, Route, expect

from ..serve_process import ServeProcess
from .conftest import OpenPage, shots
from .test_chat import said, say, stream

TOO_LONG = "more " * 3000
REFUSED = {"status": 400, "json": {"error": {"message": "no such thing", "code": None}}}
HINT = "The setting “History too long: drop old turns” sends it without its oldest turns."


@contextmanager
def sent_messages(page: Page) -> Iterator[list[list[str]]]:
    """Collect the contents of each request's messages."""
    sent: list[list[str]] = []

    def collect(request) -> None:  # type: ignore[no-untyped-def]  # playwright's, as the others
        if request.url.endswith("/v1/chat/completions"):
            sent.append([message["content"] for message in request.post_data_json["messages"]])

    page.on("request", collect)
    yield sent
    page.remove_listener("request", collect)


def refuse(page: Page, open_page: OpenPage) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 400")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**REFUSED))


def edit(page: Page, text: str) -> None:
    page.locator(".turn.user", has_text=text).get_by_role("button", name="Edit").click()


def test_a_message_that_is_too_long_is_not_sent_again(page: Page, open_page: OpenPage) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 400")
    page.fill("#prompt", TOO_LONG)
    page.press("#prompt", "Enter")
    expect(page.locator(".turn .failure")).to_contain_text("maximum context length")
    expect(page.locator(".turn .failure")).not_to_contain_text("The setting")  # there are no old turns
    expect(page.locator("#prompt")).to_have_value(TOO_LONG)
    assert page.evaluate("localStorage.length") == 0
    say(page, "Hi")
    first = said(page)
    page.fill("#prompt", TOO_LONG)
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.assistant .failure")).to_contain_text(HINT)
    expect(page.locator("#prompt")).to_have_value(TOO_LONG)
    expect(page.locator(".turn.user")).to_have_count(1)
    shots(page, "refused")
    with sent_messages(page) as sent:
        say(page, "And now?")
    assert sent == [["Hi", first, "And now?"]]
    expect(page.locator(".turn .failure")).to_have_count(0)
    expect(page.locator(".conversation .open")).to_have_text("Hi")
    page.reload()
    expect(page.locator(".turn")).to_have_count(4)


def test_a_refused_regeneration_leaves_the_reply(page: Page, open_page: OpenPage) -> None:
    stream(page, {"delta": {"content": "A tree."}})
    say(page, "What is it?")
    refuse(page, open_page)
    page.click("#again")
    expect(page.locator(".turn .failure")).to_have_text("no such thing")
    expect(page.locator(".turn.assistant .rendered").first).to_have_text("A tree.")
    page.reload()
    expect(page.locator(".turn.assistant .rendered")).to_have_text("A tree.")


def test_what_was_written_meanwhile_is_kept_after_the_refused_text(page: Page, open_page: OpenPage) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 400")
    held: list[Route] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))
    with page.expect_request("**/v1/chat/completions"):
        say(page, "First", waits=False)
    page.fill("#prompt", "Later")
    held[0].fulfill(**REFUSED)
    expect(page.locator("#prompt")).to_have_value("First\n\nLater")


def test_an_edited_message_replaces_what_followed_and_the_draft_comes_back(page: Page) -> None:
    stream(page, {"delta": {"content": "Yes."}})
    say(page, "One")
    say(page, "Two")
    page.fill("#prompt", "A draft")
    edit(page, "One")
    expect(page.locator("#prompt")).to_have_value("One")
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator(".turn.replaced")).to_have_count(4)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        shots(page, f"editing-{width}")
        assert page.locator("#chat").evaluate("e => e.scrollWidth <= e.clientWidth")
    page.keyboard.press("Escape")
    expect(page.locator("#prompt")).to_have_value("A draft")
    expect(page.locator(".turn.replaced, #editing:not([hidden])")).to_have_count(0)
    edit(page, "One")
    with sent_messages(page) as sent:
        say(page, "Uno")
    assert sent == [["Uno"]]
    expect(page.locator("#prompt")).to_have_value("A draft")
    for _ in range(2):
        expect(page.locator(".turn.user .said")).to_have_text(["Uno"])
        expect(page.locator(".turn.assistant")).to_have_count(1)
        page.reload()


def test_an_edit_goes_on_from_the_cached_prefix(page: Page, server: ServeProcess) -> None:
    say(page, "What is a tree?")
    say(page, "And a bush?")
    before = server.json("/v1/cache")["requests"][1]  # the first
    edit(page, "And a bush?")
    say(page, "And a hedge?")
    expect(page.locator(".turn")).to_have_count(4)
    assert server.json("/v1/cache")["requests"][0]["num_cached_tokens"] > before["num_prompt_tokens"]


def test_a_refused_edit_leaves_the_conversation_and_can_be_mended(page: Page, open_page: OpenPage) -> None:
    stream(page, {"delta": {"content": "Yes."}})
    say(page, "One")
    say(page, "Two")
    refuse(page, open_page)
    edit(page, "One")
    page.fill("#prompt", "Uno")
    page.press("#prompt", "Enter")
    expect(page.locator(".turn .failure")).to_be_visible()
    expect(page.locator(".turn.user .said")).to_have_text(["One", "Two"])
    expect(page.locator("#prompt")).to_have_value("Uno")
    stream(page, {"delta": {"content": "Yes."}})
    with sent_messages(page) as sent:
        page.press("#prompt", "Enter")
        expect(page.locator(".turn.user .said")).to_have_text(["Uno"])
    assert sent == [["Uno"]]


def test_the_last_message_is_deleted_with_its_reply(page: Page) -> None:
    stream(page, {"delta": {"content": "Yes."}})
    say(page, "One")
    say(page, "Two")
    for left in (["One"], []):
        page.locator(".turn").get_by_role("button", name="Delete").click()
        page.locator(".turn").get_by_role("button", name="Really?").click()
        expect(page.locator(".turn.user .said")).to_have_text(left)
        expect(page.locator(".turn.assistant")).to_have_count(len(left))
    assert page.evaluate("localStorage.length") == 0


def test_a_draft_outlives_a_reload_and_is_gone_when_it_is_sent(page: Page) -> None:
    stream(page, {"delta": {"content": "Yes."}})
    for text in ("A draft\nof two lines", ""):
        page.fill("#prompt", text)
        page.reload()
        expect(page.locator("#prompt")).to_have_value(text)
    say(page, "Sent")
    page.reload()
    expect(page.locator("#prompt")).to_have_value("")
