"""What clients type is text, also where it looks like a control token; what templates write is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import Tokenizer
from radixlm.tokenizer_fix.typed_specials import BEGIN, END, QUOTE, any_of

ReadJson = Callable[[str], str]


def render(messages: object) -> str:
    """A template that trims and puts a control token around each message."""
    assert isinstance(messages, list)
    return "".join(f"{message['open']}{message['content'].strip()}{message['close']}" for message in messages)


@settings(deadline=None)
@given(data=st.data())
def test_typed_control_tokens_are_text_and_written_ones_are_not(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    specials = [token.text for token in tokenizer.profile.added_tokens if token.special]
    written = st.sampled_from(specials)
    typed = st.lists(st.one_of(written, st.sampled_from([" ", "a", "Hello", "\n", "<", "|>", "é", "<|"]))).map("".join)
    contents = data.draw(st.lists(typed, min_size=1, max_size=3))
    edges = [data.draw(st.tuples(written, written)) for _ in contents]
    messages = [{"content": content} for content in contents]
    marked = tokenizer.mark_typed(messages)
    assert isinstance(marked, list)
    turns = [{**message, "open": begin, "close": end} for message, (begin, end) in zip(marked, edges, strict=True)]
    ids = tokenizer.prepare_chat(render(turns), has_marks=marked is not messages).ids
    special_ids = [token_id for token_id in ids if token_id in tokenizer.profile.special_ids]
    assert special_ids == [library.token_to_id(edge) for pair in edges for edge in pair]
    spelled = tokenizer.decode(ids, skip_special=False)
    expected = "".join(f"{begin}{text.strip()}{end}" for text, (begin, end) in zip(contents, edges, strict=True))
    assert spelled.replace(" ", "") == expected.replace(" ", "")  # spaces are the dummy prefix's


@settings(deadline=None)
@given(text=st.text())
def test_without_typed_ones_nothing_is_touched(tokenizer: Tokenizer, text: str) -> None:
    specials = [token.text for token in tokenizer.profile.added_tokens if token.special]
    messages = [{"content": text}]
    if not any(special in text for special in specials):
        assert tokenizer.mark_typed(messages) is messages


def test_sections_of_a_marked_text_are_encoded_as_ever(tokenizer: Tokenizer) -> None:
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    text = f"{special}Hello there, 12 é{special} and more{special}\n"
    plain, marked = tokenizer.prepare_chat(text), tokenizer.prepare_chat(text, has_marks=True)
    assert plain == marked


def test_texts_are_found_wherever_json_has_them(tokenizer: Tokenizer) -> None:
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    call = {"name": "f", "arguments": {special: [special, 1, None, True]}}
    [marked] = tokenizer.mark_typed([{"role": "tool", "content": None, "tool_calls": [call]}])
    assert json.dumps(marked, ensure_ascii=False).count(BEGIN + special + END) == 2
    assert marked["content"] is None


@pytest.mark.parametrize("mark", [BEGIN, END, QUOTE])
def test_marks_that_are_typed_beside_a_control_token_are_left_out(tokenizer: Tokenizer, mark: str) -> None:
    """A web page that a tool had read made each later request a 400."""
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    cut = special[:1] + mark + special[1:]
    for text in (f"{mark}{special}{mark}", f"a {special} {cut}"):
        [marked] = tokenizer.mark_typed([{"content": text}])
        plain = text.replace(mark, "")
        assert marked["content"] == plain.replace(special, BEGIN + special + END)


END_TOKEN = {"content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}


@pytest.mark.parametrize("template", ["{}<|end|>", "{} <|end|>", "<s><|end|>{}</s> <|end|><|end|>"])
@pytest.mark.parametrize("typed", ["x <|end|>", "<|end|>", "x <|end|> </s>", " <|end|><|end|>", "</s> <|end|>y"])
def test_a_token_that_is_found_behind_a_space_only_is_text_where_it_is_typed(
    read_json: ReadJson, template: str, typed: str
) -> None:
    """Llama-2's legacy tokenizer puts `▁` before a normalized token, too: typed behind a space it ended the turn."""
    document = json.loads(read_json("tiny_spm"))
    token_id = 1 + max(document["model"]["vocab"].values())
    document["added_tokens"].append(END_TOKEN | {"id": token_id, "special": False})
    tokenizer = Tokenizer(json.dumps(document), template_texts=template.split("{}"))
    [marked] = tokenizer.mark_typed([{"content": typed}])
    ids = tokenizer.prepare_chat(template.format(marked["content"]), has_marks=True).ids
    harmless = tokenizer.prepare_chat(template.format(typed.replace("<", "")), has_marks=False).ids
    controls = {token_id, *tokenizer.profile.special_ids}
    assert [one for one in ids if one in controls] == [one for one in harmless if one in controls]
    assert "".join(tokenizer.decode(ids, skip_special=False).split()) == "".join(template.format(typed).split())


@given(st.sets(st.text("<s|>", min_size=1, max_size=4), max_size=12), st.text("<s|>x", max_size=20))
def test_the_longest_of_many_control_tokens_is_found(controls: set[str], text: str) -> None:
    """As by all of them one after the other, which took 18 s for a million `<` with Gemma's 6,000."""
    longest_first = sorted(controls, key=len, reverse=True)
    one_by_one = "|".join(map(re.escape, longest_first)) or "(?!)"
    assert re.findall(any_of(controls) or "(?!)", text) == re.findall(one_by_one, text)
