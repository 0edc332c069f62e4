"""What ids spell, and how a prompt goes on from the middle of a token: the same bytes between the same specials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import Tokenizer
from radixlm.tokenizer_fix.spelled_prompt import MARK, SpelledPrompt, is_mark, special_mark

LoadTokenizer = Callable[[str], Tokenizer]

TEXTS = st.lists(
    st.sampled_from(
        [
            "Hello",
            " world",
            " ",
            "  ",
            "\n",
            "\t",
            "é",
            "e\u0301",
            "漢字",
            "😀",
            "'s",
            " 12345",
            "def f(x):\n    return x",
            "▁",
            "<|x|>",
        ]
    )
    | st.text(max_size=5),
    max_size=8,
).map("".join)
PROSE = "it is not what we'd have read; the rest was 12 of 24, and so it's done."
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def specials(tokenizer: Tokenizer) -> list[int]:
    return sorted(tokenizer.profile.special_ids - {tokenizer.profile.unk_token_id})


@st.composite
def prompts(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Sections of text between special tokens, each encoded by itself, as if one were set after another."""
    ids: list[int] = []
    for text in draw(st.lists(TEXTS, min_size=1, max_size=4)):
        ids += tokenizer.encode(text)
        ids += draw(st.lists(st.sampled_from(specials(tokenizer)), max_size=2))
    return ids


@SETTINGS
@given(data=st.data())
def test_each_token_is_spelled_at_its_place(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(prompts(tokenizer))
    spelled = tokenizer.spelled(ids)
    assert spelled.starts[0] == 0 and spelled.starts[-1] == len(spelled.text) and len(spelled.starts) == len(ids) + 1
    for index, token_id in enumerate(ids):
        piece = spelled.text[spelled.starts[index] : spelled.starts[index + 1]]
        is_text = token_id not in tokenizer.profile.special_ids and MARK not in tokenizer.token_bytes(token_id)
        assert is_mark(piece) != is_text
        assert piece == (tokenizer.token_bytes(token_id) if is_text else special_mark(token_id))


@SETTINGS
@given(data=st.data())
def test_from_every_character_on_the_tail_spells_the_rest_of_the_prompt(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(prompts(tokenizer))
    spelled = tokenizer.spelled(ids)
    offset = data.draw(st.integers(0, len(spelled.text)))
    if not is_character(tokenizer, spelled, offset) or (tail := spelled.tail(offset)) is None:
        return
    extra, index = tail
    rest = [*extra, *ids[index:]]
    assert tokenizer.spelled(rest).text == spelled.text[offset:]
    later = [token_id for token_id, start in zip(ids, spelled.starts, strict=False) if start >= offset]
    assert [one for one in rest if is_mark(spelled.spell(one))] == [one for one in later if is_mark(spelled.spell(one))]
    if spelled.canonical_index(offset) is not None:
        assert not extra and index == spelled.canonical_index(offset)


@SETTINGS
@given(data=st.data())
def test_a_tail_up_to_a_cut_goes_on_as_the_whole_section_would(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = tokenizer.encode("So it is, " + data.draw(TEXTS) + PROSE + data.draw(TEXTS) + PROSE)
    up_to_a_cut = tokenizer.spelled(ids)
    all_of_it = SpelledPrompt(ids, up_to_a_cut.spell, tokenizer.encode_inside)
    offset = data.draw(st.integers(0, len(up_to_a_cut.text)))
    if not is_character(tokenizer, up_to_a_cut, offset) or up_to_a_cut.canonical_index(offset) is not None:
        return
    short, long = up_to_a_cut.tail(offset), all_of_it.tail(offset)
    if short is not None and long is not None:  # what is behind a cut may hold what no ids spell
        assert [*short[0], *ids[short[1] :]] == [*long[0], *ids[long[1] :]]


def test_a_tail_is_short(tokenizer: Tokenizer) -> None:
    """It ends at the next place that stays, however long the section is."""
    spelled = tokenizer.spelled(tokenizer.encode(PROSE * 30))
    inside = next(start + 1 for start, stop in pairwise(spelled.starts) if stop - start > 1)
    tail = spelled.tail(inside)
    crosses = tokenizer.profile.kind == "sentencepiece" and tokenizer.profile.pieces_cross_space
    assert tail is not None and (crosses or len(tail[0]) < 20)


def test_where_no_ids_spell_the_rest_there_is_no_tail() -> None:
    words = {1: b"ab", 2: "éé".encode(), 3: b"\xe9"}
    spelled = SpelledPrompt([1, 2], words.__getitem__, lambda text: [1] * (text == "ab"))
    assert spelled.tail(1) is None and spelled.tail(4) is None and spelled.tail(2) == ((), 1)
    assert SpelledPrompt([1, 3], words.__getitem__, lambda text: [1]).tail(1) is None


@SETTINGS
@given(data=st.data())
def test_canonical_offsets_are_where_tokens_begin(tokenizer: Tokenizer, data: st.DataObject) -> None:
    spelled = tokenizer.spelled(data.draw(prompts(tokenizer)))
    offset = data.draw(st.integers(0, len(spelled.text)))
    index = spelled.canonical_index(offset)
    assert (index is None) == (offset not in spelled.starts)
    assert index is None or spelled.starts[index] == offset


@SETTINGS
@given(text=TEXTS)
def test_a_text_inside_a_section_is_encoded_as_it_is(tokenizer: Tokenizer, text: str) -> None:
    """No space is put before it, whatever the tokenizer does at the start of a text."""
    ids = tokenizer.encode_inside(text)
    spelled = b"".join(map(tokenizer.token_bytes, ids))
    if spelled != text.encode():  # a vocabulary may lack bytes; SentencePiece writes a space as '▁'
        changed = text.replace("▁", " ") if tokenizer.profile.kind == "sentencepiece" else text
        assert spelled == changed.encode() or tokenizer.profile.unk_token_id in ids or not _knows(tokenizer, text)


@pytest.mark.parametrize(("text", "expected"), [("Hello", [10994]), (" Hello", [15043]), (" ", [29871])])
def test_llama2_puts_no_space_inside_a_section(
    load_tokenizer: LoadTokenizer, text: str, expected: Sequence[int]
) -> None:
    assert load_tokenizer("llama2-legacy").encode_inside(text) == expected


def is_character(tokenizer: Tokenizer, spelled: SpelledPrompt, offset: int) -> bool:
    """Whether `offset` begins a character, and is not inside of a special token's mark."""
    spans = zip(spelled.ids, pairwise(spelled.starts), strict=True)
    inside = any(start < offset < stop for token_id, (start, stop) in spans if is_mark(spelled.spell(token_id)))
    return not inside and spelled.is_character_boundary(offset)


def _knows(tokenizer: Tokenizer, text: str) -> bool:
    """Whether encoding and decoding gives the text back."""
    return tokenizer.decode(tokenizer.encode(text)).strip() == text.strip()


def test_tokens_that_are_no_text_stand_for_their_own_ids_alone(load_tokenizer: LoadTokenizer) -> None:
    """The byte FF is in no text: a reply that spells one special token's mark byte by byte is not that token."""
    tokenizer = load_tokenizer("tiny_spm")
    byte_ids = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    (end,) = (token.id for token in tokenizer.profile.added_tokens if token.text == "</s>")
    forged = [byte_ids[bytes([byte])] for byte in special_mark(end)]
    assert tokenizer.spelled(forged).text != tokenizer.spelled([end]).text
    assert tokenizer.spelled(forged).text.startswith(special_mark(forged[0]))
