"""The chat in a real browser: it streams, stops, goes on, says what it reused, and runs nothing of what is said."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import Page, expect

from ..serve_process import ServeProcess
from .conftest import OpenPage

# What would run, call or hide if it came to be markup.
HOSTILE = (
    '<img src=x onerror="window.pwned=1"><script>window.pwned=2</script><svg onload="window.pwned=3"></svg>'
    '</div><a href="javascript:window.pwned=4">x</a>{{7*7}}<iframe srcdoc="<script>top.pwned=5</script>"></iframe>'
)


def say(page: Page, text: str, *, waits: bool = True) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.user").last).to_contain_text(text.split("\n")[0])
    if waits:
        expect(page.locator("#send")).to_be_visible()


def said(page: Page) -> str:
    return page.locator(".turn.assistant .rendered").last.text_content() or ""


def stream(page: Page, *pieces: dict) -> None:
    """Have the server reply with these choices, one chunk each."""
    lines = [f"data: {json.dumps({'choices': [{'index': 0, **piece}]})}\n\n" for piece in pieces] + ["data: [DONE]\n\n"]
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body="".join(lines), content_type="text/event-stream")
    )


def test_a_reply_is_seen_while_it_is_made(page: Page) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "200")
    page.evaluate(
        """() => {
            window.lengths = new Set();
            new MutationObserver(() => {
                const said = document.querySelector(".turn.assistant .rendered");
                if (said) window.lengths.add(said.textContent.length);
            }).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true});
        }"""
    )
    say(page, "Count from one to fifty, please.")
    lengths = page.evaluate("[...window.lengths]")
    assert len(lengths) > 10 and max(lengths) == lengths[-1] == len(said(page))
    expect(page.locator(".turn.live")).to_have_count(0)


def test_each_turn_says_what_was_cached_and_why_not_more(page: Page, server: ServeProcess) -> None:
    say(page, "What is a tree?")
    first = page.locator(".turn.assistant").nth(0)
    expect(first.locator(".cached")).to_have_text(re.compile(r"^0 of \d\d$"))
    expect(first.locator(".why")).to_have_count(0)  # nothing could have been found
    say(page, "And a bush?")
    asked = server.json("/v1/cache")["requests"][0]
    second = page.locator(".turn.assistant").nth(1)
    assert asked["num_cached_tokens"] > 34
    expect(second.locator(".cached")).to_have_text(f"{asked['num_cached_tokens']} of {asked['num_prompt_tokens']}")
    expect(second.locator(".usage")).to_contain_text("tok")


def test_accepted_draft_tokens_are_marked_in_the_source_and_the_text_is_that_without(page: Page) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "60")
    say(page, "Say the words again and again: one two three one two three one two three one two three")
    plain = said(page)
    page.click("#again")  # the cache knows what comes
    expect(page.locator("#send")).to_be_visible()
    turn = page.locator(".turn.assistant")
    expect(turn).to_have_count(1)
    legend = turn.locator(".usage .drafts")
    expect(legend).to_have_text(re.compile(r"^\d+ of \d+ draft tokens? accepted$"))
    assert int((legend.text_content() or "").split()[0]) > 0 and legend.get_attribute("title")
    assert said(page) == plain
    turn.get_by_role("button", name="Source").click()
    marked = turn.locator(".source .drafted").all_text_contents()
    source = turn.locator(".source").text_content() or ""
    assert 0 < len("".join(marked)) < len(source) and all(part in source for part in marked)
    assert "underline" in turn.locator(".source .drafted").first.evaluate("e => getComputedStyle(e).textDecorationLine")
    turn.get_by_role("button", name="Source").click()
    expect(turn.locator(".rendered")).to_be_visible()


def test_a_chunk_is_marked_where_all_of_its_tokens_were_drafted(page: Page) -> None:
    told = [("role", "", None), ("content", "A", [False]), ("content", "", [True]), ("content", "é", [True])]
    told += [("content", "<b>", [True]), ("content", "C", [True, False]), ("content", "D", None)]
    stream(page, *({"delta": {kind: text}} | ({"guessed": g} if g else {}) for kind, text, g in told))
    say(page, "Hi")
    assert said(page) == "Aé<b>CD"
    page.get_by_role("button", name="Source").click()
    expect(page.locator(".source")).to_have_text("Aé<b>CD")
    assert page.locator(".source .drafted").all_text_contents() == ["é<b>"]


def test_a_long_prompt_shows_how_far_it_is_until_the_reply_begins(page: Page) -> None:
    page.evaluate(
        """() => {
            window.told = [];
            new MutationObserver(() => {
                const progress = document.querySelector(".turn.assistant .progress");
                const said = document.querySelector(".turn.live .rendered");
                if (progress) window.told.push([progress.textContent, said.textContent]);
            }).observe(document.querySelector("#log"), {subtree: true, childList: true, characterData: true});
        }"""
    )
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "8")
    say(page, "One, two, three, four. " * 300)
    told = page.evaluate("window.told")
    counts = [int(text.split()[0]) for text, _ in told]
    assert len(set(counts)) > 2 and counts == sorted(counts)
    assert told[-1][0] == f"{counts[-1]} of {counts[-1]} prompt tokens" and {said for _, said in told} == {""}
    expect(page.locator(".progress")).to_have_count(0)


def test_stop_ends_the_request_and_the_chat_goes_on(page: Page, server: ServeProcess) -> None:
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "1500")
    page.click("#settings summary")
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        page.click("#new")
        say(page, "Tell me a very long story of a fox.", waits=False)
        expect(page.locator(".turn.live .rendered")).not_to_be_empty()
        stop()
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".turn.assistant .usage")).to_contain_text("stopped")
        server.wait_until_idle()
        partial = said(page)
        assert partial
    page.click("#settings summary")
    page.fill("[name=max_tokens]", "8")
    say(page, "Go on.")
    with_partial = server.json("/v1/cache")["requests"][0]
    assert with_partial["num_cached_tokens"] > 30, "the part that was made is a part of the next prompt"


def test_a_new_chat_forgets_and_another_reply_replaces_the_last(page: Page) -> None:
    sent: list[dict] = []
    page.on("request", lambda request: request.url.endswith("completions") and sent.append(request.post_data_json))
    say(page, "One.")
    page.click("#again")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".turn.assistant")).to_have_count(1)
    say(page, "Two.")
    page.click("#new")
    expect(page.locator(".turn")).to_have_count(0)
    say(page, "Three.")
    roles = [[message["role"] for message in body["messages"]] for body in sent]
    assert roles == [["user"], ["user"], ["user", "assistant", "user"], ["user"]]


def test_settings_are_what_is_sent_and_outlive_a_reload(page: Page) -> None:
    page.click("#settings summary")
    wanted = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "seed": 7, "max_tokens": 5}
    for name, value in wanted.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("[name=system]", "You are a cat.")
    page.select_option("[name=cache_match]", "exact")
    page.fill("[name=cache_salt]", "mine")
    page.reload()
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Hi")
    body = request.value.post_data_json
    assert {name: body[name] for name in wanted} == wanted
    assert (body["temperature"], body["cache_match"], body["cache_salt"]) == (0, "exact", "mine")
    assert body["messages"][0] == {"role": "system", "content": "You are a cat."}
    expect(page.locator(".request")).to_have_count(1)  # the inspector looks at the salt's part of the cache
    page.click("#settings summary")
    page.fill("[name=top_p]", "3")
    page.fill("#prompt", "again")
    page.press("#prompt", "Enter")
    expect(page.locator(".turn.user")).to_have_count(1)  # the browser says which field is wrong


def test_a_history_that_outgrows_the_context_may_lose_its_middle_and_the_turn_says_so(
    page: Page, open_page: OpenPage
) -> None:
    open_page.expected.append("Failed to load resource: the server responded with a status of 400")
    for text in ("word " * 1500, "more " * 1500):
        page.fill("#prompt", text)
        page.click("#send")
        expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".turn.assistant .failure")).to_contain_text("maximum context length")
    page.click("#settings summary")
    page.select_option("[name=truncation]", "middle")
    page.press("#prompt", "Enter")  # the refused message is there again
    expect(page.locator(".turn.assistant .usage", has_text="dropped")).to_be_visible()


def test_hostile_text_stays_text_in_the_chat_and_in_the_tree(page: Page, server: ServeProcess) -> None:
    say(page, HOSTILE)
    assert page.locator(".turn.user .said").text_content() == HOSTILE
    server.json("/v1/completions", {"prompt": HOSTILE * 2, "max_tokens": 1})
    expect(page.locator(".run .begins", has_text="<img src=x")).to_have_count(1)
    expect(page.locator(".request .why", has_text="img src=x onerror")).not_to_have_count(0)
    nothing_of_it(page)


def test_a_hostile_reply_stays_text(page: Page) -> None:
    stream(page, {"delta": {"content": HOSTILE + "\u202e\u0000"}})
    say(page, "Hi")
    assert said(page).startswith(HOSTILE)
    page.get_by_role("button", name="Source").click()
    expect(page.locator(".source")).to_contain_text(HOSTILE)
    nothing_of_it(page)


def nothing_of_it(page: Page) -> None:
    assert page.evaluate("window.pwned") is None
    inside = "main img, main script, main svg, main a, main iframe"
    expect(page.locator(inside)).to_have_count(0)


@pytest.mark.parametrize("how", ["refused", "in mid-stream", "broken off", "not JSON"])
def test_an_error_is_said_where_it_happened_and_the_chat_goes_on(page: Page, open_page: OpenPage, how: str) -> None:
    error = {"error": {"message": "<b>too busy</b>", "type": "server_error", "param": None, "code": None}}
    half = 'data: {"choices": [{"index": 0, "delta": {"content": "Half"}}]}\n\n'
    stream = {"content_type": "text/event-stream"}
    answer, expected = {
        "refused": (
            {"status": 429, "json": error, "headers": {"Retry-After": "3"}},
            "<b>too busy</b> (try again in 3 s)",
        ),
        "in mid-stream": ({"body": f"{half}data: {json.dumps(error)}\n\n", **stream}, "<b>too busy</b>"),
        "broken off": ({"body": half, **stream}, "the stream broke off"),
        "not JSON": ({"status": 502, "body": "<html>proxy"}, "the server responded with 502"),
    }[how]
    open_page.expected.append("Failed to load resource")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")  # a message that is refused is soon in the box again
    expect(page.locator(".turn.assistant .failure")).to_contain_text(expected)
    page.unroute("**/v1/chat/completions")
    if how == "refused":
        page.press("#prompt", "Enter")
    else:
        page.click("#again")
    expect(page.locator(".turn.assistant .cached")).to_be_visible()


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_server_that_is_gone_is_named_in_the_chat_and_the_inspector(
    page: Page, open_page: OpenPage, server: ServeProcess, when: str
) -> None:
    gone = f"The server at {server.url.removeprefix('http://')} does not answer; is it still running?"
    open_page.expected.append("Failed to load resource: net::ERR_CONNECTION_REFUSED")
    expect(page.locator("#live")).to_have_text("Live")
    if when == "before":
        page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
        page.route("**/health", lambda route: route.abort("connectionrefused"))
        expect(page.locator("#live")).to_have_text("Offline")
        expect(page.locator("#live")).to_have_attribute("aria-pressed", "false")
        expect(page.locator("#cache-error")).to_have_text(gone)
        expect(page.locator("#health")).to_have_text("no connection")
        page.evaluate("document.querySelector('#model').textContent = ''")
    else:
        page.evaluate(
            """() => {
                const ask = window.fetch;
                const half = 'data: {"choices": [{"index": 0, "delta": {"content": "Half"}}]}\\n\\n';
                window.fetch = async (path, options) => path.endsWith("completions") ? new Response(new ReadableStream({
                    start(stream) { stream.enqueue(new TextEncoder().encode(half)); },
                    async pull(stream) {
                        await new Promise(done => setTimeout(done, 100));
                        stream.error(new TypeError("network error"));
                    },
                })) : ask(path, options);
            }"""
        )
    say(page, "Hi")
    expect(page.locator(".turn .failure")).to_have_text(gone)
    assert said(page) == ("" if when == "before" else "Half")
    if when == "before":  # it is back
        page.unroute("**/v1/**")
        page.unroute("**/health")
        expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator("#model")).to_contain_text("smol")
