"""A tokenizer.json is made smaller, and stays the same tokenizer; a large one is read by another process."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from radixlm.compile import tokenizer_file as module
from radixlm.compile.tokenizer_file import compact_tokenizer, tokenizer_file
from radixlm.tokenizer_fix import InvalidTokenizer, profile_tokenizer
from tokenizers import Tokenizer

TESTS = Path(__file__).resolve().parent.parent


def document(*merges: list[str]) -> str:
    pieces = dict.fromkeys(piece for merge in merges for piece in (*merge, "".join(merge)))
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": merges}})


@pytest.mark.parametrize("path", sorted((TESTS / "data" / "tokenizers").glob("*.json.gz")), ids=lambda path: path.name)
def test_the_library_reads_the_same_tokenizer(path: Path) -> None:
    plain = Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode()).to_str()  # the library writes pairs
    model = json.loads(plain)["model"]
    smaller = compact_tokenizer(plain)
    assert Tokenizer.from_str(smaller).to_str() == plain
    assert (len(smaller) < len(plain)) or not model.get("merges")
    assert compact_tokenizer(smaller) == smaller


def test_merges_of_a_new_line_and_of_an_empty_piece_stay_what_they_are() -> None:
    plain = Tokenizer.from_str(document(["\n", "\n"], ['"', "\\"], ["é", "\u2028"])).to_str()
    assert json.loads(compact_tokenizer(plain))["model"]["merges"][0] == "\n \n"
    assert Tokenizer.from_str(compact_tokenizer(plain)).to_str() == plain


def test_a_piece_with_a_space_leaves_all_merges_pairs() -> None:
    plain = document(["a", "b"], ["ab", " "])
    assert compact_tokenizer(plain) == plain


def test_the_artifact_has_the_smaller_one(tiny_artifact: Path) -> None:
    text = (tiny_artifact / "tokenizer.json").read_text(encoding="utf-8")
    assert text == compact_tokenizer(text) and json.loads(text)["model"]["merges"]
    assert all(isinstance(merge, str) for merge in json.loads(text)["model"]["merges"])


@pytest.fixture
def is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)


@pytest.mark.usefixtures("is_large")
def test_another_process_reads_the_same(tiny_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = (tiny_source / "tokenizer.json").read_text(encoding="utf-8")
    expected = compact_tokenizer(plain), profile_tokenizer(plain).to_dict()
    monkeypatch.setattr(module, "_read_document", None)  # nothing is read in this process
    made = tokenizer_file(plain)
    assert (made.text, made.profile) == expected


@pytest.mark.usefixtures("is_large")
@pytest.mark.parametrize("program", ["/bin/false", "/no/such/program"])
def test_what_no_other_process_reads_is_read_in_this_one(
    tiny_source: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    plain = (tiny_source / "tokenizer.json").read_text(encoding="utf-8")
    expected = tokenizer_file(plain)
    monkeypatch.setattr(module, "_THIS", (program,))
    assert tokenizer_file(plain) == expected


@pytest.mark.usefixtures("is_large")
def test_a_document_that_does_not_parse_is_an_error_of_the_caller() -> None:
    with pytest.raises(InvalidTokenizer):
        tokenizer_file('{"model": {"merges": []}}')
