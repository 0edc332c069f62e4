"""Latent attention in artifacts: integer weights, what an engine shares, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.cli.tables import layer_rows
from radixlm.compile import compile_model
from radixlm.compile.kv_layout import KVChoice
from radixlm.compile.ops.implemented import check_implemented
from radixlm.compile.sources.gguf import GGUFSource
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.artifact.model_config import LatentAttention
from radixlm.runtime.errors import UnsupportedArchitecture
from radixlm.runtime.model.model_runner import ModelRunner
from safetensors.numpy import load_file, save_file

from ...goldens import gguf_families, tiny_gguf
from ...goldens.families import FAMILIES
from ...goldens.gguf_latest import OLDER_LATENT
from ...goldens.tiny_outputs import TinyOutputs
from ..ragged import Rows
from .harness import distance
from .test_compiled import NUM_PAGES, SMALL, chunked, whole

Q8_0 = gguf.GGMLQuantizationType.Q8_0
OF_HEADS = {part: Q8_0 for part in ("attn_k_b", "attn_v_b", "attn_q_b", "attn_output")}


@pytest.mark.parametrize(("name", "kv_dtype"), [("deepseek_v2", "auto"), ("mistral4", "f32")])
def test_integer_matrices_of_heads_give_each_token_bits_of_its_own(
    name: str, kv_dtype: KVChoice, tmp_path: Path
) -> None:
    """Compilation compares the artifact with NumPy's evaluation of the same integers."""
    source = tiny_gguf.write(FAMILIES[name], tmp_path / "tiny.gguf", OF_HEADS)
    report = compile_model(source, tmp_path / "tiny.radixlm", kv_dtype=kv_dtype, context_length=512)
    assert report.manifest.quantization.kinds["q8_g32"].count > 4
    artifact, prompts = Artifact.open(report.path), TinyOutputs.load(name).prompts[:3]
    runner = ModelRunner(artifact, num_pages=NUM_PAGES)
    rows = Rows(runner, NUM_PAGES, artifact.manifest.module.max_num_logits)
    alone = [whole(rows, prompt) for prompt in prompts]
    for found, expected in zip(chunked(rows, prompts, SMALL), alone, strict=True):
        assert np.array_equal(found, expected)
    runner.close()


def test_a_page_holds_a_row_once_and_engines_share_it(
    artifact_of: Callable[[str, KVDType], Artifact], tmp_path: Path
) -> None:
    artifact = artifact_of("deepseek_v2", "f16")
    kv, mixer = artifact.manifest.kv, artifact.manifest.model.layers[0].mixer
    assert isinstance(mixer, LatentAttention)
    assert kv.page_bytes == 16 * 2 * len(kv.layers) * (mixer.latent_dim + mixer.rope.rotary_dim)
    heads = dict(layer_rows(artifact.manifest.model))["heads"]
    assert heads == "4 of 48, one latent row of 80 for all"
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = TinyOutputs.load("deepseek_v2").prompts[2].ids
    with Engine(artifact, kv_cache_bytes=1 << 22) as engine:
        cold, warm = (engine.generate(prompt, greedy) for _ in range(2))
        parted = engine.generate(prompt[:40] + prompt[50:], greedy)  # in the middle of a page
        engine.check()
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, len(prompt) - 1)
    assert parted.usage.cached_tokens == 40
    assert warm.token_ids == cold.token_ids
    for num_stored in (0, len(prompt) // PAGE_SIZE * PAGE_SIZE):  # on disk, from one engine to the next
        with Engine(artifact, kv_cache_bytes=1 << 22, store=tmp_path, store_bytes=1 << 24) as engine:
            stored = engine.generate(prompt, greedy)
        assert (stored.usage.cached_tokens, stored.token_ids) == (num_stored, cold.token_ids)
    with Engine(artifact, kv_cache_bytes=1 << 22) as engine:
        assert engine.generate(prompt[:40] + prompt[50:], greedy).token_ids == parted.token_ids


def test_a_language_model_inside_mistral_3_is_found_by_its_type(tmp_path: Path) -> None:
    source = FAMILIES["mistral4"].write(tmp_path)
    config = json.loads((source / "config.json").read_text())
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": config}
    (source / "config.json").write_text(json.dumps(outer))
    tensors = load_file(source / "model.safetensors")
    seeing = {"vision_tower.x.weight": np.zeros((2, 2), np.float32)}
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | seeing, source / "model.safetensors")
    assert distance(HuggingFaceSource(source), "mistral4") <= 1e-4


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_gguf_file_may_have_keys_and_values_in_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before April 2025. What is turned of codes is rounded again, rows are kept as they are."""
    monkeypatch.setitem(gguf_families.GGUF_FAMILIES, name, OLDER_LATENT)
    source = GGUFSource(tiny_gguf.write(FAMILIES[name], tmp_path / "tiny.gguf"))
    assert distance(source, name) <= 1e-4
    source = GGUFSource(tiny_gguf.write(FAMILIES[name], tmp_path / "q8.gguf", {"attn_kv_b": Q8_0}))
    for part, is_exact in (("k_b", False), ("v_b", True)):
        stem = f"model.layers.1.self_attn.{part}_proj.weight"
        whole, some = source.read(stem).dequantize(), source.read(stem, slice(40, 100)).dequantize()
        assert np.array_equal(some, whole[40:100])
        found, expected = whole.ravel(), source.read_float32(stem).ravel()
        assert np.array_equal(found, expected) if is_exact else 0 < np.abs(found - expected).max() < 0.02


def test_heads_of_odd_sizes_are_refused_by_name(source_of: Callable[..., Source]) -> None:
    config = source_of("deepseek_v2").config
    check_implemented("tiny", config)
    layer = config.layers[0]
    odd = replace(config, layers=(replace(layer, mixer=replace(layer.mixer, value_dim=24)),))
    with pytest.raises(UnsupportedArchitecture, match="latent attention of heads whose sizes are no multiples of 16"):
        check_implemented("tiny", odd)
