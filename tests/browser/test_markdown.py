"""Replies as Markdown in a real browser: what is drawn, what is copied, and what a long reply costs."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import Page, expect

from .conftest import shots
from .test_chat import said, say, stream

REPLY = """## Sorting

Use **`sorted`**, which is *stable* & returns a list; `~~old~~` is ~~gone~~. See [the docs](https://docs.python.org/3/)
or [this](javascript:alert(1)).

1. Read the &lt;file&gt;:
   - line by line
   - [x] with a key
2. Sort it.

| call | cost |
|---|--:|
| `sorted` | n log n |
| `min` | n |

> Timsort is stable.

```python
def by_length(words: list[str]) -> list[str]:
    # the shortest first
    return sorted(words, key=len)[:10]
```

![a picture](https://example.com/x.png) <b>not bold</b>

---

```
no language ``` inside
```

The end"""


def test_markdown_is_drawn_as_elements_and_code_has_colours(page: Page) -> None:
    stream(page, {"delta": {"content": REPLY}})
    say(page, "Hi")
    turn = page.locator(".turn.assistant .rendered")
    expect(turn.locator("h4")).to_have_text("Sorting")
    expect(turn.locator("strong > code")).to_have_text("sorted")
    expect(turn.locator("em")).to_have_text("stable")
    expect(turn.locator("del")).to_have_text("gone")
    expect(turn.locator("ol > li")).to_have_count(2)
    expect(turn.locator("ol ul > li").nth(1)).to_have_text("☑ with a key")
    expect(turn.locator("ol > li").first).to_contain_text("Read the <file>:")
    expect(turn.locator("td").nth(1)).to_have_css("text-align", "right")
    expect(turn.locator("blockquote")).to_have_text("Timsort is stable.")
    code = turn.locator(".code pre")
    expect(code.nth(0).locator(".tk-keyword").first).to_have_text("def")
    expect(code.nth(0)).to_have_text(REPLY.split("```python\n")[1].split("\n```")[0])
    expect(code.nth(1)).to_have_text("no language ``` inside")
    expect(turn.locator("p").last).to_have_text("The end")
    links = turn.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel, a.target])")
    assert links == [
        [address, "noopener noreferrer", "_blank"]
        for address in ("https://docs.python.org/3/", "https://example.com/x.png")
    ]
    expect(turn.locator("img, b")).to_have_count(0)
    expect(turn).to_contain_text("<b>not bold</b>")


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_reply_in_pieces_is_drawn_as_it_is_whole(page: Page, size: int) -> None:
    stream(page, {"delta": {"content": REPLY}})
    say(page, "Hi")
    expect(page.locator(".tk-keyword").first).to_be_visible()
    whole = page.locator(".rendered").inner_html()
    pieces = [REPLY[start : start + size] for start in range(0, len(REPLY), size)]
    drawn = page.evaluate(
        """async pieces => {
            const { MarkdownText } = await import("./static/markdown.js");
            const element = document.createElement("div");
            const text = new MarkdownText(element);
            const shown = [];
            for (const piece of pieces) {
                text.add(piece);
                text.draw(false);
                shown.push(element.textContent);
            }
            text.draw(true);
            await new Promise(done => setTimeout(done, 200));
            return [element.innerHTML, shown];
        }""",
        pieces,
    )
    assert drawn[0] == whole
    if size == 1:  # marks are never seen that go away when their text is whole
        assert not [text for text in drawn[1] if text.endswith(("*", "`", "~", "#", "|", "]("))]


def test_a_long_reply_costs_what_its_length_says(page: Page) -> None:
    """Characters that are cut into tokens, for a list, a paragraph and code, while they grow by four letters."""
    cut = page.evaluate(
        """async () => {
            const { MarkdownText } = await import("./static/markdown.js");
            const { Lexer } = await import("./static/vendor/marked.js");
            const lex = Lexer.prototype.lex;
            let numCut = 0;
            Lexer.prototype.lex = function (text) { numCut += text.length; return lex.call(this, text); };
            const costs = [];
            for (const [start, unit] of [["", "- an item\\n"], ["", "some words "], ["```js\\n", "let x = 1;\\n"]]) {
                const text = start + unit.repeat(4000);
                const element = document.createElement("div");
                const markdown = new MarkdownText(element);
                numCut = 0;
                for (let at = 0; at < text.length; at += 4) {
                    markdown.add(text.slice(at, at + 4));
                    markdown.draw(false);
                }
                markdown.draw(true);
                costs.push(numCut / text.length);
            }
            Lexer.prototype.lex = lex;
            return costs;
        }"""
    )
    assert max(cut) < 400, cut  # drawn at each piece, it would be 5,000 times


def test_code_and_replies_are_copied_as_they_were_written(page: Page) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    stream(page, {"delta": {"content": REPLY}})
    say(page, "Hi")
    page.locator(".code").first.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == REPLY.split("```python\n")[1].split("\n```")[0]
    page.locator(".turn.assistant .who").get_by_role("button", name="Copy").click()
    expect(page.locator(".who").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == REPLY


def test_reasoning_is_beside_the_reply_and_not_sent_back(page: Page) -> None:
    stream(page, {"delta": {"reasoning_content": "It asks for *x*."}}, {"delta": {"content": "X."}})
    say(page, "Hi")
    expect(page.locator(".reasoning .thought")).to_have_text("It asks for *x*.")
    expect(page.locator(".reasoning .thought")).to_be_hidden()
    assert said(page) == "X."
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "More")
    assert [turn["content"] for turn in request.value.post_data_json["messages"]] == ["Hi", "X.", "More"]


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_markdown_fits_windows(page: Page, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    stream(page, {"delta": {"content": REPLY + "\n\n```js\n" + "let x = 1; " * 40 + "\n```"}})
    say(page, "How do I sort words by length?")
    page.locator(".log").evaluate("log => log.scrollTo(0, 0)")
    expect(page.locator(".tk-keyword").first).to_be_attached()
    shots(page, f"markdown-{width}-{scheme}")
    assert page.locator("#chat").evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.locator(".log").evaluate("e => e.scrollWidth <= e.clientWidth")
    assert json.loads(
        page.evaluate(
            "JSON.stringify([...document.querySelectorAll('.code pre')].map(e => e.scrollWidth > e.clientWidth))"
        )
    )[-1]
