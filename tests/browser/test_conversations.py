"""Conversations are kept in the browser: listed, opened, renamed, exported, deleted, and never more than fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from ..serve_process import ServeProcess
from .conftest import OpenPage, shots
from .test_chat import said, say, stream


def show_list(page: Page) -> None:
    page.locator("#conversations-panel").evaluate("panel => { panel.open = true; }")


def titles(page: Page) -> list[str]:
    return page.locator(".conversation .open").all_text_contents()


def test_a_conversation_outlives_a_reload_and_goes_on(page: Page) -> None:
    stream(page, {"delta": {"content": "A **tree**."}})
    say(page, "What is\na tree?")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn.assistant strong")).to_have_text("tree")
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "And a bush?")
    contents = [message["content"] for message in request.value.post_data_json["messages"]]
    assert contents == ["What is\na tree?", "A **tree**.", "And a bush?"]
    assert titles(page) == ["What is a tree?"]


def test_conversations_are_listed_opened_renamed_and_deleted(page: Page) -> None:
    for text in ("One", "Two", "Three"):
        stream(page, {"delta": {"content": f"Reply to {text}"}})
        page.click("#new")
        say(page, text)
    show_list(page)
    expect(page.locator("#conversations-count")).to_have_text("3 conversations")
    assert titles(page) == ["Three", "Two", "One"]
    page.get_by_role("button", name="One", exact=True).click()
    expect(page.locator("#conversations-panel")).not_to_have_attribute("open", "")
    assert said(page) == "Reply to One"
    show_list(page)
    page.locator(".conversation.current").get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Title").fill("<b>First</b>")
    page.get_by_role("textbox", name="Title").press("Enter")
    expect(page.locator(".conversation.current .open")).to_have_text("<b>First</b>")
    page.locator(".conversation").nth(0).get_by_role("button", name="Delete").click()
    assert len(titles(page)) == 3, "it asks first"
    page.locator(".conversation").nth(0).get_by_role("button", name="Really?").click()
    assert titles(page) == ["Two", "<b>First</b>"] and said(page) == "Reply to One"
    say(page, "More")
    assert titles(page) == ["<b>First</b>", "Two"], "a name stays, and what was used last is first"
    page.locator(".conversation.current").get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Really?").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.click("#delete-all")
    page.click("#delete-all")
    expect(page.locator(".conversation")).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


def test_a_reply_that_ends_later_brings_no_deleted_conversation_back(page: Page) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "1500")
    page.click("#settings summary")
    say(page, "Tell me a very long story of a fox.", waits=False)
    expect(page.locator(".turn.live .rendered")).not_to_be_empty()
    show_list(page)
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Really?").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)
    page.wait_for_timeout(500)
    assert page.evaluate("localStorage.length") == 0


def test_a_reply_that_is_left_says_that_it_was_stopped(page: Page) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "1500")
    page.click("#settings summary")
    say(page, "Tell me a very long story of a fox.", waits=False)
    expect(page.locator(".turn.live .rendered")).not_to_be_empty()
    show_list(page)
    page.locator(".conversation .open").click()
    expect(page.locator(".turn.live")).to_have_count(1)  # it is shown already
    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    show_list(page)
    page.locator(".conversation .open").click()
    expect(page.locator(".turn.assistant .rendered")).not_to_be_empty()
    expect(page.locator(".turn.assistant .usage")).to_contain_text("stopped")


def test_the_figures_and_the_miss_outlive_a_reload(page: Page) -> None:
    say(page, "What is a tree?")
    page.click("#new")
    say(page, "What is a bush?")
    expect(page.locator(".turn .why-said")).to_contain_text("then the prompt differs")
    expect(page.locator(".turn .diff .prompt")).to_contain_text("bush")
    shown = page.locator(".turn .usage").inner_html()
    page.reload()
    assert page.locator(".turn .usage").inner_html() == shown
    page.click("#new")
    show_list(page)
    page.locator(".conversation .open", has_text="bush").click()
    assert page.locator(".turn .usage").inner_html() == shown


def test_a_conversation_that_was_stored_without_figures_is_shown(page: Page) -> None:
    page.evaluate(
        """() => {
            const turns = [{ role: "user", content: "Hi" }, { role: "assistant", content: "Yes." }];
            const kept = { id: "old", title: "Old", updatedAt: 1, turns };
            localStorage.setItem("radixlm.conversation.old", JSON.stringify(kept));
        }"""
    )
    page.reload()
    show_list(page)
    page.locator(".conversation .open").click()
    assert said(page) == "Yes."


@pytest.mark.parametrize("width", [1440, 390])
def test_a_new_title_can_be_given_up_and_a_click_elsewhere_is_not_lost(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    stream(page, {"delta": {"content": "Yes."}})
    for text in ("One", "Two", "Three"):
        page.click("#new")
        say(page, text)
    show_list(page)
    rows = page.locator(".conversation")
    field = page.get_by_role("textbox", name="Title")
    heights = rows.evaluate_all("rows => rows.map(row => row.offsetHeight)")
    rows.nth(0).get_by_role("button", name="Rename").click()
    assert rows.evaluate_all("rows => rows.map(row => row.offsetHeight)") == heights
    shots(page, f"rename-{width}")
    field.fill("Other")
    field.press("Escape")
    assert titles(page) == ["Three", "Two", "One"]
    rows.nth(0).get_by_role("button", name="Rename").click()
    field.fill("Third")
    rows.nth(1).get_by_role("button", name="Rename").click()
    expect(field).to_have_value("Two")
    field.fill("Second")
    rows.nth(2).get_by_role("button", name="Delete").click()
    expect(rows.nth(2).get_by_role("button", name="Really?")).to_be_visible()
    page.reload()
    assert titles(page) == ["Third", "Second", "One"]


def test_an_export_has_every_message_and_all_that_repeats_the_last_reply(
    page: Page, server: ServeProcess, tmp_path: Path
) -> None:
    stream(page, {"delta": {"content": "A `tree`."}})
    page.click("#settings summary")
    page.fill("[name=system]", "Be brief.")
    say(page, "What is a tree?")
    page.fill("[name=system]", "Another, for the next reply.")
    [model] = server.json("/v1/models")["data"]
    sampling = {**model["default_sampling"], "temperature": 0, "max_tokens": 24}
    show_list(page)
    one, every = page.get_by_role("button", name="Export", exact=True), page.locator("#export-all")
    for button, name in ((one, "What-is-a-tree.json"), (every, "radixlm-conversations.json")):
        with page.expect_download() as download:
            button.click()
        assert download.value.suggested_filename == name
        download.value.save_as(tmp_path / "export.json")
        [told] = json.loads((tmp_path / "export.json").read_text(encoding="utf-8"))["conversations"]
        assert (told["title"], set(told)) == ("What is a tree?", {"title", "updated_at", "settings", "messages"})
        assert told["settings"] == {"model": model["id"], "system": "Be brief.", **sampling}
        assert told["messages"] == [
            {"role": "user", "content": "What is a tree?"},
            {"role": "assistant", "content": "A `tree`."},
        ]


def test_the_oldest_make_room_and_what_others_stored_is_left_alone(page: Page) -> None:
    page.evaluate(
        """() => {
            localStorage.setItem("radixlm.conversation.broken", "{");
            localStorage.setItem("other", "x");
            for (let n = 0; n < 120; n++) {
                const turns = [{ role: "user", content: "x".repeat(n === 119 ? 1_900_000 : 1000) }];
                const kept = { id: `old${n}`, title: `Old ${n}`, updatedAt: n, turns };
                localStorage.setItem("radixlm.conversation.old" + n, JSON.stringify(kept));
            }
        }"""
    )
    page.reload()
    stream(page, {"delta": {"content": "Yes."}})
    say(page, "y" * 50_000)
    kept = titles(page)
    assert len(kept) <= 100 and kept[1] == "Old 119" and "Old 0" not in kept
    assert page.evaluate("localStorage.getItem('other')") == "x"
    numbers = [int(title.split()[1]) for title in kept[1:]]
    assert numbers == sorted(numbers, reverse=True), "the oldest went first"
    sizes = page.evaluate(
        "Object.entries(localStorage).map(([key, text]) => key.includes('conversation.') ? text.length : 0)"
    )
    assert sum(sizes) <= 2_000_000 + 1


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_list_fits_windows(open_page: OpenPage, server: ServeProcess, width: int, scheme: str) -> None:
    page = open_page(server)
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    stream(page, {"delta": {"content": "Yes."}})
    for text in ("What is a tree?", "A long title: " + "word " * 30, "Hi"):
        page.click("#new")
        say(page, text)
    show_list(page)
    shots(page, f"conversations-{width}-{scheme}")
    assert page.locator("#chat").evaluate("e => e.scrollWidth <= e.clientWidth")
