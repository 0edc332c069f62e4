"""A text encoded from where it goes on has the ids of the whole: random splices, on every tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import InvalidText, Tokenizer, TooManyTokens, text_encoder
from radixlm.tokenizer_fix.seam_encoder import MIN_CHARACTERS, SeamEncoder, is_cut, is_safe, safe_cuts
from radixlm.tokenizer_fix.text_encoder import Encoder

LoadTokenizer = Callable[[str], Tokenizer]
ReadJson = Callable[[str], str]

PROSE = (
    "It's the 1st of 24 days; they'll say it isn't so, and we'd go on: a_b, A.B (see x). Don't stop here, "
    "for what comes next can't be known before all of it was read by somebody who's willing to do that"
)
ODD = st.sampled_from(
    [
        "",
        " ",
        "  ",
        "   ",
        "\n",
        "\n\n",
        " \n",
        "\t",
        "\u00a0",
        "\u3000",
        "é",
        "e\u0301",
        "漢字 の",
        "😀",
        "ﬁ",
        "▁",
        "\x00",
        "'s",
        "'S ",
        "12345",
    ]
)
SPECIAL = st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "<s>", "<|eot_id|>", "<|end", "[INST]", "<unk>"])
WORDS = st.builds(lambda start, length: PROSE[start : start + length], st.integers(0, 150), st.integers(0, 60))
PIECES = st.lists(WORDS | ODD | SPECIAL | st.text(max_size=4), max_size=5).map("".join)
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@SETTINGS
@given(data=st.data())
def test_the_ids_of_spliced_texts_are_those_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    check_splices(tokenizer, data)


@SETTINGS
@given(data=st.data())
def test_so_they_are_behind_a_bos(tokenizer_with_bos: Tokenizer, data: st.DataObject) -> None:
    check_splices(tokenizer_with_bos, data)


def check_splices(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokenizer.forget_texts(b"n")
    text = PROSE + data.draw(PIECES) + PROSE
    for _ in range(4):
        prepared = tokenizer.prepare_chat(text, seam_of=b"n")
        assert prepared == replace(tokenizer.prepare_chat(text), num_known=prepared.num_known)
        keep, drop = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 40))
        text = text[:keep] + data.draw(PIECES) + text[keep + drop :]


def test_a_text_that_goes_on_is_known_up_to_its_seam(tokenizer: Tokenizer) -> None:
    tokenizer.forget_texts(b"n")
    first = tokenizer.prepare_completion(PROSE * 3, seam_of=b"n")
    second = tokenizer.prepare_completion(PROSE * 3 + " and then some", seam_of=b"n")
    assert first.num_known == 0
    if tokenizer.profile.kind == "sentencepiece" and tokenizer.profile.pieces_cross_space:
        assert second.num_known == 0
    else:
        assert len(first.ids) - 6 <= second.num_known <= len(first.ids)


def test_nothing_is_known_from_another_namespace_or_of_forgotten_texts(tokenizer: Tokenizer) -> None:
    text = PROSE * 2
    tokenizer.prepare_chat(text, seam_of=b"a")
    assert tokenizer.prepare_chat(text + " now", seam_of=b"b").num_known == 0
    tokenizer.forget_texts(b"a")
    assert tokenizer.prepare_chat(text + " then", seam_of=b"a").num_known == 0


class LettersInPairs:
    """A tokenizer of our own: two letters a token, after a space is put before the text or not."""

    def __init__(self, puts_space: bool = False) -> None:
        self.puts_space = puts_space
        self.num_characters = 0

    def __call__(self, text: str, is_start: bool, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        self.num_characters += len(text)
        text, shift = (" " + text, 1) if self.puts_space else (text, 0)
        ids, ends, at = [], [], 0
        while at < len(text):
            width = 2 if not text[at + 1 : at + 2].isspace() else 1
            ids.append(_id(text[at : at + width]))
            at = min(at + width, len(text))
            ends.append(at - shift)
        return ids, ends


@pytest.mark.parametrize("puts_space", [False, True])
def test_only_the_tail_is_encoded_again(puts_space: bool) -> None:
    encode = LettersInPairs(puts_space)
    encoder = SeamEncoder(encode, drops_space=puts_space)
    encoder.encode(PROSE * 100)
    encode.num_characters = 0
    encoding = encoder.encode(PROSE * 100 + " and then some")
    assert encode.num_characters < 64
    assert encoding.ids == LettersInPairs(puts_space)(PROSE * 100 + " and then some", True)[0]


def test_a_tokenizer_that_joins_words_is_not_safe() -> None:
    assert is_safe(LettersInPairs(), drops_space=False)

    def joins_over_a_space(text: str, is_start: bool, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        pieces = text.replace("d b", "d~b").split()
        return [_id(piece) for piece in pieces], [0] * len(pieces)

    assert not is_safe(joins_over_a_space, drops_space=False)


def test_the_oldest_texts_are_forgotten_first() -> None:
    encoder = SeamEncoder(LettersInPairs(), drops_space=False, max_characters=6 * MIN_CHARACTERS)
    texts = [letter * 4 + " " + "word " * (MIN_CHARACTERS // 5) for letter in "abcd"]
    for text in texts:
        encoder.encode(text)
    assert encoder.encode(texts[3] + "more").num_known > 0
    assert encoder.encode(texts[0] + "more").num_known == 0


def test_what_one_namespace_sends_does_not_evict_everybodys_texts() -> None:
    """One refused prompt of 16 MB emptied the memory of all: too long to fit, and too much for one of them."""
    encoder = SeamEncoder(LettersInPairs(), drops_space=False, max_characters=8 * MIN_CHARACTERS)
    words = "word " * (MIN_CHARACTERS // 5 + 1)
    encoder.encode("first " + words, b"a")
    for number in range(20):
        encoder.encode(f"number {number} " + words, b"b")
    assert encoder.encode("first " + words + "more", b"a").num_known > 0
    assert encoder.encode("number 19 " + words + "more", b"b").num_known > 0
    assert encoder.encode("number 0 " + words + "more", b"b").num_known < 10
    encoder.encode("long " + words * 9, b"c")
    assert encoder.encode("long " + words * 9, b"c").num_known == 0, "more than a namespace's share"
    assert encoder.encode("first " + words + "more", b"a").num_known > 0


def test_a_text_that_does_not_fit_is_not_remembered() -> None:
    encoder = SeamEncoder(LettersInPairs(), drops_space=False)
    text = "word " * MIN_CHARACTERS
    with pytest.raises(TooManyTokens):
        encoder.encode(text, max_tokens=10)
    assert encoder.encode(text).num_known == 0


def test_nothing_is_left_of_forgotten_texts() -> None:
    now = [0.0]
    encoder = SeamEncoder(LettersInPairs(), drops_space=False, clock=lambda: now[0])
    for namespace in (b"a", b"b"):
        for letter in "xyz":
            now[0] += 1
            encoder.encode(letter + " word" * MIN_CHARACTERS, namespace)
    encoder.forget_unused(5.0)  # the first of b was sent at 4
    encoder.check()
    texts = {letter: letter + " word" * MIN_CHARACTERS for letter in "xyz"}
    for namespace, known in ((b"a", ""), (b"b", "yz")):
        for letter, text in texts.items():
            assert bool(encoder.encode(text, namespace, remembers=False).num_known) == (letter in known)
    encoder.forget(b"b")
    encoder.check()
    assert encoder.num_characters == 0


@pytest.fixture(scope="session", params=["tiny_spm", "qwen2"])
def tokenizer_with_bos(request: pytest.FixtureRequest, read_json: ReadJson, load_tokenizer: LoadTokenizer) -> Tokenizer:
    profile = load_tokenizer(request.param).profile
    bos = min(profile.special_ids)
    return Tokenizer(read_json(request.param), profile, bos_token_id=bos, add_bos_token=True)


@pytest.mark.parametrize("content", ["a b", "x and y", "<|the end|>"])
def test_an_added_token_with_a_space_inside_is_never_cut(read_json: ReadJson, content: str) -> None:
    """The text of a token that stands outside the vocabulary's pieces may hold any cut."""
    library = tokenizers.Tokenizer.from_str(read_json("qwen2"))
    library.add_special_tokens([tokenizers.AddedToken(content)])
    tokenizer = Tokenizer(library.to_str())
    begin = PROSE * 2 + content[:-1]
    for text in (begin, begin + content[-1], begin + content[-1] + " and so"):
        assert tokenizer.prepare_chat(text, seam_of=b"").ids == tokenizer.prepare_chat(text).ids


def _id(piece: str) -> int:
    """As large as ids may be, and no larger."""
    return hash(piece) % 2**31


@given(
    text=st.lists(st.sampled_from(["a", "word ", " ", "b c ", "1 ", "\n", "x y", "é ", "<"]), max_size=60).map("".join)
)
@settings(deadline=None, max_examples=60)
def test_a_text_that_is_encoded_in_parts_has_the_ids_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text, parse_special=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_encoder, "PART_CHARACTERS", 8)
        assert tokenizer.encode(text, parse_special=True) == whole


def test_no_more_of_a_text_is_encoded_at_once_than_a_part(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of ` a` took 950 MB."""
    monkeypatch.setattr(text_encoder, "PART_CHARACTERS", 100)
    monkeypatch.setattr(text_encoder, "MAX_UNCUT_CHARACTERS", 200)
    lengths: list[int] = []
    encode = Encoder.encode

    def counted(self: Encoder, text: str, max_tokens: int | None = None) -> tokenizers.Encoding:
        lengths.append(len(text))
        return encode(self, text, max_tokens)

    monkeypatch.setattr(Encoder, "encode", counted)
    if tokenizer._encoder.has_seams:
        lengths.clear()
        tokenizer.encode("some words " * 100, parse_special=True)
        assert max(lengths) <= 100 and len(lengths) > 10
    with pytest.raises(InvalidText, match="at most 200 are encoded at once"):
        tokenizer.encode("1 " * 500, parse_special=True)


@given(st.text("ab 1", max_size=80), st.integers(3, 20))
def test_cuts_are_safe_places_as_near_as_they_can_be(text: str, length: int) -> None:
    cuts = list(safe_cuts(text, length))
    assert all(is_cut(text.encode(), cut) for cut in cuts) and cuts == sorted(set(cuts))
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert end - begin <= length or not any(
            is_cut(text.encode(), at) for at in range(begin + 1, begin + length - 1)
        )
