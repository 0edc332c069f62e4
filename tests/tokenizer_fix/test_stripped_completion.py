"""Which raw prompts lose the token of their last space, on every tokenizer: those whose text a reply can make whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import Tokenizer

from .conftest import ALWAYS, LoadTokenizer

STRIPPED = ("Answer: ", "[INST] Hi [/INST] ", "Hello ", "total = ", "1. ", "é ", "日本 ", '"a", ', "a  b ", "x\n- ")
FED_AS_IT_IS = (
    *("Answer:", "Answer:\n", "Answer:  ", "a   ", "if x:\n    ", "\tif x: \t ", "- a\n  ", "a\n ", "a\r\n ", "a\t "),
    *("a\u00a0 ", "a \u00a0", "a\u3000 ", " ", "  ", ""),
)


def stripped_ids(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """The ids that a text is fed as if it loses its last token; None if it is fed as it is."""
    prepared = tokenizer.prepare_completion(text, strips_suffix=True)
    whole = tokenizer.encode(text, parse_special=True)
    if prepared.space_id is None:
        assert list(prepared.ids) == whole and not prepared.swallow_leading_space
        assert prepared == tokenizer.prepare_completion(text)
        return None
    assert [*prepared.ids, prepared.space_id] == whole
    assert prepared.num_match == len(prepared.ids) and prepared.swallow_leading_space and prepared.text == text
    return list(prepared.ids)


@pytest.mark.parametrize("text", STRIPPED)
def test_a_lone_space_is_stripped(tokenizer: Tokenizer, text: str) -> None:
    ids = stripped_ids(tokenizer, text)
    assert ids == tokenizer.encode(text[:-1], parse_special=True)


@pytest.mark.parametrize("text", FED_AS_IT_IS)
def test_indentation_and_other_ends_are_fed_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    assert stripped_ids(tokenizer, text) is None


@settings(deadline=None, max_examples=60)
@pytest.mark.parametrize("name", ALWAYS)
@given(st.text(st.sampled_from("ab1é.:\n\t  \u00a0日"), max_size=8))
def test_what_is_stripped_is_the_encoding_of_the_text_before(
    load_tokenizer: LoadTokenizer, name: str, text: str
) -> None:
    tokenizer = load_tokenizer(name)
    ids = stripped_ids(tokenizer, text + " ")
    assert ids is None or (ids == tokenizer.encode(text) and not text[-1:].isspace())


@pytest.mark.parametrize("text", ["<s> ", "</s><s> ", "<|im_start|> "])
def test_a_space_behind_control_tokens_alone_is_fed(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text[:-1], parse_special=True)
    if set(ids) <= tokenizer.profile.special_ids:
        assert stripped_ids(tokenizer, text) is None
    else:  # text for this tokenizer
        assert stripped_ids(tokenizer, text) == ids


def test_token_ids_are_stripped_of_the_same_token_whatever_is_before(tokenizer: Tokenizer) -> None:
    for text in ("Answer: ", "Hello "):
        *ids, suffix = tokenizer.encode(text)
        prepared = tokenizer.prepare_completion([*ids, suffix], strips_suffix=True)
        assert (list(prepared.ids), prepared.space_id, prepared.text) == (ids, suffix, None)
        assert prepared.num_match == len(ids) and prepared.swallow_leading_space
        assert tokenizer.prepare_completion([*ids, suffix]).ids == (*ids, suffix)
    letters = [token_id for letter in "Hi" for token_id in tokenizer.encode_inside(letter)]
    assert tokenizer.prepare_completion([*letters, suffix], strips_suffix=True).ids == tuple(letters)


@pytest.mark.parametrize("text", ["Answer:\n ", "Answer:  ", " ", "Answer:"])
def test_token_ids_that_end_in_more_than_a_lone_space_are_fed_as_they_are(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.prepare_completion(ids, strips_suffix=True).ids == tuple(ids)
    suffix = tokenizer.profile.suffix_ids[0]
    for more in ([suffix], [suffix, suffix]):
        ids = [*tokenizer.encode("Answer:"), suffix, *more]
        assert tokenizer.prepare_completion(ids, strips_suffix=True).ids == tuple(ids)


def test_a_long_prompt_that_goes_on_is_stripped_without_encoding_it_whole_again(load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("smollm2")
    text = "the tree has a root and some leaves " * 20
    first = tokenizer.prepare_completion(text + "Answer: ", seam_of=b"goes on", strips_suffix=True)
    second = tokenizer.prepare_completion(text + "Answer: yes. Why? ", seam_of=b"goes on", strips_suffix=True)
    assert first.num_known == 0 < second.num_known < len(second.ids)
    assert list(second.ids) == tokenizer.encode(text + "Answer: yes. Why?")
    tokenizer.forget_texts(b"goes on")
