"""Rerankers with a head (cross-encoders) score pairs as transformers does, from each form in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources import open_source
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.model_config import EncoderInput, ModelConfig, ScoreHead
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo, PairTemplate
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.vectors.score_readers import sigmoid
from radixlm.runtime.errors import (
    ContextLengthExceeded,
    CorruptSource,
    InvalidRequest,
    UnsupportedArchitecture,
    UnsupportedTokenizer,
)

from ..conftest import CompileOnce
from ..goldens import gguf_encoders
from ..goldens.encoders import ENCODERS
from ..goldens.rerankers import DOCUMENTS, QUERY, RERANKERS, golden

TOLERANCE = 2e-4  # of the head's number, where all is computed in float32; the numbers' deviation is about 5
SEEN = 1e-2  # by how much each feature moves a number at least
OFFS = [(name, off.feature) for name, tiny in RERANKERS.items() for off in tiny.offs]


def distance(source: Source, name: str, config: ModelConfig | None = None) -> float:
    """The largest difference of the head's numbers from the golden, in NumPy."""
    largest = 0.0
    for (ids, _), number in zip(golden(name).pairs, golden(name).numbers, strict=True):
        op = ReferenceOps(lambda tensor: source.read_float32(tensor), ids)
        largest = max(largest, abs(float(evaluate(config or source.config, op)[0, 0]) - number))
    return largest


@pytest.fixture(scope="module", params=RERANKERS)
def engine(
    request: pytest.FixtureRequest, compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Engine]]:
    """A reranker's name and its engine: each is compiled once."""
    source = RERANKERS[request.param].write(tmp_path_factory.mktemp("reranker") / request.param)
    with Engine(compile_once(source, "f32", quantize="f32"), num_threads=2, kv_cache_bytes=32 << 20) as engine:
        yield request.param, engine


def scores_of(engine: Engine, documents: tuple[str, ...] = DOCUMENTS) -> list[float]:
    """The score of each document, in order."""
    return [each.score for each in sorted(engine.rerank(QUERY, documents), key=lambda each: each.index)]


def test_scores_are_the_sigmoid_of_the_numbers_of_transformers(engine: tuple[str, Engine]) -> None:
    name, running = engine
    expected = [sigmoid(number) for number in golden(name).numbers]
    assert scores_of(running) == pytest.approx(expected, abs=TOLERANCE)


def test_pairs_have_the_tokens_that_the_tokenizer_puts_there(engine: tuple[str, Engine]) -> None:
    name, running = engine
    for document, (ids, _) in zip(DOCUMENTS, golden(name).pairs, strict=True):
        assert list(running.vector_prompts.pair(QUERY, document).ids) == ids


def test_a_score_is_the_same_bits_alone_and_in_a_batch(engine: tuple[str, Engine]) -> None:
    running = engine[1]
    documents = (*DOCUMENTS, "the rain", "the house", "the rain")
    alone = [running.rerank(QUERY, [document])[0].score for document in documents]
    assert scores_of(running, documents) == alone
    assert scores_of(running, documents[::-1]) == alone[::-1]


def test_a_pair_may_have_as_many_tokens_as_there_are_positions(engine: tuple[str, Engine]) -> None:
    running = engine[1]
    most = running.manifest.context_length
    with pytest.raises(ContextLengthExceeded, match=f"prompt 1: .*maximum context length is {most} tokens"):
        running.rerank(QUERY, ["a", "tree " * most])


def test_a_reranker_writes_no_text_and_makes_no_vectors(engine: tuple[str, Engine]) -> None:
    with pytest.raises(InvalidRequest, match="scores documents, and writes no text"):
        engine[1].generate("once")
    with pytest.raises(InvalidRequest, match="makes no embeddings"):
        engine[1].embed("once")


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_integers_give_nearly_the_same_scores_and_the_same_bits(
    name: str, compile_once: CompileOnce, tmp_path: Path
) -> None:
    source = RERANKERS[name].write(tmp_path / name)
    with Engine(compile_once(source, "k12v8", quantize="q8"), num_threads=2, kv_cache_bytes=32 << 20) as running:
        found = scores_of(running)
        assert found == [running.rerank(QUERY, [document])[0].score for document in DOCUMENTS]
        assert found == pytest.approx([sigmoid(number) for number in golden(name).numbers], abs=0.1)


@pytest.mark.parametrize("name", RERANKERS)
def test_what_transformers_saves_is_the_reranker_that_was_saved(name: str, tmp_path: Path) -> None:
    with open_source(RERANKERS[name].write(tmp_path / "saved", saved=True)) as source:
        assert distance(source, name) <= TOLERANCE


@pytest.mark.parametrize(("name", "feature"), OFFS, ids=map("-".join, OFFS))
def test_the_golden_is_missed_without_each_feature(name: str, feature: str, tmp_path: Path) -> None:
    tiny = RERANKERS[name]
    off = next(off for off in tiny.offs if off.feature == feature)
    with open_source(tiny.write(tmp_path / "off", off)) as source:
        assert distance(source, name) > SEEN / 2


def without_types(config: ModelConfig) -> ModelConfig:
    """As if both texts of a pair had the first token type."""
    assert config.encoder_input is not None and config.encoder_input.separator_id is not None
    return replace(config, encoder_input=replace(config.encoder_input, separator_id=None))


def with_head(**changes: object) -> Callable[[ModelConfig], ModelConfig]:
    """As if the head were another one."""

    def change(config: ModelConfig) -> ModelConfig:
        assert config.score is not None
        return replace(config, score=replace(config.score, **changes))

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bert", with_head(pooling="mean")),
        ("bert", with_head(function="gelu")),
        ("xlm_roberta", with_head(pooling="mean")),
        ("xlm_roberta", with_head(function="gelu")),
        ("modernbert", with_head(function="tanh")),
        ("modernbert", with_head(norm=False)),
        ("modernbert", with_head(pooling="cls")),
        ("modernbert-cls", with_head(pooling="mean")),
    ],
)
def test_the_golden_is_missed_by_another_head(
    name: str, change: Callable[[ModelConfig], ModelConfig], tmp_path: Path
) -> None:
    with open_source(RERANKERS[name].write(tmp_path / name)) as source:
        assert distance(source, name) <= TOLERANCE
        assert distance(source, name, change(source.config)) > SEEN


def test_the_golden_is_missed_with_one_token_type(tmp_path: Path) -> None:
    tiny = RERANKERS["bert"]
    with open_source(tiny.write(tmp_path / "bert")) as source:
        types = source.read_float32("model.embeddings.token_type_embeddings.weight").reshape(2, -1)

        def read(name: str) -> np.ndarray:
            return types[0] if "token_type" in name else source.read_float32(name)

        numbers = [
            float(evaluate(without_types(source.config), ReferenceOps(read, ids))[0, 0])
            for ids, _ in golden("bert").pairs
        ]
        assert np.abs(numbers - golden("bert").numbers).max() > SEEN


@pytest.mark.parametrize("name", RERANKERS)
def test_types_follow_from_the_separator(name: str, tmp_path: Path) -> None:
    with open_source(RERANKERS[name].write(tmp_path / name)) as source:
        entering = source.config.encoder_input
        assert entering is not None
        for ids, types in golden(name).pairs:
            first = ids.index(entering.separator_id) if entering.separator_id is not None else len(ids)
            if entering.token_type:  # ModernBERT has none, whatever its tokenizer says
                assert types == [int(place > first) for place in range(len(ids))]


def changed(path: Path, file: str, **changes: object) -> Path:
    """A checkpoint with other values in one of its files; None removes a key."""
    said = json.loads((path / file).read_text()) | changes
    (path / file).write_text(json.dumps({key: value for key, value in said.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "count"), [({"id2label": {"0": "no", "1": "yes", "2": "perhaps"}}, 3), ({"id2label": None}, 2)]
)
@pytest.mark.parametrize("name", ["bert", "xlm_roberta", "modernbert"])
def test_classes_that_are_no_scores_are_refused(
    name: str, changes: dict[str, object], count: int, tmp_path: Path
) -> None:
    path = changed(RERANKERS[name].write(tmp_path / name), "config.json", **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"{count} classes; supported are rerankers, which have one"):
        open_source(path)


def test_a_head_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = RERANKERS["modernbert"].write(tmp_path / "modernbert")
    with pytest.raises(CorruptSource, match="Invalid enum value 'max'"):
        open_source(changed(path, "config.json", classifier_pooling="max"))
    changed(path, "config.json", classifier_pooling="cls", classifier_activation="swish3")
    with pytest.raises(UnsupportedArchitecture, match="classifier_activation 'swish3' is not supported"):
        open_source(path)


def test_a_tokenizer_that_makes_pairs_otherwise_is_refused(tmp_path: Path) -> None:
    path = RERANKERS["bert"].write(tmp_path / "bert")
    processor = json.loads((path / "tokenizer.json").read_text())["post_processor"]
    last = processor["pair"].pop()
    changed(path, "tokenizer.json", post_processor={**processor, "pair": [last, *processor["pair"]]})
    with pytest.raises(UnsupportedTokenizer, match="have the types"):
        open_source(path)
    both = [part for part in processor["pair"] if "Sequence" in part][::-1]
    changed(path, "tokenizer.json", post_processor={**processor, "pair": both})
    with pytest.raises(UnsupportedTokenizer, match="a query before a document"):
        open_source(path)


def test_a_reranker_with_a_pooling_of_its_own_makes_vectors(tmp_path: Path) -> None:
    """Its head is not read, as sentence-transformers would not."""
    path = RERANKERS["xlm_roberta"].write(tmp_path / "xlm")
    ENCODERS["xlm_roberta"].write(tmp_path / "encoder")
    (path / "modules.json").write_text((tmp_path / "encoder" / "modules.json").read_text())
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text((tmp_path / "encoder/1_Pooling/config.json").read_text())
    with open_source(path) as source:
        assert source.embedding == EmbeddingInfo(pooling="mean") and source.pairs is None
        assert source.config.score is None and not any("classifier" in name for name in source.tensors())


def test_a_gguf_file_is_the_same_reranker(tmp_path: Path) -> None:
    """The same numbers, and the same tokens around texts, as of the checkpoint that it was converted from."""
    tiny = RERANKERS["xlm_roberta"]
    with open_source(tiny.write(tmp_path / "checkpoint")) as source:
        pairs = source.pairs
    with open_source(gguf_encoders.write(tiny, tmp_path / "tiny.gguf")) as source:
        assert (source.embedding, source.reranking) == (None, None)
        assert source.pairs == pairs == PairTemplate(before=(0,), between=(2, 2), after=(2,))
        assert source.config.score == ScoreHead() and source.config.output == "hidden"
        assert distance(source, "xlm_roberta") <= TOLERANCE


def test_pairs_of_a_gguf_file_of_bert_have_token_types(tmp_path: Path) -> None:
    """llama.cpp's converter leaves its pooler out, without which there is no score."""
    with pytest.raises(UnsupportedArchitecture, match=r"pooler \(cls\.weight\) is missing"):
        open_source(gguf_encoders.write(RERANKERS["bert"], tmp_path / "tiny.gguf"))
    with open_source(gguf_encoders.write(RERANKERS["bert"], tmp_path / "whole.gguf", with_pooler=True)) as source:
        assert source.pairs == PairTemplate(before=(2,), between=(3,), after=(3,))
        entering = EncoderInput(positions=True, token_type=True, separator_id=3)
        assert source.config.encoder_input == entering
        assert distance(source, "bert") <= TOLERANCE


def test_a_gguf_file_of_classes_is_refused(tmp_path: Path) -> None:
    path = gguf_encoders.write(RERANKERS["xlm_roberta"], tmp_path / "tiny.gguf", labels=("no", "yes"))
    with pytest.raises(UnsupportedArchitecture, match="2 classes"):
        open_source(path)
