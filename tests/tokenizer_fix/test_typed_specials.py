"""What clients type is text, also where it looks like a control token; what templates write is not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import Tokenizer
from radixlm.tokenizer_fix.typed_specials import BEGIN, END, GUARDS, QUOTE, any_of

ReadJson = Callable[[str], str]
MARKS = (BEGIN, END, QUOTE, *GUARDS)


Edges = list[tuple[str, str]]


def template(edges: Edges) -> Callable[[Sequence[Any]], str]:
    """A template that trims and puts a control token around each message."""

    def render(values: Sequence[Any]) -> str:
        return "".join(
            f"{begin}{each['content'].strip()}{end}" for each, (begin, end) in zip(values, edges, strict=True)
        )

    return render


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
    text, has_guards = tokenizer.render_typed([{"content": content} for content in contents], template(edges))
    ids = tokenizer.prepare_chat(text, has_marks=has_guards).ids
    special_ids = [token_id for token_id in ids if token_id in tokenizer.profile.special_ids]
    assert special_ids == [library.token_to_id(edge) for pair in edges for edge in pair]
    spelled = tokenizer.decode(ids, skip_special=False)
    expected = "".join(f"{begin}{text.strip()}{end}" for text, (begin, end) in zip(contents, edges, strict=True))
    assert spelled.replace(" ", "") == expected.replace(" ", "")  # spaces are the dummy prefix's


@settings(deadline=None)
@given(text=st.text().filter(lambda text: not any(mark in text for mark in MARKS)))
def test_without_typed_ones_nothing_is_guarded(tokenizer: Tokenizer, text: str) -> None:
    specials = [token.text for token in tokenizer.profile.added_tokens if token.special]
    edge = specials[0]
    if not any(special in text for special in specials):
        rendered = tokenizer.render_typed([{"content": text}], template([(edge, edge)]))
        assert rendered == (f"{edge}{text.strip()}{edge}", False)


def test_sections_of_a_marked_text_are_encoded_as_ever(tokenizer: Tokenizer) -> None:
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    text = f"{special}Hello there, 12 é{special} and more{special}\n"
    plain, marked = tokenizer.prepare_chat(text), tokenizer.prepare_chat(text, has_marks=True)
    assert plain == marked


def test_texts_are_guarded_wherever_json_has_them(tokenizer: Tokenizer) -> None:
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    call = {"name": "f", "arguments": {special: [special, 1, None, True]}}
    message = {"role": "tool", "content": None, "tool_calls": [call]}
    text, has_guards = tokenizer.render_typed([message], lambda values: json.dumps(values[0], ensure_ascii=False))
    assert has_guards and special not in text
    assert "".join(tokenizer.decode(tokenizer.prepare_chat(text, has_marks=True).ids, skip_special=False).split()) == (
        "".join(json.dumps(message, ensure_ascii=False).split())
    )


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("around", ["", "{special}"])
def test_noncharacters_that_guards_are_made_of_are_left_out(tokenizer: Tokenizer, mark: str, around: str) -> None:
    special = next(token.text for token in tokenizer.profile.added_tokens if token.special)
    content = f"a{mark}b" + around.format(special=special)
    edges = [(special, special)]
    with_mark = tokenizer.render_typed([{"content": content}], template(edges))
    assert with_mark == tokenizer.render_typed([{"content": content.replace(mark, "")}], template(edges))


END_TOKEN = {"content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}


@pytest.mark.parametrize("source", ["{}<|end|>", "{} <|end|>", "<s><|end|>{}</s> <|end|><|end|>"])
@pytest.mark.parametrize("typed", ["x <|end|>", "<|end|>", "x <|end|> </s>", " <|end|><|end|>", "</s> <|end|>y"])
def test_a_token_that_is_found_behind_a_space_only_is_text_where_it_is_typed(
    read_json: ReadJson, source: str, typed: str
) -> None:
    """Llama-2's legacy tokenizer puts `▁` before a normalized token, too: typed behind a space it ended the turn."""
    document = json.loads(read_json("tiny_spm"))
    token_id = 1 + max(document["model"]["vocab"].values())
    document["added_tokens"].append(END_TOKEN | {"id": token_id, "special": False})
    tokenizer = Tokenizer(json.dumps(document), template_texts=source.split("{}"))
    text, has_guards = tokenizer.render_typed([typed], lambda values: source.format(*values))
    ids = tokenizer.prepare_chat(text, has_marks=has_guards).ids
    harmless = tokenizer.prepare_chat(source.format(typed.replace("<", "")), has_marks=False).ids
    controls = {token_id, *tokenizer.profile.special_ids}
    assert [one for one in ids if one in controls] == [one for one in harmless if one in controls]
    assert "".join(tokenizer.decode(ids, skip_special=False).split()) == "".join(source.format(typed).split())


@given(st.sets(st.text("<s|>", min_size=1, max_size=4), max_size=12), st.text("<s|>x", max_size=20))
def test_the_longest_of_many_control_tokens_is_found(controls: set[str], text: str) -> None:
    """As by all of them one after the other, which took 18 s for a million `<` with Gemma's 6,000."""
    longest_first = sorted(controls, key=len, reverse=True)
    one_by_one = "|".join(map(re.escape, longest_first)) or "(?!)"
    assert re.findall(any_of(controls) or "(?!)", text) == re.findall(one_by_one, text)
