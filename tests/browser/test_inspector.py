"""The cache inspector in a real browser: what it draws is what the server says, and it is drawn while it happens."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from playwright.sync_api import Page, expect

from ..serve_process import ServeProcess
from .conftest import OpenPage, shots
from .test_chat import say

EMPTY = {
    **{name: 0 for name in ("num_runs", "num_tokens", "num_pages", "num_used_pages", "num_states")},
    **{"is_whole": True, "is_counted": True, "runs": [], "requests": []},
}
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
    expect(newest).to_have_class(re.compile("ended"))  # not a picture of it while it ran
    asked = server.json("/v1/cache")["requests"][0]
    assert asked["num_cached_tokens"] >= 16
    expect(newest).to_contain_text(f"{asked['num_cached_tokens']} of {asked['num_prompt_tokens']}")
    expect(newest.locator(".why-said")).to_have_text(
        f"Cached up to token {asked['num_cached_tokens']}; then the prompt differs."
    )
    expect(first).to_contain_text("0 of ")
    assert lanes(page, "hit") == asked["num_cached_tokens"]
    assert lanes(page, "computed") == asked["num_prompt_tokens"] - asked["num_cached_tokens"]
    first.click()
    expect(first).to_have_attribute("aria-selected", "true")
    assert lanes(page, "hit") == 0


def asked(server: ServeProcess, system: str, user: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    server.json("/v1/chat/completions", {**CHAT, "messages": messages})


def test_branches_join_at_the_token_where_they_part(page: Page, server: ServeProcess) -> None:
    asked(server, "You are a helpful assistant. Today is Friday.", "Who wrote it?")
    asked(server, "You are a helpful gardener. Today is Monday.", "Who wrote it?")
    asked(server, "You are a helpless poet. Today is Monday.", "Who wrote it?")
    tree = server.json("/v1/cache")
    num_cached = tree["requests"][0]["num_cached_tokens"]
    assert 0 < num_cached < 16 and sorted(run["num_shared"] for run in tree["runs"] if run["parent"] is None)[1:] != [
        0,
        0,
    ]
    roots = page.locator('.run[aria-level="1"]')
    expect(page.locator(".run")).to_have_count(len(tree["runs"]))
    expect(roots).to_have_count(1)
    expect(page.locator('.run[aria-level="2"] .copied').first).to_be_visible()
    assert lanes(page, "hit") == num_cached, "on the run that had them"
    expect(roots.locator(".lane.hit")).to_have_count(1)
    diff = page.locator('.request[aria-selected="true"] .diff')
    expect(diff.locator(".same")).to_have_text(re.compile("same<.im_start.>system↵You are a"))
    expect(diff.locator(".prompt")).to_contain_text(re.compile("help|poet"))
    expect(page.locator('.request[aria-selected="true"] .pages-note')).to_contain_text("A page holds 16 tokens")
    for width, scheme in itertools.product((1440, 390), ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        if width == 390:
            page.click("#view-cache")
        shots(page, f"tree-{width}-{scheme}")
        assert page.locator("#cache").evaluate("e => e.scrollWidth <= e.clientWidth")


def test_a_run_is_read_whole_and_copied_with_its_ids(page: Page, server: ServeProcess) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    text = "One, two, <b>three</b>. " * 40
    server.json("/v1/completions", {"prompt": text, "max_tokens": 1})
    page.locator(".run .begins").first.click()
    dialog = page.locator("#run-dialog")
    expect(dialog.locator("#run-text")).to_have_text(re.compile("^One, two, <b>three</b>. One, .*three"))
    whole = dialog.locator("#run-text").text_content() or ""
    assert len(whole) > 500 and text.startswith(whole)
    dialog.get_by_role("button", name="Copy text").click()
    expect(dialog.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == whole
    dialog.locator("summary").click()
    ids = json.loads(f"[{dialog.locator('#run-ids').text_content()}]")
    assert server.json("/detokenize", {"tokens": ids})["prompt"] == whole
    shots(page, "run")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    server.json("/v1/cache", method="DELETE")


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_a_key_opens_a_run_and_copies_nothing(page: Page, server: ServeProcess, key: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("navigator.clipboard.writeText('mine')")
    server.json("/v1/chat/completions", CHAT)
    page.locator(".run").first.focus()
    page.keyboard.press(key)
    expect(page.locator("#run-text")).to_contain_text("What is a tree?")
    expect(page.locator("#run-text")).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == "mine"
    page.locator("#run-dialog").get_by_role("button", name="Copy text").press(key)
    expect(page.get_by_role("button", name="Copied")).to_be_visible()


def test_the_store_is_counted(page: Page) -> None:
    tier = {
        "num_pages": 100,
        "num_bytes": 5e7,
        "max_bytes": 1e10,
        "num_saved_pages": 7,
        "num_evicted_pages": 0,
        "off_because": None,
    }
    expect(page.locator("#store-text")).to_be_hidden()
    page.route("**/health", lambda route: route.fulfill(json={"status": "ready", "reason": None, "tier": tier}))
    expect(page.locator("#store-text")).to_have_text(
        "store: 100 pages (1,600 tokens) on disk · 50 MB of 10.0 GB · since the start 7 saved, 0 evicted"
    )


def test_one_of_several_models_is_chosen(page: Page) -> None:
    model = {"max_input_tokens": 2048, "default_sampling": {"temperature": 0.8}}
    models = {"data": [{"id": "small", **model}, {"id": "large", **model, "default_sampling": {"temperature": 0.25}}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/health", lambda route: route.fulfill(json={"status": "ready", "models": {"small": {}, "large": {}}}))
    page.route("**/v1/cache*", lambda route: route.fulfill(json=EMPTY))
    page.reload()
    with page.expect_request("**/v1/cache?model=large"):
        page.locator("#model select").select_option("large")
    expect(page.locator("[name=temperature]")).to_have_attribute("placeholder", "0.25")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    page.reload()
    expect(page.locator("#model select")).to_have_value("large")
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Hi")
    assert request.value.post_data_json["model"] == "large"


def test_a_model_without_a_chat_template_cannot_be_chosen_and_says_why(page: Page) -> None:
    models = [{"id": "silent", "has_chat_template": False}, {"id": "chatty", "has_chat_template": True}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.reload()
    select = page.get_by_label("Model", exact=True)
    expect(select).to_have_value("chatty")
    silent = select.locator("option[value=silent]")
    expect(silent).to_be_disabled()
    expect(silent).to_have_attribute("title", re.compile("no chat template"))
    expect(select.locator("option[value=chatty]")).to_be_enabled()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body="data: [DONE]\n\n"))
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Hi")
    assert request.value.post_data_json["model"] == "chatty"


def test_models_that_are_not_loaded_can_be_chosen_and_say_so(page: Page, open_page: OpenPage) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 409")
    small = {"id": "small", "state": "loaded", "max_input_tokens": 2048, "default_sampling": {}}
    models = [small, {"id": "large", "state": "unloaded"}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.route("**/health", lambda route: route.fulfill(json={"status": "ready", "models": {"small": {}, "large": {}}}))
    error = {"error": {"message": "large is unloaded", "code": "model_not_loaded"}}
    page.route("**/v1/cache?model=large", lambda route: route.fulfill(status=409, json=error))
    page.reload()
    page.locator("#model select").select_option("large")
    expect(page.locator("#model option:checked")).to_have_text("large (unloaded)")
    expect(page.locator("#cache-error")).to_have_text("The model is not loaded; a message loads it.")
    models[1] |= {"state": "loading", "percent": 40}
    page.locator("#model select").focus()
    expect(page.locator("#model option:checked")).to_have_text("large (loading, 40 %)")


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
    expect(page.locator("#forget")).to_have_text("Really?")
    expect(page.locator("#cache-note")).to_contain_text("stored responses")
    shots(page, "forget")
    assert server.json("/v1/cache")["num_runs"] > 0, "it asks first"
    page.click("#forget")
    expect(page.locator("#cache-note")).to_have_text(re.compile(r"^\d+ pages? freed$"))
    expect(page.locator(".run")).to_have_count(0)
    expect(page.locator("#tree-empty")).to_be_visible()
    assert server.json("/v1/cache")["num_runs"] == 0
    expect(page.locator("#cache-note")).to_have_text("")  # after some seconds


@pytest.mark.parametrize("width", [1440, 700, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_windows_of_any_width_by_day_and_night(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
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
