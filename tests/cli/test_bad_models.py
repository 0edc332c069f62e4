"""Experts, shards and settings that cannot be right, by the command: exit code 2, one line, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from safetensors.numpy import load_file, save_file

from ..goldens import tiny_gguf
from ..goldens.families import FAMILIES

Edit = Callable[[dict[str, np.ndarray]], None]


def refusal(source: Path, output: Path) -> str:
    """The line that `radixlm compile` ends with."""
    output.parent.mkdir()
    done = CliRunner().invoke(cli, ["compile", str(source), "-o", str(output)])
    assert done.exit_code == 2, done.output
    assert not list(output.parent.iterdir())
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("read: ")]
    assert line.startswith("Error: ")
    return line


def written(folder: Path, name: str, edit: Edit | None = None, **changes: Any) -> Path:
    """A tiny family with other arrays, and with other settings; None removes one."""
    source = FAMILIES[name].write(folder / "source")
    if edit is not None:
        arrays = load_file(source / "model.safetensors")
        edit(arrays)
        save_file(arrays, source / "model.safetensors", metadata={"format": "pt"})
    path = source / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return source


def with_nan(name: str) -> Edit:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays[name].reshape(-1)[-1] = np.nan

    return edit


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_weight_that_is_no_number_is_named(name: str, tmp_path: Path) -> None:
    """And neither the manifest nor the verification is blamed."""
    source, output = written(tmp_path, "qwen3", with_nan(name)), tmp_path / "out" / "x.radixlm"
    output.parent.mkdir()
    done = CliRunner().invoke(cli, ["compile", str(source), "-o", str(output)])
    assert (done.exit_code, list(output.parent.iterdir())) == (2, [])
    assert f"Error: {source}: {name} (F32) has numbers of nan" in done.stderr


def without(name: str) -> Edit:
    def edit(arrays: dict[str, np.ndarray]) -> None:
        del arrays[name]

    return edit


def one_less(name: str) -> Edit:
    """All but the last along the first axis: of a stack, an expert less."""

    def edit(arrays: dict[str, np.ndarray]) -> None:
        arrays[name] = arrays[name][:-1].copy()

    return edit


LAYER = "model.layers.1."
QWEN3 = f"{LAYER}mlp.experts."
GPT_OSS = f"{LAYER}mlp.experts."
LLAMA4 = f"{LAYER}feed_forward."


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("qwen3_moe", without(f"{QWEN3}5.up_proj.weight"), "experts.5.up_proj.weight, a part of"),
        ("qwen3_moe", without(f"{QWEN3}7.down_proj.weight"), "is missing; the file is incomplete, fetch it again"),
        ("qwen3_moe", without(f"{LAYER}mlp.gate.weight"), "mlp.gate.weight is missing"),
        ("qwen3_moe", one_less(f"{QWEN3}3.gate_proj.weight"), "experts.gate_proj.weight has shape [511, 64]"),
        ("glm4_moe", without(f"{LAYER}mlp.shared_experts.up_proj.weight"), "shared_experts.up_proj.weight is missing"),
        ("glm4_moe", without(f"{LAYER}mlp.gate.e_score_correction_bias"), "e_score_correction_bias is missing"),
        ("gpt_oss", without(f"{GPT_OSS}gate_up_proj"), "gate_up_proj.weight, a part of"),
        ("gpt_oss", one_less(f"{GPT_OSS}down_proj"), "down_proj.weight has shape [7, 64, 64]"),
        ("gpt_oss", one_less(f"{GPT_OSS}down_proj_bias"), "down_proj.bias has shape [7, 64]"),
        ("gpt_oss", without(f"{LAYER}self_attn.sinks"), "self_attn.sinks is missing"),
        ("gpt_oss-mxfp4", without(f"{GPT_OSS}gate_up_proj_scales"), "gate_up_proj_scales is missing"),
        ("gpt_oss-mxfp4", without(f"{GPT_OSS}gate_up_proj_blocks"), "gate_up_proj"),
        ("gpt_oss-mxfp4", one_less(f"{GPT_OSS}gate_up_proj_scales"), "the other arrays ask for [8, 128, 2]"),
        ("llama4", one_less(f"{LLAMA4}experts.gate_up_proj"), "experts.gate_proj.weight has shape [448, 64]"),
        ("llama4", one_less(f"{LLAMA4}experts.down_proj"), "experts.down_proj.weight has shape [7, 64, 64]"),
        ("llama4", without(f"{LLAMA4}shared_expert.down_proj.weight"), "shared_expert.down_proj.weight is missing"),
    ],
)
def test_an_expert_that_is_missing(name: str, edit: Edit, said: str, tmp_path: Path) -> None:
    assert said in refusal(written(tmp_path, name, edit), tmp_path / "out" / "x.radixlm")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen3_moe", {"num_experts": 9}, "has shape [8, 64], the configuration asks for [9, 64]"),
        ("qwen3_moe", {"num_experts": 7}, "has shape [8, 64], the configuration asks for [7, 64]"),
        ("qwen3_moe", {"num_experts": 0}, "ffn.num_experts"),
        ("qwen3_moe", {"num_experts": "many"}, "ffn.num_experts"),
        ("qwen3_moe", {"num_experts": 8.5}, "ffn.num_experts"),
        ("qwen3_moe", {"num_experts": None}, "num_experts of experts is not given"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "a token cannot have 9 of 8 experts"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_active"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_active of experts is not given"),
        ("qwen3_moe", {"num_experts_per_tok": "two"}, "num_active"),
        ("qwen3_moe", {"moe_intermediate_size": 96}, "the configuration asks for"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "model.layers.1.mlp"),
        ("gpt_oss", {"num_local_experts": 16}, "has shape [8, 64], the configuration asks for [16, 64]"),
        ("gpt_oss-mxfp4", {"num_local_experts": 4}, "the configuration asks for [4, 64]"),
        ("gpt_oss-mxfp4", {"intermediate_size": 32}, "the configuration asks for"),
        ("granitemoe", {"num_local_experts": 4}, "the configuration asks for"),
        ("glm4_moe", {"n_group": 3}, "a token cannot have 1 of 3 groups of 8 experts"),
        ("glm4_moe", {"topk_group": 2}, "a token cannot have 2 of 1 groups of 8 experts"),
        ("glm4_moe", {"n_group": 4}, "a token cannot have 3 of 2 experts"),
        ("glm4_moe", {"n_group": "all"}, "num_groups"),
        ("glm4_moe", {"n_shared_experts": 2}, "the configuration asks for [128, 64]"),
        ("glm4_moe", {"n_shared_experts": 0}, "has no place in"),
        ("glm4_moe", {"first_k_dense_replace": 0}, "model.layers.0.mlp"),
        ("llama4", {"num_local_experts": 4}, "the configuration asks for [4, 64]"),
        ("llama4", {"interleave_moe_layer_step": 1}, "model.layers.0.feed_forward"),
        ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
    ],
)
def test_numbers_of_experts_that_disagree_with_the_tensors(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refusal(written(tmp_path, name, **changes), tmp_path / "out" / "x.radixlm")


def stack_of_seven(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ffn_up_exps.weight"] = tensors["blk.1.ffn_up_exps.weight"][:7]


@pytest.mark.parametrize(
    ("edit", "changes", "said"),
    [
        (without("blk.1.ffn_up_exps.weight"), {}, "experts.up_proj.weight is missing"),
        (stack_of_seven, {}, "experts.up_proj.weight has shape [7, 64, 64], the configuration asks for [8, 64, 64]"),
        (without("blk.0.ffn_gate_inp.weight"), {}, "mlp.gate.weight is missing"),
        (None, {"num_experts": 9}, "the configuration asks for [9, 64]"),
        (None, {"num_experts_per_tok": 9}, "a token cannot have 9 of 8 experts"),
    ],
)
def test_a_gguf_file_whose_experts_cannot_be_right(
    edit: Edit | None, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = FAMILIES["qwen3_moe"]
    tensors = tiny_gguf.tensors(tiny)
    if edit is not None:
        edit(tensors)
    monkeypatch.setattr(tiny_gguf, "tensors", lambda tiny: tensors)
    path = tiny_gguf.write(replace(tiny, config={**tiny.config, **changes}), tmp_path / "tiny.gguf")
    assert said in refusal(path, tmp_path / "out" / "x.radixlm")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_unknown_rope(name: str, key: str, tmp_path: Path) -> None:
    source = written(tmp_path, name, **{"rope_scaling": None, key: {"rope_type": "spiral", "factor": 2.0}})
    assert "'spiral' is not supported, only linear" in refusal(source, tmp_path / "out" / "x.radixlm")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "mxfp5"}, "weights quantized by mxfp5 are not read; read are"),
        ({"quant_method": "quark"}, "weights quantized by quark are not read"),
        ({"quant_method": "torchao"}, "weights quantized by torchao are not read"),
        ({"quant_method": ["gptq"]}, "are not read; read are"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16"}, "ModelOpt's quant_algo 'W4A16' is not read"),
        ({}, "are not read; read are"),
    ],
)
def test_an_unknown_quantization_of_experts(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    source = written(tmp_path, "gpt_oss-mxfp4", quantization_config=settings)
    assert said in refusal(source, tmp_path / "out" / "x.radixlm")


# Checkpoints in several files.

SHARDS = tuple(f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3))


def sharded(folder: Path) -> Path:
    source = FAMILIES["qwen3_moe"].write(folder / "source")
    arrays = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 3] for i, name in enumerate(sorted(arrays))}
    for shard in SHARDS:
        save_file({name: arrays[name] for name in arrays if weight_map[name] == shard}, source / shard)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return source


def without_a_shard(source: Path) -> None:
    (source / SHARDS[1]).unlink()


def without_any(source: Path) -> None:
    for shard in SHARDS:
        (source / shard).unlink()


def with_an_empty_shard(source: Path) -> None:
    os.truncate(source / SHARDS[2], 0)


def with_half_a_shard(source: Path) -> None:
    os.truncate(source / SHARDS[2], (source / SHARDS[2]).stat().st_size // 2)


def with_a_byte_less(source: Path) -> None:
    os.truncate(source / SHARDS[0], (source / SHARDS[0]).stat().st_size - 1)


def with_a_pointer(source: Path) -> None:
    """What git leaves where git-lfs is not installed."""
    (source / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1000\n")


def without_its_index(source: Path) -> None:
    (source / "model.safetensors.index.json").unlink()


def with_half_an_index(source: Path) -> None:
    os.truncate(source / "model.safetensors.index.json", 100)


def with_a_shard_of_others(source: Path) -> None:
    (source / SHARDS[1]).write_bytes((source / SHARDS[0]).read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_a_shard, f"{SHARDS[1]} is missing, model.safetensors.index.json asks for it"),
        (without_any, f"{SHARDS[0]} is missing"),
        (with_an_empty_shard, SHARDS[2]),
        (with_half_a_shard, SHARDS[2]),
        (with_a_byte_less, SHARDS[0]),
        (with_a_pointer, SHARDS[1]),
        (without_its_index, "it has no model.safetensors"),
        (with_half_an_index, "model.safetensors.index.json is no JSON"),
        (with_a_shard_of_others, f"is in no shard, model.safetensors.index.json says {SHARDS[1]}"),
    ],
)
def test_shards_that_are_absent_or_truncated(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    source = sharded(tmp_path)
    damage(source)
    assert said in refusal(source, tmp_path / "out" / "x.radixlm")
