"""What all scans of a reply have in common: pieces do not matter, and one that goes back has never read on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.reasoning_format import ReasoningFormat
from radixlm.runtime.chat.reasoning_splitter import splitter_of
from radixlm.runtime.chat.text_rules.reply_text import ReplyText, Stops
from radixlm.runtime.chat.text_rules.text_search import PatternScan, StringScan
from radixlm.runtime.chat.tools.known_formats import GEMMA, HERMES, LFM, QWEN_CODER
from radixlm.tokenizer_fix.stream_decoder import StreamDecoder

TAGS = ReasoningFormat("<t>\n", "\n</t>\n\n")
HEADERS = ReasoningFormat("<|c|>analysis<|m|>", "<|end|><|c|>final<|m|>", bare="<|c|>final<|m|>")
WORDS = ["<t>", "\n", "</t>", "<", "t", "ab", "b", "c", " ", "<|c|>analysis<|m|>", "<|c|>final<|m|>", "<|end|>", "1."]
BYTES = [b"a", b" ", b"\xc3", b"\xa9", b"\xff", b"\xf0\x9f", b"\x98\x80", b"<t>", b"</t>", b"\n", b"b c"]


def decoder() -> StreamDecoder:
    ids = range(len(BYTES))
    return StreamDecoder(
        BYTES.__getitem__, skipped_ids=(), strips_leading_space=True, replace_each_byte=False, prompt_ids=ids[2:3]
    )


def reply_text() -> ReplyText:
    return ReplyText(decoder(), splitter_of(TAGS, ""), Stops(["b c"], [r"a+ "]), ["ab"])


OF_TEXT: dict[str, Callable[[], Any]] = {
    "tags": lambda: splitter_of(TAGS, ""),
    "tags that the prompt opened": lambda: splitter_of(TAGS, "<t>\n"),
    "headers": lambda: splitter_of(HEADERS, ""),
    "stops": lambda: Stops(["ab", "bc"], [r"\n\d\."]),
    "strings": lambda: StringScan(["ab", "b c"], ignores_case=True),
    "expressions": lambda: PatternScan([r"a+b", r"^c"]),
}
OF_TOKENS: dict[str, Callable[[], Any]] = {"decoder": decoder, "reply": reply_text}
ALL = [(make, WORDS) for make in OF_TEXT.values()] + [(make, range(len(BYTES))) for make in OF_TOKENS.values()]


def push(scan: Any, piece: Any) -> Any:
    return scan.push(piece, may_stop=True) if isinstance(scan, ReplyText) else scan.push(piece)


def rest(scan: Any) -> Any:
    """What was held back; of a search, where that begins."""
    if not hasattr(scan, "finish"):
        return scan.open_from
    return scan.finish(may_stop=True) if isinstance(scan, ReplyText) else scan.finish()


@pytest.mark.parametrize(("make", "alphabet"), ALL, ids=[*OF_TEXT, *OF_TOKENS])
@settings(deadline=None)
@given(data=st.data())
def test_a_scan_that_went_back_never_read_on(
    make: Callable[[], Any], alphabet: Sequence[Any], data: st.DataObject
) -> None:
    pieces = st.lists(st.sampled_from(alphabet), max_size=12)
    before, taken_back, after = data.draw(pieces), data.draw(pieces), data.draw(pieces)
    went_back, straight = make(), make()
    for piece in before:
        assert push(went_back, piece) == push(straight, piece)
    state = went_back.state()
    for piece in taken_back:
        push(went_back, piece)
    rest(went_back)
    went_back.restore(state)
    assert went_back.state() == straight.state() == state
    assert [push(went_back, piece) for piece in after] == [push(straight, piece) for piece in after]
    assert rest(went_back) == rest(straight)


@pytest.mark.parametrize("name", ["tags", "tags that the prompt opened", "headers", "stops"])
@settings(deadline=None)
@given(pieces=st.lists(st.sampled_from(WORDS), max_size=12), data=st.data())
def test_how_a_text_is_cut_does_not_matter(name: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(OF_TEXT[name](), cut) == joined(OF_TEXT[name](), [text])


def joined(scan: Any, pieces: Sequence[str]) -> tuple[str, ...]:
    """All that a scan of text returns, its texts each joined."""
    said = [*(push(scan, piece) for piece in pieces), rest(scan)]
    texts = [each if isinstance(each, tuple) else (each,) for each in said]
    return tuple(map("".join, zip(*texts, strict=True)))


@pytest.mark.parametrize("format", [HERMES, QWEN_CODER, LFM, GEMMA], ids=["json", "tags", "python", "gemma"])
@settings(deadline=None)
@given(data=st.data())
def test_readers_of_arguments_hold_back_what_is_not_certain(format: Any, data: st.DataObject) -> None:
    letters = st.text(alphabet="ab \"'\\<>{}[](),:=\n|é", max_size=8)
    arguments = data.draw(st.fixed_dictionaries({"a": letters, "n": st.integers(-9, 99), "b": st.booleans()}))
    schema = {"properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}}}
    text = format.arguments.written(json.dumps(arguments)) + format.end + "behind"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = format.arguments.reader(schema, format.end_tags)
    wanted = whole.push(text)
    cut = format.arguments.reader(schema, format.end_tags)
    said = "".join(cut.push(text[start:end]) for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
    assert said == wanted and json.loads(said) == arguments
