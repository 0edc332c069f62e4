"""Tokenizers to test with: three that are always here, and Meta's, where `data_dir` has them."""

from __future__ import annotations

import functools
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from radixlm.tokenizer_fix import Tokenizer
from radixlm.tokenizer_fix.probe import load_tokenizer as load_library

TESTS_DATA = Path(__file__).resolve().parent.parent / "data"
ALWAYS = ("tiny_spm", "smollm2", "qwen2")
META = ("llama2-legacy", "llama2-nonlegacy", "llama3")

ReadJson = Callable[[str], str]
LoadTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder of ids and texts that the repository carries."""
    return TESTS_DATA / "vectors"


@pytest.fixture(scope="session")
def read_json(request: pytest.FixtureRequest) -> ReadJson:
    """The text of a tokenizer.json by name; skips where that one is not."""

    def read(name: str) -> str:
        if name in META:
            data_dir: Path = request.getfixturevalue("data_dir")
            return (data_dir / "tokenizers" / name / "tokenizer.json").read_text(encoding="utf-8")
        if name == "tiny_spm":
            return (TESTS_DATA / "tokenizers" / "tiny_spm.json").read_text(encoding="utf-8")
        return gzip.decompress((TESTS_DATA / "tokenizers" / f"{name}.json.gz").read_bytes()).decode()

    return functools.cache(read)


@pytest.fixture(scope="session")
def load_tokenizer(read_json: ReadJson) -> LoadTokenizer:
    """A tokenizer by name, as its model uses it but for bos."""
    return functools.cache(lambda name: Tokenizer(read_json(name)))


@pytest.fixture(scope="session", params=[*ALWAYS, *META])
def tokenizer_name(request: pytest.FixtureRequest) -> str:
    """Each of the tokenizers."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def tokenizer(tokenizer_name: str, load_tokenizer: LoadTokenizer) -> Tokenizer:
    """Each of the tokenizers, loaded."""
    return load_tokenizer(tokenizer_name)


@pytest.fixture(scope="session")
def tokenizer_json(tokenizer_name: str, read_json: ReadJson) -> str:
    """Each of the tokenizers, as its file."""
    return read_json(tokenizer_name)


@pytest.fixture(scope="session")
def library(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Each of the tokenizers, as the library has it."""
    return load_library(tokenizer_json)
