"""Tensors of a safetensors file of any type, whole and in parts."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from radixlm.compile.sources.quantized.tensors import first_bytes
from radixlm.compile.sources.tensor_files import SafetensorsFile

from .conftest import write_safetensors

TENSORS = {
    "floats": np.linspace(-2, 2, 40).astype(np.float32).reshape(4, 10),
    "words": np.arange(40, dtype=np.int32).reshape(4, 10),
    "eights": np.linspace(-2, 2, 40).astype(ml_dtypes.float8_e4m3fn).reshape(4, 10),
    "powers": (2.0 ** np.arange(-20, 20)).astype(ml_dtypes.float8_e8m0fnu).reshape(4, 10),
    "one": np.array(3, np.float32),
    "one eight": np.array(3, ml_dtypes.float8_e4m3fn),
    "none": np.empty((0, 3), ml_dtypes.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path: Path) -> SafetensorsFile:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    return SafetensorsFile(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", list(TENSORS))
def test_values_are_those_that_were_written(name: str, file: SafetensorsFile) -> None:
    assert file.tensors[name].shape == TENSORS[name].shape
    values = file.values(name)
    assert values.dtype == TENSORS[name].dtype
    np.testing.assert_array_equal(values, TENSORS[name])
    assert first_bytes(file.tensors[name], 7) == TENSORS[name].tobytes()[:7]


@pytest.mark.parametrize("name", ["floats", "words", "eights", "powers"])
def test_parts_are_read(name: str, file: SafetensorsFile) -> None:
    tensor, expected = file.tensors[name], TENSORS[name]
    np.testing.assert_array_equal(tensor[1:3], expected[1:3])
    np.testing.assert_array_equal(tensor[:, 3:7], expected[:, 3:7])
    np.testing.assert_array_equal(tensor[:], expected)


def test_values_outlive_the_file(file: SafetensorsFile) -> None:
    values = {name: file.values(name) for name in TENSORS}
    file.close()
    for name, expected in TENSORS.items():
        np.testing.assert_array_equal(values[name], expected)
