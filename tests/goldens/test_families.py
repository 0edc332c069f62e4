"""Goldens of families belong to the checkpoints that tests write, and those can be written as GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from . import tiny_gguf
from .families import FAMILIES, MTP_FAMILIES, Off
from .tiny_models import TINY_MODELS
from .tiny_outputs import FOLDER, TinyOutputs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_golden_is_of_the_weights_that_are_written(name: str) -> None:
    tiny, golden = FAMILIES[name], TinyOutputs.load(name)
    assert golden.digest == tiny.digest()
    assert [prompt.ids for prompt in golden.prompts] == tiny.prompts()
    for prompt in golden.prompts:
        assert prompt.logits.shape == (len(prompt.rows), len(prompt.columns))
        assert prompt.rows[-1] == len(prompt.ids) - 1


def test_every_golden_is_of_a_model() -> None:
    assert {path.stem for path in FOLDER.glob("*.npz")} == {*FAMILIES, *MTP_FAMILIES, *TINY_MODELS}


def test_goldens_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.npz")) < 2_000_000


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_features_that_can_be_switched_off(name: str) -> None:
    features = [off.feature for off in FAMILIES[name].offs]
    assert features and len(set(features)) == len(features)


def test_a_feature_that_is_off_is_off_in_the_checkpoint(tmp_path: Path) -> None:
    tiny = FAMILIES["glm4"]
    tiny.write(tmp_path, Off("x", config={"attention_bias": False, "head_dim": None}, tensors={"q_proj.bias": 0.0}))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attention_bias"] is False and "head_dim" not in config
    tensors = load_file(tmp_path / "model.safetensors")
    changed = {name for name, weight in tensors.items() if not np.array_equal(weight, tiny.tensors[name])}
    assert changed == {f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(2)}


@pytest.mark.parametrize("name", [name for name, tiny in FAMILIES.items() if tiny_gguf.converter(tiny)])
def test_a_gguf_file_holds_every_number_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    tiny = FAMILIES[name]
    reader = gguf.GGUFReader(tiny_gguf.write(tiny, tmp_path / "tiny.gguf"))
    added = (
        ("attn_q_norm", "attn_k_norm") if name == "muse_glimmer" else ()
    )  # constants, which llama.cpp wants as gains
    found = sum(
        int(tensor.n_elements)
        for tensor in reader.tensors
        if not tensor.name.startswith("rope_") and not any(part in tensor.name for part in added)
    )
    assert found == sum(weight.size for weight in tiny.tensors.values())
