"""The cache inspector in a real browser: what it draws is what the server says, and it is drawn while it happens."""

from __future__ import annotations

import itertools
import re

import pytest
from playwright.sync_api import Page, expect

from ..serve_process import ServeProcess
from .conftest import shots
from .test_chat import say

CHAT = {"messages": [{"role": "user", "content": "What is a tree?"}], "max_tokens": 40, "temperature": 0}


def test_runs_are_drawn_where_they_lie_with_their_tokens_and_pages(page: Page, server: ServeProcess) -> None:
    server.json("/v1/chat/completions", CHAT)
    server.json("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "Say a word."}]})
    runs = server.json("/v1/cache")["runs"]
    expect(page.locator(".run")).to_have_count(len(runs))
    shown = page.locator(".run").evaluate_all(
        """rows => rows.map(row => {
            const find = name => row.querySelector(name);
            const [track, bar] = [find(".track"), find(".bar")].map(e => e.getBoundingClientRect());
            const fits = bar.width > 0 && bar.right <= track.right + 2;
            const level = row.getAttribute("aria-level");
            return [find(".tok").textContent, find(".pages").textContent, find(".bar").style.left, level, fits];
        })"""
    )
    end = max(run["start"] + run["num_tokens"] for run in runs)
    assert all(fits for *_, fits in shown)
    numbers = [(int(tok.split()[0]), int(pages.split()[0]), float(left.rstrip("%"))) for tok, pages, left, *_ in shown]
    said = sorted((run["num_tokens"], run["num_pages"], 100 * run["start"] / end) for run in runs)
    assert [(tokens, pages, pytest.approx(left, abs=0.01)) for tokens, pages, left in sorted(numbers)] == said
    levels = [int(level) for *_, level, _ in shown]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in itertools.pairwise(levels))
    expect(page.locator("#sums")).to_contain_text(f"{len(runs)} runs")


def test_what_a_request_hit_and_why_not_more_is_shown_for_other_clients_too(page: Page, server: ServeProcess) -> None:
    server.json("/v1/chat/completions", CHAT)
    server.json("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "What is a bush?"}]})
    expect(page.locator(".request")).to_have_count(2)
    newest, first = page.locator(".request").all()
    asked = server.json("/v1/cache")["requests"][0]
    assert asked["num_cached_tokens"] >= 16
    expect(newest).to_contain_text(f"{asked['num_cached_tokens']} of {asked['num_prompt_tokens']}")
    expect(newest).to_contain_text(re.compile(f"token {asked['num_cached_tokens']} the cache goes on with .*tree"))
    expect(first).to_contain_text("0 of ")
    assert lanes(page, "hit") == asked["num_cached_tokens"]
    assert lanes(page, "computed") == asked["num_prompt_tokens"] - asked["num_cached_tokens"]
    first.click()
    expect(first).to_have_attribute("aria-selected", "true")
    assert lanes(page, "hit") == 0


def lanes(page: Page, kind: str) -> int:
    """Tokens of the tree that are marked as this."""
    widths = page.locator(f".run .lane.{kind}").evaluate_all("all => all.map(one => parseFloat(one.style.width))")
    end = int(re.search(r"0 to ([\d,]+) tokens", page.locator("#scale").text_content() or "")[1].replace(",", ""))
    return round(sum(widths) * end / 100)


def test_a_running_request_is_shown_where_it_is(page: Page, server: ServeProcess) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "1500")
    say(page, "Tell me a very long story of a fox and a hedgehog.", waits=False)
    expect(page.locator(".request.running")).to_have_count(1)
    expect(page.locator(".run .here:not(.through)", has_text="1 request here")).to_have_count(1)
    expect(page.locator(".run.used").first).to_be_visible()
    shots(page, "running")
    page.click("#stop")
    expect(page.locator(".request.running")).to_have_count(0)
    expect(page.locator(".run.used")).to_have_count(0)
    expect(page.locator(".request").first).to_contain_text("cancelled")


def test_the_tree_is_walked_with_the_keyboard(page: Page, server: ServeProcess) -> None:
    server.json("/v1/chat/completions", CHAT)
    server.json("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "Say a word."}]})
    count = len(server.json("/v1/cache")["runs"])
    rows = page.locator(".run")
    expect(rows).to_have_count(count)
    rows.first.focus()
    page.keyboard.press("ArrowDown")
    expect(rows.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(rows.last).to_be_focused()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    expect(rows).to_have_count(1)
    expect(rows.first).to_have_attribute("aria-expanded", "false")
    page.wait_for_timeout(2000)  # a new picture closes and opens nothing, and the focus stays
    expect(rows).to_have_count(1)
    expect(rows.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(rows).to_have_count(count)


def test_forget_empties_it_and_pause_holds_it(page: Page, server: ServeProcess) -> None:
    server.json("/v1/chat/completions", CHAT)
    expect(page.locator(".run")).not_to_have_count(0)
    page.click("#live")
    server.json("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "Say a word."}]})
    page.wait_for_timeout(2000)
    expect(page.locator(".request")).to_have_count(1)
    page.click("#live")
    expect(page.locator(".request")).to_have_count(2)
    page.click("#forget")
    expect(page.locator(".run")).to_have_count(0)
    expect(page.locator("#tree-empty")).to_be_visible()
    assert server.json("/v1/cache")["num_runs"] == 0


@pytest.mark.parametrize("width", [1280, 700, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_windows_of_any_width_by_day_and_night(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.emulate_media(color_scheme=scheme)
    say(page, "What is a tree? " + "W" * 300)
    for view in ("chat", "cache"):
        if width < 900:
            page.click(f"#view-{view}")
            expect(page.locator(f"#{view}")).to_be_visible()
            expect(page.locator("#cache" if view == "chat" else "#chat")).to_be_hidden()
        shots(page, f"{view}-{width}-{scheme}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator(f"#{view}").evaluate("e => e.scrollWidth <= e.clientWidth")
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness > 128) == (scheme == "light")
