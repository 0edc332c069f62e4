"""Streaming says what decoding says, sooner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import InvalidTokenId, StreamDecoder, Tokenizer
from radixlm.tokenizer_fix.stream_decoder import decode_utf8

LoadTokenizer = Callable[[str], Tokenizer]

TEXTS = st.text() | st.text(alphabet="aé字😀 \n\u0301") | st.sampled_from([" Hello", "Hello ", "  ", ""])


def deltas(decoder: StreamDecoder, ids: Sequence[int]) -> list[str]:
    return [*map(decoder.push, ids), decoder.finish()]


def draw_ids(tokenizer: Tokenizer, data: st.DataObject) -> list[int]:
    """Random ids, many of them special, of spaces, or parts of characters."""
    usual = st.integers(0, tokenizer.vocab_size - 1)
    odd = [*sorted(tokenizer.profile.special_ids)[:3], *tokenizer.profile.suffix_ids, *range(3, 12)]
    odd += tokenizer.encode("é字😀\n \ufffd")
    parts = st.lists(usual | st.sampled_from(odd), max_size=4) | TEXTS.map(tokenizer.encode)
    return [token_id for part in data.draw(st.lists(parts, max_size=6)) for token_id in part]


@settings(deadline=None)  # a large vocabulary loads within the first example
@given(data=st.data())
def test_deltas_are_the_decoding_of_all_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = draw_ids(tokenizer, data)
    assert "".join(deltas(tokenizer.stream(), ids)) == tokenizer.decode(ids)


@settings(deadline=None)
@given(data=st.data())
def test_a_reply_is_the_decoding_of_all_without_that_of_the_prompt(tokenizer: Tokenizer, data: st.DataObject) -> None:
    prompt, reply = draw_ids(tokenizer, data), draw_ids(tokenizer, data)
    whole = tokenizer.decode(prompt + reply)
    text = "".join(deltas(tokenizer.stream(prompt_ids=prompt), reply))
    before = tokenizer.stream()
    assert "".join(map(before.push, prompt)) + text == whole  # a character that the prompt breaks off is the reply's
    if not before.finish():
        assert tokenizer.decode(prompt) + text == whole


@settings(deadline=None)
@given(data=st.data())
def test_text_arrives_with_its_last_byte(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(TEXTS))
    decoder = tokenizer.stream()
    said = ""
    for n, token_id in enumerate(ids, start=1):
        said += decoder.push(token_id)
        # All whole characters are out: what is still held is less than one.
        assert tokenizer.decode(ids[:n]).rstrip("\ufffd") == said.rstrip("\ufffd")


@settings(deadline=None)
@given(chunks=st.lists(st.binary(max_size=5)), each=st.booleans())
def test_bytes_in_chunks_decode_as_at_once(chunks: list[bytes], each: bool) -> None:
    whole, rest = decode_utf8(b"".join(chunks), replace_each_byte=each, final=True)
    assert rest == b""
    text, pending = "", b""
    for chunk in chunks:
        more, pending = decode_utf8(pending + chunk, replace_each_byte=each)
        assert len(pending) <= 3
        text += more
    assert text + decode_utf8(pending, replace_each_byte=each, final=True)[0] == whole
    if not each:
        assert whole == b"".join(chunks).decode(errors="replace")


def test_a_character_of_four_tokens_comes_whole(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("tiny_spm")
    ids = tokenizer.encode("Hello 😀")
    assert deltas(tokenizer.stream(), ids) == ["Hello", " ", "", "", "", "😀", ""]


def test_a_character_cut_off_by_the_end_is_replaced(load_tokenizer: LoadTokenizer) -> None:
    spm = load_tokenizer("tiny_spm")
    assert deltas(spm.stream(), spm.encode("Hi😀")[:-1]) == ["Hi", "", "", "", "\ufffd\ufffd\ufffd"]
    byte_level = load_tokenizer("smollm2")
    ids = byte_level.encode("𓀀")
    assert len(ids) > 2
    assert deltas(byte_level.stream(), ids[:-1])[-1] == "\ufffd"


def test_a_wrong_byte_holds_nothing_back(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("tiny_spm")
    decoder = tokenizer.stream(prompt_ids=tokenizer.encode("Hello"))
    assert [decoder.push(3 + 0x80) for _ in range(3)] == ["\ufffd"] * 3


def test_special_tokens_are_not_said(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("smollm2")
    hello = tokenizer.encode("Hello")
    assert deltas(tokenizer.stream(), [1, *hello, 2]) == ["", "Hello", "", ""]


@pytest.mark.parametrize("prompt", ["", "<s>"])
def test_the_dummy_space_of_a_text_is_not_said(load_tokenizer: LoadTokenizer, prompt: str) -> None:
    tokenizer = load_tokenizer("tiny_spm")
    decoder = tokenizer.stream(prompt_ids=tokenizer.encode(prompt, parse_special=True))
    assert deltas(decoder, tokenizer.encode("Hello the")) == ["Hello", " the", ""]


def test_the_space_between_prompt_and_reply_is_said(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("tiny_spm")
    decoder = tokenizer.stream(prompt_ids=tokenizer.encode("[INST] Hi [/INST]"))
    assert deltas(decoder, tokenizer.encode("Hello the")) == [" Hello", " the", ""]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(" Paris", "Paris"), ("  Paris", " Paris"), ("Paris", "Paris"), (" ", ""), ("", "")],
)
def test_one_space_is_swallowed(load_tokenizer: LoadTokenizer, reply: str, expected: str) -> None:
    tokenizer = load_tokenizer("smollm2")
    prompt_ids = tokenizer.encode("Assistant:")
    decoder = tokenizer.stream(prompt_ids=prompt_ids, swallow_leading_space=True)
    assert "".join(deltas(decoder, tokenizer.encode(reply))) == expected


def test_a_refused_id_changes_nothing(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("tiny_spm")
    decoder = tokenizer.stream()
    *first, last = (3 + byte for byte in "😀".encode())
    for token_id in first:
        decoder.push(token_id)
    with pytest.raises(InvalidTokenId):
        decoder.push(tokenizer.vocab_size)
    assert decoder.push(last) == "😀"
