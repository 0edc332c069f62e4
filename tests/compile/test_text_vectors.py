"""Embedding models and rerankers, from checkpoints of transformers and sentence-transformers or from a GGUF file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources import open_source
from radixlm.compile.sources.gguf_file import GGUFFile
from radixlm.compile.sources.text_vectors import embedding_of_gguf, reranking_by_name, reranking_of_gguf
from radixlm.runtime.artifact.text_vectors import EmbeddingInfo
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture
from safetensors.numpy import save_file

from ..conftest import CompileOnce
from ..goldens import tiny_gguf
from ..goldens.embeddings import (
    DOCUMENTS,
    NO,
    POOLINGS,
    QUERY,
    RERANKER,
    YES,
    prompts_of,
    scores,
    tiny_embedding,
)
from ..goldens.gguf_dense import DENSE
from ..goldens.gguf_families import GGUF_FAMILIES
from ..goldens.saved import tiny_of

TOLERANCE = 1e-4  # of a vector of length 1, where all is computed in float32
SCORE_TOLERANCE = 1e-6
EMBEDDINGS = [("qwen3", "last"), ("llama", "mean"), ("gemma3", "cls"), ("gemma3-both", "mean")]
MODES = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}


def pooling_of(name: str) -> dict[str, object]:
    """As sentence-transformers writes it: every way, one of which is on."""
    return {mode: key == name for key, mode in MODES.items()}


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector.astype(np.float64) / np.linalg.norm(vector.astype(np.float64))


@pytest.fixture(scope="module", params=EMBEDDINGS, ids="-".join)
def embedding(
    request: pytest.FixtureRequest, compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str, Engine]]:
    """A family, how its hidden states are pooled, and its engine: each family is compiled once."""
    name, pooling = request.param
    tiny = tiny_embedding(name)
    source = tiny.write(tmp_path_factory.mktemp("embedding") / name, pooling_of(pooling))
    path = compile_once(source, "f32", quantize="f32", context_length=tiny.tiny.context_length)
    with Engine(path, num_threads=1, kv_cache_bytes=32 << 20) as engine:
        yield name, pooling, engine


def test_vectors_are_those_of_transformers(embedding: tuple[str, str, Engine]) -> None:
    name, pooling, engine = embedding
    tiny = tiny_embedding(name)
    for found, golden in zip(engine.embed(prompts_of(tiny.tiny)), tiny.pooled, strict=True):
        expected = normalized(golden[pooling])
        assert np.abs(found.vector - expected).max() <= TOLERANCE
        cut = engine.embed(prompts_of(tiny.tiny)[1], dimensions=8).vector
        assert np.abs(cut - normalized(tiny.pooled[1][pooling][:8])).max() <= TOLERANCE


def test_the_golden_tells_poolings_and_prompts_apart(embedding: tuple[str, str, Engine]) -> None:
    """Vectors of the same text by other poolings, and of a text without its last token, are far away."""
    name, pooling, engine = embedding
    tiny = tiny_embedding(name)
    expected = normalized(tiny.pooled[2][pooling])
    others = [normalized(tiny.pooled[2][other]) for other in POOLINGS if other != pooling]
    if name == "gemma3-both":  # as if tokens saw none after them
        others.append(normalized(tiny_embedding("gemma3").pooled[2][pooling]))
    if pooling != "cls":
        others.append(engine.embed(prompts_of(tiny.tiny)[2][:-1]).vector)
    assert all(np.abs(other - expected).max() > 100 * TOLERANCE for other in others)


def test_a_vector_is_the_same_bits_alone_batched_and_cached(embedding: tuple[str, str, Engine]) -> None:
    require_same_bits(embedding[0], embedding[2])


@pytest.mark.parametrize("name", ["qwen3", "gemma3-both"])
def test_integers_and_codes_give_nearly_the_same_vectors_and_the_same_bits(
    name: str, compile_once: CompileOnce, tmp_path: Path
) -> None:
    tiny = tiny_embedding(name)
    source = tiny.write(tmp_path / name, pooling_of("mean"))
    path = compile_once(source, "k12v8", quantize="q8", context_length=tiny.tiny.context_length)
    with Engine(path, num_threads=2, kv_cache_bytes=32 << 20) as engine:
        require_same_bits(name, engine)
        found = engine.embed(prompts_of(tiny.tiny))
        cosines = [each.vector @ normalized(golden["mean"]) for each, golden in zip(found, tiny.pooled, strict=True)]
        assert min(cosines) > 0.99


def require_same_bits(name: str, engine: Engine) -> None:
    """Vectors of texts that begin alike are the same alone, in one batch, and over what is cached."""
    texts = [*prompts_of(tiny_embedding(name).tiny), [5, 6, 7], [5, 6, 8, 9]]
    engine.clear_cache()
    alone = [engine.embed(text).vector.tobytes() for text in texts]
    engine.clear_cache()
    assert [each.vector.tobytes() for each in engine.embed(texts)] == alone  # batched, and cold
    assert [each.vector.tobytes() for each in engine.embed(texts[::-1])] == alone[::-1]  # warm


def test_linear_layers_behind_pooling_are_those_of_sentence_transformers(
    compile_once: CompileOnce, tmp_path: Path
) -> None:
    """As EmbeddingGemma has them: two without a bias; and one with a bias."""
    tiny = tiny_embedding("gemma3-both")
    source = tiny.write(tmp_path / "gemma", pooling_of("mean"))
    hidden, random = tiny.pooled[0]["mean"].size, np.random.default_rng(0)
    first, second = random.normal(size=(3 * hidden, hidden)), random.normal(size=(24, 3 * hidden))
    bias = random.normal(size=24)
    layers = {"2_Dense": {"linear.weight": first}, "3_Dense": {"linear.weight": second, "linear.bias": bias}}
    modules = {"Transformer": {}, "Pooling": pooling_of("mean")}
    write_modules(source, modules)
    listed = json.loads((source / "modules.json").read_text())
    for folder, arrays in layers.items():
        (source / folder).mkdir()
        outputs, inputs = arrays["linear.weight"].shape
        said = {"in_features": inputs, "out_features": outputs, "bias": len(arrays) > 1}
        said["activation_function"] = "torch.nn.modules.linear.Identity"
        (source / folder / "config.json").write_text(json.dumps(said))
        save_file(
            {name: each.astype(np.float32) for name, each in arrays.items()}, source / folder / "model.safetensors"
        )
        listed.append({"idx": len(listed), "name": "", "path": folder, "type": "sentence_transformers.models.Dense"})
    (source / "modules.json").write_text(json.dumps(listed))
    path = compile_once(source, "f32", quantize="f32", context_length=tiny.tiny.context_length)
    with Engine(path, num_threads=1, kv_cache_bytes=32 << 20) as engine:
        for ids, golden in zip(prompts_of(tiny.tiny), tiny.pooled, strict=True):
            found = engine.embed(ids).vector
            expected = second @ (first @ golden["mean"].astype(np.float64)) + bias
            assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
    said["activation_function"] = "torch.nn.modules.activation.Tanh"
    (source / "3_Dense" / "config.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedArchitecture, match="the activation Tanh"):
        open_source(source)


def test_a_gguf_file_of_embedding_gemma_has_its_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp calls it `gemma-embedding`, and counts the layers behind pooling from 2."""
    tiny = tiny_embedding("gemma3-both")
    hidden, random = tiny.pooled[0]["mean"].size, np.random.default_rng(0)
    first, second = random.normal(size=(96, hidden)), random.normal(size=(32, 96))
    stored = [("=dense_2.weight", first.astype(np.float32)), ("=dense_3.weight", second.astype(np.float32))]
    gemma = DENSE["gemma3_text"]
    named = dataclasses.replace(gemma, model_arch=gguf.MODEL_ARCH.GEMMA_EMBEDDING, more=lambda c: stored)
    monkeypatch.setitem(GGUF_FAMILIES, "gemma3_text", named)
    path = tiny_gguf.write(tiny.tiny, tmp_path / "gemma.gguf", more={"gemma-embedding.pooling_type": 1})
    with open_source(path) as source:
        assert source.embedding == EmbeddingInfo(pooling="mean") and source.config.is_bidirectional
        for ids, golden in zip(prompts_of(tiny.tiny), tiny.pooled, strict=True):
            states = evaluate(source.config, ReferenceOps(lambda name: source.read_float32(name), ids))
            expected = second @ (first @ golden["mean"].astype(np.float64))
            assert np.abs(states.mean(axis=0) - expected).max() <= TOLERANCE * np.abs(expected).max()


def test_tokens_that_see_those_after_them_need_an_embedding_model(tmp_path: Path) -> None:
    source = tiny_embedding("gemma3-both").write(tmp_path / "gemma", pooling_of("mean"))
    (source / "modules.json").unlink()
    with pytest.raises(UnsupportedArchitecture, match=r"fetch modules\.json"):
        open_source(source)


def test_a_reranker_scores_as_its_model_card_says(compile_once: CompileOnce, tmp_path: Path) -> None:
    """Its prompt is encoded in three parts there, which are the same ids."""
    source = tiny_of(RERANKER).write(tmp_path / "tiny")
    scoring = {"true_token_id": YES, "false_token_id": NO}
    write_modules(source, {"Transformer": {}, "LogitScore": scoring})
    path = compile_once(source, "f32", quantize="f32", context_length=512)
    with Engine(path, num_threads=1, kv_cache_bytes=32 << 20) as engine:
        found = engine.rerank(QUERY, DOCUMENTS)
        by_place = [each.score for each in sorted(found, key=lambda each: each.index)]
        assert by_place == pytest.approx(list(scores()), abs=SCORE_TOLERANCE)
        other = engine.rerank(QUERY, DOCUMENTS, instruction="is it about trees")
        by_place = [each.score for each in sorted(other, key=lambda each: each.index)]
        assert all(abs(score - golden) > 10 * SCORE_TOLERANCE for score, golden in zip(by_place, scores(), strict=True))


def write_modules(path: Path, modules: dict[str, Any]) -> Path:
    """`modules.json`, and a folder for each module but the first, with its configuration."""
    listed = []
    for index, (name, config) in enumerate(modules.items()):
        folder = f"{index}_{name}" if index else ""
        listed.append({"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.{name}"})
        if index:
            (path / folder).mkdir(exist_ok=True)
            (path / folder / "config.json").write_text(json.dumps(config))
    (path / "modules.json").write_text(json.dumps(listed))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny family with an output matrix."""
    return tiny_of("qwen3").write(tmp_path / "source")


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        (pooling_of("last"), "last"),
        ({"pooling_mode": "lasttoken", "word_embedding_dimension": 64}, "last"),
        ({"pooling_mode": ["mean"], "include_prompt": True}, "mean"),
        ({**pooling_of("cls"), "include_prompt": False}, "cls"),
    ],
)
def test_poolings_are_read_in_all_spellings(said: dict[str, Any], pooling: str, checkpoint: Path) -> None:
    write_modules(checkpoint, {"Transformer": {}, "Pooling": said, "Normalize": {}})
    with open_source(checkpoint) as source:
        assert source.embedding == EmbeddingInfo(pooling=pooling)
        assert source.config.output == "hidden" and source.reranking is None
        assert "lm_head.weight" not in source.tensors()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"Transformer": {}, "Pooling": {"pooling_mode_max_tokens": True}}, r"pooling by \['max_tokens'\]"),
        ({"Transformer": {}, "Pooling": {**pooling_of("last"), "pooling_mode_mean_tokens": True}}, "pooling by"),
        ({"Transformer": {}, "Pooling": {**pooling_of("mean"), "include_prompt": False}}, "include_prompt"),
        ({"Transformer": {}, "Pooling": pooling_of("last"), "WordWeights": {}}, "asks for .*, WordWeights;"),
        ({"Transformer": {}, "Pooling": {"pooling_mode": [["mean"]]}}, "pooling by"),
        ({"Transformer": {}, "LogitScore": {"true_token_id": 5}}, "reranker with one token"),
    ],
)
def test_steps_that_are_not_known_are_named(modules: dict[str, Any], message: str, checkpoint: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        open_source(write_modules(checkpoint, modules))


@pytest.mark.parametrize("text", ["{", '{"a": 1}', '[{"type": 5}]', "[1]", '[{"type": "a.Pooling", "path": "../x"}]'])
def test_modules_that_are_none_are_refused(text: str, checkpoint: Path) -> None:
    (checkpoint / "modules.json").write_text(text)
    with pytest.raises(CorruptSource, match=r"modules\.json"):
        open_source(checkpoint)


@pytest.mark.parametrize("ids", [(5, 999_999_999), (-1, 5)])
def test_a_rerankers_tokens_are_those_of_its_tokenizer(ids: tuple[int, int], checkpoint: Path) -> None:
    said = dict(zip(("true_token_id", "false_token_id"), ids, strict=True))
    with pytest.raises(CorruptSource, match="has no tokens"):
        open_source(write_modules(checkpoint, {"Transformer": {}, "LogitScore": said}))


@pytest.mark.parametrize("size", [None, "64", -1, 0])
def test_a_linear_layer_without_a_size_is_refused(size: object, checkpoint: Path) -> None:
    said = {"out_features": size, "activation_function": "torch.nn.modules.linear.Identity"}
    folder = write_modules(checkpoint, {"Transformer": {}, "Pooling": pooling_of("mean"), "Dense": said})
    [dense] = folder.glob("*_Dense")
    save_file({"linear.weight": np.zeros((4, 64), np.float32)}, dense / "model.safetensors")
    with pytest.raises(CorruptSource, match="cannot be right"):
        open_source(folder)


def test_a_default_prompt_that_is_no_name_is_refused(checkpoint: Path) -> None:
    write_modules(checkpoint, {"Transformer": {}, "Pooling": pooling_of("last")})
    said = {"prompts": {"query": "find: "}, "default_prompt_name": ["query"]}
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(said))
    with pytest.raises(CorruptSource, match="no texts"):
        open_source(checkpoint)


def test_a_models_own_prompts_are_read(checkpoint: Path) -> None:
    write_modules(checkpoint, {"Transformer": {}, "Pooling": pooling_of("last")})
    prompts = {"query": "find: ", "document": ""}
    said = {"prompts": prompts, "default_prompt_name": "document"}
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(said))
    with open_source(checkpoint) as source:
        expected = EmbeddingInfo(pooling="last", normalize=False, prompts=prompts, default_prompt="document")
        assert source.embedding == expected


def test_a_checkpoint_without_such_files_writes_text(checkpoint: Path) -> None:
    with open_source(checkpoint) as source:
        assert (source.embedding, source.reranking, source.config.output) == (None, None, "logits")


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_gguf_file_says_how_vectors_are_made(number: int, pooling: str) -> None:
    metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": number}
    assert embedding_of_gguf(metadata) == EmbeddingInfo(pooling=pooling)  # type: ignore[arg-type]
    assert embedding_of_gguf({**metadata, "general.architecture": "llama"}) is None


def test_a_gguf_reranker_brings_its_template() -> None:
    metadata: dict[str, Any] = {"general.architecture": "qwen3", "qwen3.pooling_type": 4}
    ids = {"yes": 5, "no": 6}
    usual = reranking_of_gguf(metadata, "x", ids)
    assert usual == reranking_by_name("Qwen3-Reranker-0.6B", ids) and usual is not None
    template = usual.template.replace("{instruction}", usual.instruction)
    assert reranking_of_gguf({**metadata, "tokenizer.chat_template.rerank": template}, "x", ids) == usual
    own = reranking_of_gguf({**metadata, "tokenizer.chat_template.rerank": "{query}|{document}"}, "x", ids)
    assert own is not None and own.template == "{query}|{document}"
    with pytest.raises(UnsupportedArchitecture, match="yes or no"):
        reranking_of_gguf(metadata, "x", {})
    assert reranking_by_name("qwen3-0.6b", ids) is None and reranking_by_name("bge-reranker-v2-gemma", ids) is None
    assert reranking_by_name("qwen3-reranker-8b", {}) is None


def test_a_gguf_embedding_model_ends_texts_as_its_tokenizer_does(tmp_path: Path) -> None:
    """Its output matrix, if it has one, is not read."""
    path = tmp_path / "tiny.gguf"
    more = {"qwen3.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    tiny_gguf.write(tiny_of("qwen3"), path, more=more)
    with open_source(path) as source:
        assert source.embedding == EmbeddingInfo(pooling="last") and source.config.output == "hidden"
        single = json.loads(source.tokenizer_json)["post_processor"]["single"]
        assert single[-1]["SpecialToken"]["id"] == "<|im_end|>"


def test_a_vector_in_place_of_a_linear_layer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_gguf.write(tiny_of("qwen3"), tmp_path / "tiny.gguf", more={"qwen3.pooling_type": 3})
    opens = GGUFFile.__init__

    def with_vector(file: GGUFFile, path: Path) -> None:
        opens(file, path)
        file.tensors["dense_2.weight"] = file.tensors["output_norm.weight"]

    monkeypatch.setattr(GGUFFile, "__init__", with_vector)
    with pytest.raises(CorruptSource, match=r"dense_2\.weight has shape \[\d+\], it must be a matrix"):
        open_source(path)
