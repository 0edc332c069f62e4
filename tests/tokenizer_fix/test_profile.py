"""Probing finds what each tokenizer does, without knowing its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from radixlm.tokenizer_fix import (
    AddedToken,
    InvalidProfile,
    InvalidTokenizer,
    Tokenizer,
    TokenizerProfile,
    profile_tokenizer,
)

# kind, dummy prefix, the same before a space, decoding strips a space, suffix ids, a normalizer changes text
EXPECTED = {
    "tiny_spm": ("sentencepiece", "every_section", True, True, (259,), False),
    "smollm2": ("byte_level_bpe", "none", False, False, (216,), False),
    "qwen2": ("byte_level_bpe", "none", False, False, (220,), True),
    "llama2-legacy": ("sentencepiece", "every_section", True, True, (29871,), False),
    "llama2-nonlegacy": ("sentencepiece", "text_start", False, True, (29871,), False),
    "llama3": ("byte_level_bpe", "none", False, False, (220,), False),
}


def test_profile_says_what_the_tokenizer_does(tokenizer_name: str, tokenizer: Tokenizer) -> None:
    profile = tokenizer.profile
    assert EXPECTED[tokenizer_name] == (
        profile.kind,
        profile.dummy_prefix,
        profile.dummy_prefix_before_space,
        profile.decoding_strips_space,
        profile.suffix_ids,
        profile.normalizer_changes_text,
    )


def test_profile_survives_json(tokenizer: Tokenizer) -> None:
    stored = json.dumps(tokenizer.profile.to_dict())
    assert TokenizerProfile.from_dict(json.loads(stored)) == tokenizer.profile


def test_no_piece_of_a_sentencepiece_vocabulary_crosses_a_space(tokenizer_name: str, tokenizer: Tokenizer) -> None:
    # Byte-level vocabularies have a few that do (code: 'ĠĊĠ'); there the pre-tokenizer keeps words apart.
    assert tokenizer.profile.pieces_cross_space == (tokenizer.profile.kind == "byte_level_bpe")


def test_special_tokens_are_listed_in_order_of_their_ids(load_tokenizer: Callable[[str], Tokenizer]) -> None:
    assert load_tokenizer("tiny_spm").profile.added_tokens == (
        AddedToken(0, "<unk>", True),
        AddedToken(1, "<s>", True),
        AddedToken(2, "</s>", True),
    )
    assert load_tokenizer("tiny_spm").profile.unk_token_id == 0
    assert {1: "<|im_start|>", 2: "<|im_end|>"}.items() <= {
        token.id: token.text for token in load_tokenizer("smollm2").profile.added_tokens
    }.items()


# One change to the tiny tokenizer, and what the profile says of it.


def without_prefix(document: dict[str, Any]) -> None:
    del document["normalizer"]["normalizers"][0]


def with_metaspace(document: dict[str, Any]) -> None:
    document["normalizer"] = None
    document["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "first",
        "split": False,
    }


def with_lower_case(document: dict[str, Any]) -> None:
    document["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})


def with_bos_and_eos(document: dict[str, Any]) -> None:
    special = {text: {"id": text, "ids": [n], "tokens": [text]} for n, text in [(1, "<s>"), (2, "</s>")]}
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }


def with_a_piece_over_two_words(document: dict[str, Any]) -> None:
    document["model"]["vocab"]["of▁the"] = len(document["model"]["vocab"])


def with_a_decoder_that_keeps_the_space(document: dict[str, Any]) -> None:
    del document["decoder"]["decoders"][-1]


def without_byte_fallback(document: dict[str, Any]) -> None:
    document["model"]["byte_fallback"] = False


def with_spaces_as_pieces_of_two(document: dict[str, Any]) -> None:
    document["normalizer"]["normalizers"][1]["content"] = "▁▁"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without_prefix, {"dummy_prefix": "none", "normalizers": ("Replace",)}),
        (with_metaspace, {"dummy_prefix": "text_start", "pre_tokenizers": ("Metaspace",)}),
        (with_lower_case, {"normalizer_changes_text": True}),
        (with_bos_and_eos, {"template_prefix_ids": (1,), "template_suffix_ids": (2,)}),
        (with_a_piece_over_two_words, {"pieces_cross_space": True}),
        (with_a_decoder_that_keeps_the_space, {"decoding_strips_space": False}),
        (without_byte_fallback, {"byte_fallback": False}),
        (with_spaces_as_pieces_of_two, {"suffix_ids": ()}),
    ],
)
def test_profile_follows_a_change_of_the_tokenizer(
    read_json: Callable[[str], str],
    change: Callable[[dict[str, Any]], None],
    expected: dict[str, object],
) -> None:
    document = json.loads(read_json("tiny_spm"))
    change(document)
    profile = profile_tokenizer(json.dumps(document))
    assert {name: getattr(profile, name) for name in expected} == expected


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"version": "1.0"', '{"model": 3}', "\x00"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(InvalidTokenizer, match=r"tokenizer\.json cannot be read"):
        profile_tokenizer(text)


def test_a_truncated_tokenizer_is_refused(read_json: Callable[[str], str]) -> None:
    text = read_json("tiny_spm")
    with pytest.raises(InvalidTokenizer):
        profile_tokenizer(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "unigram"}, "kind: expected one of byte_level_bpe, sentencepiece, wordpiece, other"),
        ({"vocab_size": "430"}, "vocab_size: expected int"),
        ({"vocab_size": True}, "vocab_size: expected int"),
        ({"vocab_size": 10}, "token id 259 is not below vocab_size 10"),
        ({"byte_fallback": 1}, "byte_fallback: expected bool"),
        ({"suffix_ids": 259}, "suffix_ids: expected a list"),
        ({"suffix_ids": ["▁"]}, r"suffix_ids\[0\]: expected int"),
        ({"suffix_ids": [-1]}, "token id -1"),
        ({"unk_token_id": "<unk>"}, "unk_token_id: expected int or NoneType"),
        (
            {"added_tokens": [{"id": 1, "text": "<s>"}]},
            r"added_tokens\[0\]: missing or unknown fields: special",
        ),
        ({"added_tokens": ["<s>"]}, r"added_tokens\[0\]: expected an object"),
        ({"colour": "blue"}, "missing or unknown fields: colour"),
    ],
)
def test_a_stored_profile_is_read_strictly(
    load_tokenizer: Callable[[str], Tokenizer], change: dict[str, object], message: str
) -> None:
    fields = load_tokenizer("tiny_spm").profile.to_dict() | change
    with pytest.raises(InvalidProfile, match=message):
        TokenizerProfile.from_dict(fields)


def test_a_stored_profile_must_be_whole(load_tokenizer: Callable[[str], Tokenizer]) -> None:
    fields = load_tokenizer("tiny_spm").profile.to_dict()
    for name in fields:
        with pytest.raises(InvalidProfile, match=f"missing or unknown fields: {name}"):
            TokenizerProfile.from_dict({key: value for key, value in fields.items() if key != name})
