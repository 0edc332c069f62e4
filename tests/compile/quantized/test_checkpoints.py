"""Whole checkpoints of each format open without a flag, read as what they are, and compile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.compile.sources.tensor_files import SafetensorsFile
from radixlm.compile.stored_weights import StoredWeights
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING
from radixlm.runtime.errors import SourceError, UnsupportedArchitecture

from ..conftest import write_safetensors
from .checkpoints import FORMATS, write_checkpoint, write_mlc

Make = Callable[..., Any]
# What storing costs at most, relative to the numbers: 8-bit floats become integers, scales times a factor float16.
ROUNDED = {"fp8": 0.01, "nvfp4": 5e-4}


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
            np.testing.assert_allclose(source.read_float32(name), numbers, rtol=1e-6 if "nvfp4" in format_ else 0)
    report = compile_model(path, tmp_path / "tiny.radixlm")  # compared with NumPy
    kinds = report.manifest.quantization.kinds
    error = max(info.relative_error for info in kinds.values())
    largest = next((error for part, error in ROUNDED.items() if part in format_), 0.0)
    assert (error > 0) == (largest > 0) and error <= largest


def test_sorted_inputs_compile_at_every_precision(make_tiny: Make, write_huggingface: Make, tmp_path: Path) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    write_checkpoint(path, tiny, "gptq sorted")
    for quantize in ("q8", "f32"):
        report = compile_model(path, tmp_path / f"{quantize}.radixlm", quantize=quantize)
        assert report.verification.median_difference < report.verification.tolerance


@pytest.mark.parametrize(
    ("format_", "file", "settings"),
    [
        ("awq", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        (
            "modelopt fp8",
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        ),
        ("modelopt nvfp4", "hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "NVFP4"}}),
    ],
)
def test_settings_in_a_file_of_their_own(
    format_: str, file: str, settings: dict[str, Any], make_tiny: Make, write_huggingface: Make
) -> None:
    tiny = make_tiny()
    path = write_huggingface(tiny)
    expected = write_checkpoint(path, tiny, format_)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / file).write_text(json.dumps(settings))
    name = "model.layers.1.mlp.down_proj.weight"
    np.testing.assert_allclose(open_source(path).read_float32(name), expected[name], rtol=1e-6)
    (path / file).unlink()
    with pytest.raises(SourceError):  # without the file they are tensors of nothing
        open_source(path)


def test_8_bit_floats_are_widened_without_a_detour_over_integers(
    make_tiny: Make, write_huggingface: Make, tmp_path: Path
) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    expected = write_checkpoint(path, tiny, "fp8")
    name = "model.layers.0.mlp.down_proj.weight"
    with open_source(path) as source:
        np.testing.assert_array_equal(StoredWeights(source, "f32").float32(name), expected[name])
        np.testing.assert_array_equal(
            StoredWeights(source, "f16").float32(name), expected[name].astype(np.float16).astype(np.float32)
        )
        np.testing.assert_array_equal(StoredWeights(source, "f32").read(name, slice(3, 9)).codes, expected[name][3:9])
        assert np.abs(StoredWeights(source, "keep").float32(name) - expected[name]).max() > 1e-4
    report = compile_model(path, tmp_path / "tiny.radixlm", quantize="f32")
    assert report.manifest.quantization.kinds["f32"].relative_error == 0


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
        assert source.sampling == replace(USUAL_SAMPLING, temperature=0.5)
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
