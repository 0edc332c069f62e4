"""Each known way of cutting text gives llama.cpp's tokens, over a vocabulary that shows every cut.

The words are those of transformers, too. What transformers does not have in its code is listed.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile.sources.gguf_tokenizer import build_tokenizer_json, vocabulary_from_gguf
from radixlm.compile.sources.pre_tokenizers import PRE_TOKENIZERS
from tokenizers import Tokenizer

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
GOLDEN = GOLDENS / "pre_tokens.json"
CUTS: list[dict[str, Any]] = json.loads((GOLDENS / "transformers_cuts.json").read_text("utf-8"))
# Cut as the makers' own tokenizer.json says; the llama.cpp of the golden does not know the names.
NOT_IN_GOLDEN = {"laguna", "minicpm5", "jina-v5-nano", "kormo", "f2llmv2", "talkie"}
# llama.cpp's patterns for these have no combining marks, which the makers' own have.
WITHOUT_MARKS = {"gpt-4o", "tekken"}
# llama.cpp leaves digits together, which the makers' own cuts apart; their vocabulary has no token of several.
WITH_NUMBERS = {"deepseek-llm"}
# Makers tell these only in files of their models, which no package has. They are compared with llama.cpp's.
NOT_IN_TRANSFORMERS = {"default", "deepseek-v3", "deepseek-llm", "deepseek-coder", "seed-coder", "bailingmoe"}
NOT_IN_TRANSFORMERS |= {"exaone-moe", "laguna", "minicpm5"}


@cache
def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8"))
    return loaded


@cache
def tokenizer_of(pre: str) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": golden()["tokens"],
        "tokenizer.ggml.merges": golden()["merges"],
    }
    return Tokenizer.from_str(build_tokenizer_json(vocabulary_from_gguf(metadata)))


@cache
def ids_of(pre: str) -> list[list[int]]:
    return [tokenizer_of(pre).encode(text, add_special_tokens=False).ids for text in golden()["texts"]]


@pytest.mark.parametrize("pre", sorted(golden()["ids"]))
def test_texts_are_cut_as_llama_cpp_cuts_them(pre: str) -> None:
    rows = zip(golden()["texts"], ids_of(pre), golden()["ids"][pre], strict=True)
    assert [row for row in rows if row[1] != row[2] and not is_cut_otherwise(row[0], pre)] == []


def is_cut_otherwise(text: str, pre: str) -> bool:
    kinds = "".join(unicodedata.category(character)[0] for character in text)
    return (pre in WITHOUT_MARKS and "M" in kinds) or (pre in WITH_NUMBERS and "NN" in kinds)


@pytest.mark.parametrize(
    ("pre", "row"),
    [pytest.param(pre, row, id=f"{pre}-{row['by']}") for row in CUTS for pre in row["names"]],
)
def test_texts_are_cut_as_transformers_cuts_them(pre: str, row: dict[str, Any]) -> None:
    words = [tokenizer_of(pre).pre_tokenizer.pre_tokenize_str(text) for text in golden()["texts"]]
    found = [[len(word) for word, _ in each] for each in words]
    rows = zip(golden()["texts"], found, row["lengths"], strict=True)
    assert [each for each in rows if each[1] != each[2]] == []


def test_every_way_of_cutting_is_compared_with_transformers_or_listed() -> None:
    compared = [PRE_TOKENIZERS[pre].steps for row in CUTS for pre in row["names"]]
    missing = [way.steps for way in PRE_TOKENIZERS.values() if way.steps not in compared]
    assert {json.dumps(each) for each in missing} == {
        json.dumps(PRE_TOKENIZERS[pre].steps) for pre in NOT_IN_TRANSFORMERS
    }


def test_gemma4_equals_llama_cpp() -> None:
    made = golden()["gemma4"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": made["tokens"],
        "tokenizer.ggml.token_type": made["types"],
        "tokenizer.ggml.merges": made["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    vocabulary = vocabulary_from_gguf(metadata)
    tokenizer = Tokenizer.from_str(build_tokenizer_json(vocabulary))
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in golden()["texts"]]
    assert [row for row in zip(golden()["texts"], found, golden()["gemma4_ids"], strict=True) if row[1] != row[2]] == []
    assert vocabulary.add_bos_token


def test_every_way_of_cutting_is_in_the_golden() -> None:
    verified = [PRE_TOKENIZERS[name].steps for name in golden()["ids"]]
    missing = {name for name, way in PRE_TOKENIZERS.items() if way.steps not in verified}
    assert missing <= NOT_IN_GOLDEN


def test_the_golden_tells_ways_apart() -> None:
    """Otherwise it would not notice one that is used for another."""
    by_steps = {json.dumps(PRE_TOKENIZERS[name].steps): name for name in golden()["ids"]}
    rows = {json.dumps(golden()["ids"][name]) for name in by_steps.values()}
    assert len(rows) >= len(by_steps) - 3  # llama.cpp's own patterns for some are the same
