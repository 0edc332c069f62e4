"""Encoders (BERT and its like) give the vectors of transformers, from each form in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources import open_source
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.errors import ContextLengthExceeded, InvalidRequest, UnsupportedArchitecture
from safetensors.numpy import load_file, save_file

from ..conftest import CompileOnce
from ..goldens import gguf_encoders
from ..goldens.encoders import ENCODERS, POOLINGS, TEXT, bare, pooled
from ..goldens.gguf_encoders import ARCHITECTURES

TOLERANCE = 1e-4  # of a vector of length 1, where all is computed in float32
SEEN = 1e-3  # by how much each feature moves a vector at least
OFFS = [(name, off.feature) for name, tiny in ENCODERS.items() for off in tiny.offs]


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector.astype(np.float64) / np.linalg.norm(vector.astype(np.float64))


def distance(source: Source, name: str) -> float:
    """The largest difference of normalized vectors from the golden, for all texts and poolings, in NumPy."""
    largest = 0.0
    for ids, golden in zip(ENCODERS[name].texts(), pooled(name), strict=True):
        op = ReferenceOps(lambda tensor: source.read_float32(tensor), ids)
        states = evaluate(source.config, op).astype(np.float64)
        for pooling, found in zip(POOLINGS, (states.mean(axis=0), states[0]), strict=True):
            largest = max(largest, float(np.abs(normalized(found) - normalized(golden[pooling])).max()))
    return largest


@pytest.fixture(scope="module", params=ENCODERS)
def engine(
    request: pytest.FixtureRequest, compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine]]:
    """An encoder's name and its engine: each is compiled once."""
    source = ENCODERS[request.param].write(tmp_path_factory.mktemp("encoder") / request.param)
    with Engine(compile_once(source, "f32", quantize="f32"), num_threads=1, kv_cache_bytes=32 << 20) as engine:
        yield request.param, engine


def test_vectors_are_those_of_transformers(engine: tuple[str, Engine]) -> None:
    name, running = engine
    tiny = ENCODERS[name]
    found = running.embed(tiny.texts())
    for each, golden in zip(found, pooled(name), strict=True):
        assert np.abs(each.vector - normalized(golden[tiny.pooling])).max() <= TOLERANCE


def test_a_vector_is_the_same_bits_alone_and_in_a_batch(engine: tuple[str, Engine]) -> None:
    name, running = engine
    texts = [*ENCODERS[name].texts(), [7, 8, 9], [7, 8, 10, 11]]
    alone = [running.embed(text).vector.tobytes() for text in texts]
    assert [each.vector.tobytes() for each in running.embed(texts)] == alone
    assert [each.vector.tobytes() for each in running.embed(texts[::-1])] == alone[::-1]


def test_texts_stand_between_the_tokens_that_their_tokenizer_puts_there(engine: tuple[str, Engine]) -> None:
    name, running = engine
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(ENCODERS[name].tokens()))
    for text in (TEXT, "", "It RAINS, and ..."):
        ids = tokenizer.encode(text).ids
        found = running.embed(text)
        assert found.prompt_tokens == len(ids)
        assert found.vector.tobytes() == running.embed(ids).vector.tobytes()
    assert running.decode(tokenizer.encode(TEXT, add_special_tokens=False).ids).replace(" ,", ",") == TEXT


def test_a_text_may_have_as_many_tokens_as_there_are_positions(engine: tuple[str, Engine]) -> None:
    most = engine[1].manifest.context_length
    assert engine[1].embed([7] * most).prompt_tokens == most
    for text in ([7] * (most + 1), "tree " * most):
        with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {most} tokens; .* to {most}"):
            engine[1].embed(text)


def test_an_encoder_writes_no_text(engine: tuple[str, Engine]) -> None:
    with pytest.raises(InvalidRequest, match="makes embeddings, and writes no text"):
        engine[1].chat([{"role": "user", "content": "once"}])


@pytest.mark.parametrize("name", ENCODERS)
def test_what_transformers_saves_is_the_encoder_that_was_saved(name: str, tmp_path: Path) -> None:
    with open_source(ENCODERS[name].write(tmp_path / "saved", saved=True)) as source:
        assert distance(source, name) <= TOLERANCE


@pytest.mark.parametrize(("name", "feature"), OFFS, ids=map("-".join, OFFS))
def test_the_golden_is_missed_without_each_feature(name: str, feature: str, tmp_path: Path) -> None:
    tiny = ENCODERS[name]
    off = next(off for off in tiny.offs if off.feature == feature)
    with open_source(tiny.write(tmp_path / "off", off)) as source:
        assert distance(source, name) > SEEN / 2


@pytest.mark.parametrize("prefix", ["", "own"])
@pytest.mark.parametrize("name", ENCODERS)
def test_names_are_read_with_and_without_the_prefix_of_their_class(name: str, prefix: str, tmp_path: Path) -> None:
    tiny = ENCODERS[name]
    path = tiny.write(tmp_path / "source")
    with open_source(path) as source:
        expected = {tensor: source.read_float32(tensor) for tensor in source.tensors()}
    begin = "" if not prefix else tiny.prefix
    arrays = {begin + bare(tensor): array for tensor, array in load_file(path / "model.safetensors").items()}
    save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
    with open_source(path) as source:
        assert {*source.tensors()} == {*expected}
        for tensor, array in expected.items():
            np.testing.assert_array_equal(source.read_float32(tensor), array)


def test_an_encoder_without_a_pooling_is_refused(tmp_path: Path) -> None:
    path = ENCODERS["bert"].write(tmp_path / "bert")
    (path / "modules.json").unlink()
    with pytest.raises(UnsupportedArchitecture, match=r"fetch modules\.json"):
        open_source(path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_gguf_file_is_the_same_encoder(name: str, tmp_path: Path) -> None:
    """The same vectors, and the same ids of texts, as of the checkpoint that it was converted from."""
    tiny = ENCODERS[name]
    with open_source(gguf_encoders.write(tiny, tmp_path / f"{name}.gguf")) as source:
        assert source.embedding == EmbeddingInfo(pooling=tiny.pooling)  # type: ignore[arg-type]
        assert distance(source, name) <= TOLERANCE
        ours = tokenizers.Tokenizer.from_str(source.tokenizer_json)
        assert source.add_bos_token and source.bos_token_id == ours.encode("").ids[0]
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tiny.tokens()))
    for text in (TEXT, "", "It RAINS,  and ...", "trees\u00e9 [SEP]"):
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_a_gguf_encoder_without_a_pooling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gguf.GGUFWriter.add_pooling_type", lambda *_: None)
    path = gguf_encoders.write(ENCODERS["bert"], tmp_path / "bert.gguf")
    with pytest.raises(UnsupportedArchitecture, match="a GGUF file that has a pooling_type"):
        open_source(path)
