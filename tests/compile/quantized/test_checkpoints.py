"""Whole checkpoints of each format open without a flag, read as what they are, and compile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.compile.sources.safetensors_file import SafetensorsFile
from radixlm.runtime.artifact.manifest import SamplingDefaults
from radixlm.runtime.errors import UnsupportedArchitecture

from ..conftest import write_safetensors
from .checkpoints import FORMATS, write_checkpoint, write_mlc

Make = Callable[..., Any]


@pytest.mark.parametrize("format_", list(FORMATS))
def test_a_checkpoint_opens_and_compiles(
    format_: str, make_tiny: Make, write_huggingface: Make, tmp_path: Path
) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    expected = write_checkpoint(path, tiny, format_)
    with open_source(path) as source:
        assert source.tensors().keys() == tiny.weights.keys()
        for name, numbers in expected.items():
            np.testing.assert_array_equal(source.read_float32(name), numbers)
    report = compile_model(path, tmp_path / "tiny.radixlm")  # compared with NumPy
    kinds = report.manifest.quantization.kinds
    exact = [info.relative_error for info in kinds.values()]
    assert max(exact) < (0.01 if format_ == "fp8" else 1e-6)
    assert (max(exact) > 0) == (format_ == "fp8")


def test_sorted_inputs_compile_at_every_precision(make_tiny: Make, write_huggingface: Make, tmp_path: Path) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    write_checkpoint(path, tiny, "gptq sorted")
    for quantize in ("q8", "f32"):
        report = compile_model(path, tmp_path / f"{quantize}.radixlm", quantize=quantize)
        assert report.verification.median_difference < report.verification.tolerance


def test_settings_beside_the_configuration_are_gptqs(make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny()
    path = write_huggingface(tiny)
    expected = write_checkpoint(path, tiny, "gptq")
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "quantize_config.json").write_text(json.dumps(settings))
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_array_equal(open_source(path).read_float32(name), expected[name])


def test_mlc_opens_and_compiles(make_tiny: Make, write_huggingface: Make, tmp_path: Path) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    numbers = write_mlc(path, tiny)
    with open_source(path) as source:
        assert source.config == tiny.config
        assert source.tensors().keys() == tiny.weights.keys()
        assert (source.info.format, source.bos_token_id, source.eos_token_ids) == ("mlc", 1, (2, 0))
        assert source.sampling == SamplingDefaults(temperature=0.5)
        parts = [source.read_float32(f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
        np.testing.assert_array_equal(np.concatenate(parts), numbers["model.layers.0.self_attn.qkv_proj.weight"])
        up = source.read_float32("model.layers.0.mlp.up_proj.weight", slice(16, 40))
        np.testing.assert_array_equal(up, numbers["model.layers.0.mlp.gate_up_proj.weight"][96 + 16 : 96 + 40])
        first = source.info.fingerprint
    report = compile_model(path, tmp_path / "tiny.radixlm")
    assert report.manifest.quantization.kinds["q4_g32"].relative_error == 0
    shutil.move(path / "tensor-cache.json", path / "ndarray-cache.json")
    assert open_source(path).info.fingerprint == first
    assert report.template_fault is None
    (path / "tokenizer_config.json").unlink()
    report = compile_model(path, tmp_path / "completing.radixlm")
    assert report.template_fault == "the source has no chat template"


def test_a_bias_that_is_not_zero_is_not_dropped(make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny()
    path = write_huggingface(tiny)
    write_checkpoint(path, tiny, "gptq")
    file = SafetensorsFile(path / "model.safetensors")
    arrays = {name: file.values(name) for name in file.tensors}
    arrays["model.layers.0.mlp.up_proj.bias"][3] = 1
    write_safetensors(path / "model.safetensors", arrays)
    with pytest.raises(UnsupportedArchitecture, match=r"up_proj\.bias has no place"):
        open_source(path)
