"""MLC's tensor cache: arrays come out as they were written, and files that disagree are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from radixlm.compile.sources.tensor_files import cached_arrays
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

ARRAYS = {
    "words": np.arange(24, dtype=np.uint32).reshape(4, 6),
    "halves": np.linspace(-1, 1, 10).astype(np.float16),
    "narrowed": np.linspace(-1, 1, 12).astype(ml_dtypes.bfloat16).reshape(3, 4),
    "floats": np.linspace(0, 1, 6).astype(np.float32),
}
DTYPES = {"words": "uint32", "halves": "float16", "narrowed": "float32", "floats": "float32"}


def write_cache(directory: Path, arrays: dict[str, np.ndarray], dtypes: dict[str, str]) -> dict[str, Any]:
    """Two shards; bfloat16 arrays that are called float32 are written as `f32-to-bf16`."""
    shards = []
    for number, names in enumerate((list(arrays)[:2], list(arrays)[2:])):
        data, records = b"", []
        for name in names:
            array = arrays[name]
            is_narrowed = array.dtype == ml_dtypes.bfloat16 and dtypes[name] == "float32"
            records.append(
                {
                    "name": name,
                    "shape": list(array.shape),
                    "dtype": dtypes[name],
                    "format": "f32-to-bf16" if is_narrowed else "raw",
                    "nbytes": array.nbytes,
                    "byteOffset": len(data),
                }
            )
            data += array.tobytes()
        path = f"params_shard_{number}.bin"
        (directory / path).write_bytes(data)
        shards.append({"dataPath": path, "format": "raw-shard", "nbytes": len(data), "records": records})
    return {"metadata": {"ParamSize": len(arrays)}, "records": shards}


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = cached_arrays(tmp_path, write_cache(tmp_path, ARRAYS, DTYPES))
    assert {name: array.dtype for name, array in arrays.items()} == {
        "words": "U32",
        "halves": "F16",
        "narrowed": "BF16",
        "floats": "F32",
    }
    for name, expected in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name][:], expected)
        np.testing.assert_array_equal(arrays[name][1:3], expected[1:3])
    np.testing.assert_array_equal(arrays["words"][:, 2:5], ARRAYS["words"][:, 2:5])


def shortened(directory: Path, index: dict[str, Any]) -> None:
    path = directory / "params_shard_1.bin"
    path.write_bytes(path.read_bytes()[:-1])


def without_a_shard(directory: Path, index: dict[str, Any]) -> None:
    (directory / "params_shard_0.bin").unlink()


def outside_the_directory(directory: Path, index: dict[str, Any]) -> None:
    index["records"][0]["dataPath"] = "../params_shard_0.bin"


def over_the_end(directory: Path, index: dict[str, Any]) -> None:
    index["records"][0]["records"][1]["byteOffset"] += 2


def of_another_shape(directory: Path, index: dict[str, Any]) -> None:
    index["records"][0]["records"][0]["shape"] = [4, 7]


def before_the_beginning(directory: Path, index: dict[str, Any]) -> None:
    index["records"][0]["records"][0]["byteOffset"] = -4


def without_records(directory: Path, index: dict[str, Any]) -> None:
    del index["records"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shortened, "has 47 bytes, tensor-cache.json says 48"),
        (without_a_shard, r"params_shard_0\.bin is missing"),
        (outside_the_directory, "is no shard beside"),
        (over_the_end, "halves of shape .* the shard has 116"),
        (of_another_shape, "has 112 bytes from 0 on, its record says 96"),
        (before_the_beginning, "byteOffset"),
        (without_records, "records"),
    ],
)
def test_files_that_disagree_are_refused(
    damage: Callable[[Path, dict[str, Any]], None], said: str, tmp_path: Path
) -> None:
    index = copy.deepcopy(write_cache(tmp_path, ARRAYS, DTYPES))
    damage(tmp_path, index)
    with pytest.raises(CorruptSource, match=said):
        cached_arrays(tmp_path, index)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    index = write_cache(tmp_path, ARRAYS, DTYPES | {"words": "float8_e4m3fn"})
    with pytest.raises(UnsupportedTensor, match="words is stored as float8_e4m3fn"):
        cached_arrays(tmp_path, index)
