"""Tokenizers rebuilt from GGUF metadata and SentencePiece files encode as llama.cpp does."""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile.sources import open_source
from radixlm.compile.sources.gguf_file import GGUFFile
from radixlm.compile.sources.gguf_tokenizer import (
    TokenType,
    Vocabulary,
    build_tokenizer_json,
    merges_from_scores,
    vocabulary_from_gguf,
)
from radixlm.compile.sources.huggingface_tokenizer import vocabulary_from_sentencepiece
from radixlm.runtime.errors import CorruptSource, UnsupportedTokenizer
from tokenizers import Tokenizer

from ..real_models import GEMMA_3_270M, real_model

TESTS = Path(__file__).resolve().parent.parent
TESTS_DATA = TESTS / "data"


def llama_cpp_vectors(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    """Texts, and their ids as llama.cpp's own tests have them."""
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    ids = (folder / f"ggml-vocab-{name}.gguf.out").read_text("utf-8").split("\n")
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, ids, strict=False)]


def gguf_metadata(tokenizer_json: str, pre: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a byte-level tokenizer."""
    tokenizer = json.loads(tokenizer_json)
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, int(TokenType.NORMAL))
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[index] for index in range(len(tokens))],
        "tokenizer.ggml.token_type": [types[index] for index in range(len(tokens))],
        "tokenizer.ggml.merges": tokenizer["model"]["merges"],
    }


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def normalized(tokenizer_json: str) -> str:
    """The tokenizer as the library writes it: merges are pairs there, and joined by a space in older files."""
    return Tokenizer.from_str(tokenizer_json).to_str()


def packed_json(name: str) -> str:
    return gzip.decompress((TESTS_DATA / "tokenizers" / f"{name}.json.gz").read_bytes()).decode()


def test_qwen2_equals_llama_cpp() -> None:
    metadata = gguf_metadata(packed_json("qwen2"), "qwen2")
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary_from_gguf(metadata)))
    vectors = llama_cpp_vectors(TESTS_DATA / "vectors" / "llama.cpp", "qwen2")
    assert [encode(tokenizer, text) for text, _ in vectors] == [ids for _, ids in vectors]
    assert encode(tokenizer, "<|im_start|>") == [151644]


def test_smollm2_is_rebuilt_to_the_letter() -> None:
    expected = json.loads(packed_json("smollm2"))
    metadata = gguf_metadata(json.dumps(expected), "smollm")
    rebuilt = json.loads(build_tokenizer_json(vocabulary_from_gguf(metadata)))
    assert rebuilt == expected


def test_smollm2_of_the_real_file_is_rebuilt_to_the_letter(smollm2_gguf: Path) -> None:
    with open_source(smollm2_gguf) as source:
        assert json.loads(source.tokenizer_json) == json.loads(packed_json("smollm2"))


def test_llama3_equals_llama_cpp(data_dir: Path) -> None:
    text = (data_dir / "tokenizers/llama3/tokenizer.json").read_text("utf-8")
    vocabulary = vocabulary_from_gguf(gguf_metadata(text, "llama-bpe"))
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary))
    vectors = llama_cpp_vectors(data_dir / "vectors/llama.cpp", "llama-bpe")
    assert [encode(tokenizer, text) for text, _ in vectors] == [ids for _, ids in vectors]
    assert vocabulary.add_bos_token


def test_llama2_scores_become_the_merges_of_the_known_tokenizer(data_dir: Path) -> None:
    folder = data_dir / "tokenizers/llama2-legacy"
    rebuilt = build_tokenizer_json(vocabulary_from_sentencepiece((folder / "tokenizer.model").read_bytes()))
    assert normalized(rebuilt) == normalized((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer = Tokenizer.from_str(rebuilt)
    vectors = llama_cpp_vectors(data_dir / "vectors/llama.cpp", "llama-spm")
    assert [encode(tokenizer, text) for text, _ in vectors] == [ids for _, ids in vectors]


def test_llama2_from_gguf_metadata_is_the_same_tokenizer(data_dir: Path) -> None:
    folder = data_dir / "tokenizers/llama2-legacy"
    from_model = vocabulary_from_sentencepiece((folder / "tokenizer.model").read_bytes())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(from_model.tokens),
        "tokenizer.ggml.token_type": list(from_model.types),
        "tokenizer.ggml.scores": list(from_model.scores),
    }
    rebuilt = build_tokenizer_json(vocabulary_from_gguf(metadata))
    assert normalized(rebuilt) == normalized((folder / "tokenizer.json").read_text("utf-8"))


def test_gemma_equals_llama_cpp() -> None:
    """Merges of two texts joined by a space, of which a text may have one: `Merges text file invalid at line 2044`."""
    metadata = GGUFFile(real_model(GEMMA_3_270M)).metadata
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary_from_gguf(metadata)))
    golden = json.loads((TESTS / "goldens" / "gemma_tokens.json").read_text("utf-8"))
    assert [[text, encode(tokenizer, text)] for text, _ in golden] == golden


# A SentencePiece vocabulary of our own, for machines without Llama's.
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁a", "ab", "▁ab", "▁", "a", "b", "c", "<", "/", "s", ">", "</", "s>"]


def tiny_vocabulary() -> Vocabulary:
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    return Vocabulary(
        model="llama",
        tokens=[*PIECES, *WORDS],
        types=[*types, *[TokenType.NORMAL] * len(WORDS)],
        scores=[*[0.0] * len(PIECES), *(-float(rank) for rank in range(len(WORDS)))],
        bos_token_id=1,
        unknown_token_id=0,
        add_bos_token=True,
    )


def slow_sentencepiece(vocabulary: Vocabulary, text: str) -> list[str]:
    """While any two neighbours make a piece, join the pair whose piece has the best score, leftmost first."""
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [left + right for left, right in pairwise(symbols)]
        known = [(scores[pair], -at) for at, pair in enumerate(pairs) if pair in WORDS]
        if not known:
            return symbols
        at = -max(known)[1]
        symbols[at : at + 2] = [pairs[at]]


@pytest.mark.parametrize("text", ["ab", "a b", "abab ab", "cab  a", "b", "", " ", "<s> ab"])
def test_scores_merge_as_sentencepiece_does(text: str) -> None:
    vocabulary = tiny_vocabulary()
    encoding = Tokenizer.from_str(build_tokenizer_json(vocabulary)).encode(text, add_special_tokens=False)
    if "<s>" not in text and text:
        assert encoding.tokens == slow_sentencepiece(vocabulary, text)


def test_a_control_token_is_never_merged_from_text() -> None:
    assert ("</", "s>") not in merges_from_scores(tiny_vocabulary())


def test_tokens_that_the_makers_defined_are_no_pieces_that_text_is_merged_to_or_from() -> None:
    """Gemma's are runs of spaces, among others; SentencePiece takes them out of the text before it merges."""
    tiny = tiny_vocabulary()
    defined = ["  ", "    ", "ab>", "<a", "a>"]
    vocabulary = replace(
        tiny,
        tokens=[*tiny.tokens, *defined, "<a>"],
        types=[*tiny.types, *[TokenType.USER_DEFINED] * len(defined), TokenType.NORMAL],
        scores=[*tiny.scores, *[-1000.0] * (len(defined) + 1)],
        add_space_prefix=False,
    )
    assert merges_from_scores(vocabulary) == merges_from_scores(tiny)
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary))
    assert tokenizer.encode("ab>  ab a>      a", add_special_tokens=False).tokens == [
        *("ab>", "  ", "ab", "▁", "a>", "    ", "  ", "a"),
    ]


def test_unknown_characters_fall_back_to_bytes_and_decode_again() -> None:
    tokenizer = Tokenizer.from_str(build_tokenizer_json(tiny_vocabulary()))
    encoding = tokenizer.encode("é a")
    assert encoding.tokens == ["<s>", "▁", "<0xC3>", "<0xA9>", "▁a"]
    assert tokenizer.decode(encoding.ids) == "é a"


def phi_metadata(name: str) -> dict[str, Any]:
    """A SentencePiece vocabulary with special tokens of Phi-3's."""
    tiny = tiny_vocabulary()
    added = {"<|user|>": 3, "<|tool|>": 4, "<|endoftext|>": 3}
    return {
        "general.name": name,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tiny.tokens, *added],
        "tokenizer.ggml.token_type": [*map(int, tiny.types), *added.values()],
        "tokenizer.ggml.scores": [*tiny.scores, *[0.0] * len(added)],
    }


@pytest.mark.parametrize("name", ["Phi-3 Mini", "phi3", "LLaMA v2"])
@pytest.mark.parametrize("special", ["<|user|>", "<|tool|>", "</s>", "<|endoftext|>", "<s>", "<unk>"])
def test_white_space_after_most_special_tokens_of_phi3_is_dropped(name: str, special: str) -> None:
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary_from_gguf(phi_metadata(name))))
    drops = name != "LLaMA v2" and special not in ("<|endoftext|>", "<s>", "<unk>")
    after = ["▁ab"] if drops else ["▁", "<0x0A>", "ab"]
    ids = encode(tokenizer, f"{special}\nab")
    assert [tokenizer.id_to_token(index) for index in ids] == [special, *after]


def proto_field(number: int, payload: bytes | int) -> bytes:
    if isinstance(payload, int):
        return bytes([number << 3, payload])
    assert len(payload) < 128 or number == 1
    return bytes([number << 3 | 2]) + bytes([len(payload)]) + payload


KEEPS_TEXT = proto_field(3, 1) + proto_field(4, 0)  # a space before it, and none taken out


def serialized_model(vocabulary: Vocabulary, model_type: int = 2, normalizer: bytes = KEEPS_TEXT) -> bytes:
    """A ModelProto with the fields that a vocabulary needs."""
    pieces = b"".join(
        proto_field(
            1,
            proto_field(1, token.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + proto_field(3, type_),
        )
        for token, score, type_ in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    )
    return pieces + proto_field(2, proto_field(3, model_type)) + proto_field(3, normalizer)


def test_a_sentencepiece_file_is_read_back() -> None:
    assert vocabulary_from_sentencepiece(serialized_model(tiny_vocabulary())) == tiny_vocabulary()


def test_a_unigram_model_is_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="unigram"):
        vocabulary_from_sentencepiece(serialized_model(tiny_vocabulary(), model_type=1))


@pytest.mark.parametrize("normalizer", [KEEPS_TEXT + proto_field(2, b"charsmap"), proto_field(3, 1), proto_field(4, 1)])
def test_a_model_that_normalizes_texts_is_refused(normalizer: bytes) -> None:
    """Taking spaces out is SentencePiece's default."""
    with pytest.raises(UnsupportedTokenizer, match=r"changes texts .* add the tokenizer\.json"):
        vocabulary_from_sentencepiece(serialized_model(tiny_vocabulary(), normalizer=normalizer))


def test_a_truncated_sentencepiece_file_is_corrupt() -> None:
    data = serialized_model(tiny_vocabulary())
    for length in (0, 1, 5, len(data) // 2 + 1):
        with pytest.raises((CorruptSource, UnsupportedTokenizer)):
            vocabulary_from_sentencepiece(data[:length])


def test_unknown_kinds_and_pre_tokenizers_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedTokenizer, match=r"'rwkv'.*gpt2.*llama"):
        build_tokenizer_json(Vocabulary(model="rwkv", tokens=["a"], types=[1]))
    with pytest.raises(UnsupportedTokenizer, match=r"'poro'.*gpt-2.*smollm"):
        build_tokenizer_json(Vocabulary(model="gpt2", tokens=["a"], types=[1], pre="poro"))


def test_metadata_without_a_tokenizer_is_corrupt() -> None:
    with pytest.raises(CorruptSource, match="no tokenizer"):
        vocabulary_from_gguf({})


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": 5},
        {"tokens": ["a", 7, "b"]},
        {"token_type": [1, 1]},
        {"merges": 3},
        {"merges": ["a nothing"]},
        {"pre": ["gpt-2"]},
        {"bos_token_id": "one"},
        {"bos_token_id": 99},
    ],
)
def test_metadata_of_the_wrong_type_or_length_is_corrupt(damage: dict[str, Any]) -> None:
    metadata: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "merges": ["a b"],
    }
    with pytest.raises(CorruptSource) as caught:
        build_tokenizer_json(
            vocabulary_from_gguf({f"tokenizer.ggml.{key}": value for key, value in (metadata | damage).items()})
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("pre", ["default", "gpt-2", "tekken", "llama3", "deepseek-r1-qwen"])
def test_every_pre_tokenizer_keeps_the_text(pre: str) -> None:
    metadata = gguf_metadata(packed_json("smollm2"), pre)
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary_from_gguf(metadata)))
    text = "Hello, world's 1234\n\n  größe <=> ẞ 你好 !!"
    assert tokenizer.decode(encode(tokenizer, text)) == text
