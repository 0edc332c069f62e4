"""What a family's checkpoint can have wrong, through the command: exit code 2, one line, nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli

from ...goldens.families import FAMILIES


def refusal(source: Path, output: Path) -> str:
    """The line that the command ends with."""
    output.parent.mkdir()
    done = CliRunner().invoke(cli, ["compile", str(source), "-o", str(output)])
    assert done.exit_code == 2
    assert not list(output.parent.iterdir())
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("read: ")]
    assert line.startswith("Error: ")
    return line


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported, only linear"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "'yarn' lacks or has a wrong 'factor'"),
        ("qwen3", {"intermediate_size": 100}, "has shape [192, 64], the configuration asks for [100, 64]"),
        ("qwen3", {"num_hidden_layers": 9}, "model.layers.3.input_layernorm.weight is missing"),
        ("qwen3", {"num_hidden_layers": 2}, "has no place in the qwen3 architecture (Qwen3)"),
        ("qwen3", {"num_attention_heads": 5}, "5 attention heads cannot share 2"),
        ("qwen3", {"vocab_size": None}, "vocab_size"),
        ("qwen3", {"head_dim": "many"}, "head_dim is 'many', must be a number"),
        ("qwen3", {"hidden_act": "sine"}, "hidden_act 'sine' is not supported, only silu"),
        ("qwen3", {"architectures": ["Qwen3FarForCausalLM"]}, "the nearest is Qwen3"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is not supported for deepseek_v2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported for deepseek_v2"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported for deepseek_v3"),
        (
            "deepseek_v3",
            {"kv_lora_rank": 48},
            "has shape [256, 64], the configuration asks for [256, 48]",
        ),
        ("deepseek_v3", {"qk_rope_head_dim": 24}, "has shape [192, 64], the configuration asks for [224, 64]"),
        ("mistral4", {"v_head_dim": 40}, "has shape [256, 64], the configuration asks for [288, 64]"),
        ("olmo2", {"architectures": ["Olmo9ForCausalLM"]}, "OLMo 2"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 3}, "layer_types has no value for layer 3, it has 3"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types has no value for layer 1, it has 1"),
        ("llama4", {"no_rope_layers": [1]}, "no_rope_layers has no value for layer 1, it has 1"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 6}, "is 'chunked_attention', which is not supported for"),
        ("gpt_oss", {"layer_types": ["sliding", "full"]}, "layer 0 is 'sliding', which is not supported for gpt_oss"),
        (
            "exaone4",
            {"layer_types": None, "sliding_window_pattern": "LLLX"},
            "sliding_window_pattern is 'X', which is not supported for exaone4, only L and G",
        ),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "only chunked_attention and full_attention"),
        ("lfm2", {"layer_types": ["convolution"] * 9}, "only full_attention and conv"),
        ("qwen3_5", {"layer_types": ["mamba"] * 9}, "only full_attention and linear_attention"),
        ("granite4_h", {"layer_types": ["conv"] * 9}, "only attention and full_attention and mamba"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe"] * 9}, "layer 1 is 'moe'"),
    ],
)
def test_a_configuration_that_cannot_be_right(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = FAMILIES[name].write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))
    assert message in refusal(source, tmp_path / "out" / "x.radixlm")


@pytest.mark.parametrize(("key", "count"), [("short_factor", 1), ("long_factor", 1), ("long_factor", 25)])
def test_factors_of_longrope_of_another_number_than_pairs(key: str, count: int, tmp_path: Path) -> None:
    """One factor was taken for all, whatever context was compiled; `inspect` refuses it as well."""
    source = FAMILIES["phi3"].write(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    pairs = len(config["rope_scaling"]["long_factor"])
    assert count != pairs
    config["rope_scaling"][key] = [1.0] * count
    (source / "config.json").write_text(json.dumps(config))
    said = f"RoPE has {count} {key.replace('_', ' ')}s, {pairs} pairs of a head rotate"
    assert said in refusal(source, tmp_path / "out" / "x.radixlm")
    inspected = CliRunner().invoke(cli, ["inspect", str(source)])
    assert inspected.exit_code == 2 and said in inspected.stderr
