"""Text to ids and back, held to llama.cpp's vectors and to the `tokenizers` library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from radixlm.tokenizer_fix import InvalidText, InvalidTokenId, InvalidTokenizer, Tokenizer, TokenizerProfile
from radixlm.tokenizer_fix.pieces import byte_alphabet
from radixlm.tokenizer_fix.probe import load_tokenizer as load_library
from radixlm.tokenizer_fix.probe import twin_of

VECTORS = [("qwen2", "qwen2"), ("llama2-legacy", "llama-spm"), ("llama3", "llama-bpe")]
LoadTokenizer = Callable[[str], Tokenizer]
ReadJson = Callable[[str], str]


@pytest.mark.parametrize(("name", "vocabulary"), VECTORS)
def test_ids_are_those_of_llama_cpp(vectors: Path, load_tokenizer: LoadTokenizer, name: str, vocabulary: str) -> None:
    path = vectors / "llama.cpp" / f"ggml-vocab-{vocabulary}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    tokenizer = load_tokenizer(name)
    assert len(texts) >= 47
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text) == [int(token_id) for token_id in line.split()], repr(text)


def test_ids_are_those_of_recorded_smollm2_replies(vectors: Path, load_tokenizer: LoadTokenizer) -> None:
    tokenizer = load_tokenizer("smollm2")
    for reply in json.loads((vectors / "smollm2_retok.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(reply["text"]) == reply["retok_ids"]
        assert tokenizer.decode(reply["generated_ids"]) == reply["text"]


@pytest.mark.parametrize(("name", "encoder"), [("llama2-legacy", "hf_legacy"), ("llama2-nonlegacy", "hf_nonlegacy")])
def test_ids_are_those_of_the_recorded_llama2_cases(
    vectors: Path, load_tokenizer: LoadTokenizer, name: str, encoder: str
) -> None:
    tokenizer = load_tokenizer(name)
    for case in json.loads((vectors / "llama2_29871_cases.json").read_text(encoding="utf-8")):
        assert tokenizer.encode(case["text"], parse_special=True) == case[encoder], repr(case["text"])


@settings(deadline=None)  # a large vocabulary loads within the first example
@given(text=st.text())
def test_text_comes_back(tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str) -> None:
    if tokenizer.profile.kind == "byte_level_bpe":  # SmolLM2's vocabulary lacks some bytes, and drops them
        spelled = (library.token_to_id(piece) for piece in byte_pieces(text))
        assume(None not in spelled)
    expected = text
    if tokenizer.profile.normalizers == ("NFC",):
        expected = tokenizers.normalizers.NFC().normalize_str(text)
    elif tokenizer.profile.dummy_prefix != "none":
        expected = text.replace("▁", " ")  # SentencePiece cannot tell the two
    ids = tokenizer.encode(text)
    if tokenizer.profile.dummy_prefix == "text_start" and text[:1] in (" ", "▁") and text:
        expected = expected[1:]  # no prefix was added, but decoding strips one
    assert tokenizer.decode(ids) == expected


def byte_pieces(text: str) -> set[str]:
    """The text's bytes as a byte-level vocabulary writes them."""
    written = {byte: character for character, byte in byte_alphabet().items()}
    return {written[byte] for byte in text.encode()}


@settings(deadline=None)
@given(text=st.text(), data=st.data())
def test_decoding_is_the_librarys(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str, data: st.DataObject
) -> None:
    special = data.draw(st.sampled_from(sorted(tokenizer.profile.special_ids)))
    ids = [*tokenizer.encode(text), special, *tokenizer.encode("x " + text)]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special=skip) == library.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(data=st.data())
def test_decoding_random_ids_is_the_librarys_where_bytes_are_right_or_byte_level(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    text = tokenizer.decode(ids)
    if tokenizer.profile.byte_fallback and "\ufffd" in text:
        assert len(text) <= len(library.decode(ids))  # it gives up the whole run of bytes
    else:
        assert text == library.decode(ids)


def test_wrong_bytes_do_not_take_right_ones_with_them(read_json: ReadJson) -> None:
    tokenizer, library = Tokenizer(read_json("tiny_spm")), load_library(read_json("tiny_spm"))
    grin = [3 + byte for byte in "😀".encode()]
    assert tokenizer.decode([*grin, 3 + 0xF0, 3 + 0x9F]) == "😀\ufffd\ufffd"
    assert library.decode([*grin, 3 + 0xF0, 3 + 0x9F]) == "\ufffd" * 6


def test_special_text_stays_text_unless_asked(tokenizer: Tokenizer) -> None:
    for token in tokenizer.profile.added_tokens:
        text = f"Hello {token.text} world{token.text}"
        ids = tokenizer.encode(text)
        assert not tokenizer.profile.special_ids.intersection(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text, parse_special=True).count(token.id) == 2


@settings(deadline=None)
@given(data=st.data())
def test_no_mixture_of_special_texts_becomes_special(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = [token.text for token in tokenizer.profile.added_tokens]
    parts = st.sampled_from(texts) | st.text(max_size=3) | st.sampled_from(texts).map(lambda text: text[:-1])
    text = "".join(data.draw(st.lists(parts)))
    assert not tokenizer.profile.special_ids.intersection(tokenizer.encode(text))


def test_bos_is_added_where_the_model_asks_and_never_twice(read_json: ReadJson) -> None:
    tokenizer = Tokenizer(read_json("tiny_spm"), bos_token_id=1, add_bos_token=True)
    plain = tokenizer.encode("Hello", add_bos=False)
    assert tokenizer.encode("Hello") == [1, *plain]
    assert tokenizer.encode("<s>Hello", parse_special=True) == [1, *plain]
    assert tokenizer.encode("<s>Hello")[:2] != [1, 1]
    assert tokenizer.encode("<s>")[0] == 1  # plain text, so bos was added before it
    assert tokenizer.encode("") == [1]
    assert tokenizer.prepare_chat("<s>[INST] Hi [/INST]").ids.count(1) == 1
    assert tokenizer.prepare_completion("Hello").ids == (1, *plain)
    assert tokenizer.prepare_completion(plain).ids == tuple(plain)


def test_bos_is_not_added_where_the_model_does_not_ask(load_tokenizer: LoadTokenizer, read_json: ReadJson) -> None:
    tokenizer = Tokenizer(read_json("tiny_spm"), load_tokenizer("tiny_spm").profile, bos_token_id=1)
    assert 1 not in tokenizer.encode("Hello")
    assert tokenizer.encode("Hello", add_bos=True)[0] == 1
    with pytest.raises(InvalidTokenizer, match="names no bos_token_id"):
        load_tokenizer("tiny_spm").encode("Hello", add_bos=True)


def test_bos_must_be_a_token(read_json: ReadJson) -> None:
    with pytest.raises(InvalidTokenizer, match="bos_token_id 99999 is not below"):
        Tokenizer(read_json("tiny_spm"), bos_token_id=99999)
    with pytest.raises(InvalidTokenizer, match="names no bos_token_id"):
        Tokenizer(read_json("tiny_spm"), add_bos_token=True)


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "a\udc80b"])
def test_lone_surrogates_are_refused(load_tokenizer: LoadTokenizer, text: str) -> None:
    for call in (load_tokenizer("tiny_spm").encode, load_tokenizer("smollm2").prepare_chat):
        with pytest.raises(InvalidText, match="lone surrogate U"):
            call(text)


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "naïve 🎉 text"
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert joined.decode().strip() == text


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size, 1 << 40):
        with pytest.raises(InvalidTokenId, match=f"token id {token_id} is not in the vocabulary"):
            tokenizer.decode([token_id])
        with pytest.raises(InvalidTokenId):
            tokenizer.stream().push(token_id)
        with pytest.raises(InvalidTokenId):
            tokenizer.prepare_completion([5, token_id])


def test_truncation_padding_and_dropout_in_the_file_do_nothing(
    load_tokenizer: LoadTokenizer, read_json: ReadJson
) -> None:
    document = json.loads(read_json("tiny_spm"))
    document["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    document["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    document["model"]["dropout"] = 0.5
    text = "Hello the capital of France"
    assert Tokenizer(json.dumps(document)).encode(text) == load_tokenizer("tiny_spm").encode(text)


def test_text_that_the_model_itself_makes_special_is_refused() -> None:
    pieces = [["<unk>", 0.0], ["</s>", 0.0], ["▁", -2.0], *[[letter, -3.0] for letter in "abcs</>"]]
    flags: dict[str, Any] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "</s>", **flags, "special": True}],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": False},
    }
    tokenizer = Tokenizer(json.dumps(document))
    assert tokenizer.decode(tokenizer.encode("ab cab")) == "ab cab"
    with pytest.raises(InvalidText, match="'</s>', which cannot be encoded as plain text"):
        tokenizer.encode("ab</s>")


def test_a_tokenizer_of_another_kind_is_profiled_but_not_used() -> None:
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
    }
    with pytest.raises(InvalidTokenizer, match=r"\(WordLevel\) is neither byte-level BPE nor SentencePiece"):
        Tokenizer(json.dumps(document))


def test_a_stored_profile_is_used_as_it_is(load_tokenizer: LoadTokenizer, read_json: ReadJson) -> None:
    profile = TokenizerProfile.from_dict(load_tokenizer("tiny_spm").profile.to_dict())
    assert Tokenizer(read_json("tiny_spm"), profile).profile is profile


@pytest.fixture(scope="module")
def library_again(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Each of the tokenizers, loaded a second time: nothing that is set of `library` or of its twins is of this one."""
    return load_library(tokenizer_json)


@pytest.mark.parametrize("plain", [False, True])
@settings(deadline=None)
@given(data=st.data())
def test_a_twin_encodes_as_one_that_was_loaded_again(
    library: tokenizers.Tokenizer, library_again: tokenizers.Tokenizer, plain: bool, data: st.DataObject
) -> None:
    """A second one of Gemma's took 1.1 s of the first prompt, and 70 MB."""
    twin, again = twin_of(library), library_again
    twin.encode_special_tokens = again.encode_special_tokens = plain
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    text = data.draw(st.lists(st.one_of(st.text(), st.sampled_from(added))).map("".join))
    found, expected = (one.encode(text, add_special_tokens=False) for one in (twin, again))
    assert (found.ids, found.offsets) == (expected.ids, expected.offsets)
    assert not library.encode_special_tokens


def test_a_twin_knows_added_tokens_by_other_names(library: tokenizers.Tokenizer) -> None:
    twin = twin_of(library, lambda text: f"\ufdd2{text}\ufdd2")
    first = next(token.content for token in library.get_added_tokens_decoder().values() if token.special)
    assert twin.encode(f"\ufdd2{first}\ufdd2", add_special_tokens=False).tokens == [f"\ufdd2{first}\ufdd2"]
    assert len(twin.encode(first, add_special_tokens=False).ids) > 1 or twin.token_to_id(first) is not None
    assert library.encode(first, add_special_tokens=False).tokens == [first]
