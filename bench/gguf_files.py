"""A GGUF file written anew with its matrices converted; names, order and metadata stay. Knows the gguf package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Convert = Callable[[gguf.ReaderTensor], NDArray[Any]]  # to the bytes of a quantized type, or to floats

_KEPT = ("token_embd.weight", "output.weight")  # llama.cpp keeps these in more bits, too


def rewritten(source: Path, made: Path, file_type: gguf.LlamaFileType, convert: Convert) -> Path:
    """`made`, if it is there and newer than `source`; else made of it: whole, or not at all.

    All matrices but the embedding and the output matrix go through `convert`, into the type that names `file_type`.
    """
    if made.is_file() and made.stat().st_mtime > source.stat().st_mtime:
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        unfinished = Path(scratch) / made.name
        _write(gguf.GGUFReader(source), unfinished, file_type, convert)
        os.replace(unfinished, made)
    return made


def values_of(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """What a tensor is worth, float32 `[rows, columns]`."""
    return gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def _write(reader: gguf.GGUFReader, path: Path, file_type: gguf.LlamaFileType, convert: Convert) -> None:
    writer = gguf.GGUFWriter(path, arch=str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = int(file_type) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    wanted = _TYPES[file_type]
    for tensor in reader.tensors:
        if len(tensor.shape) == 2 and tensor.name not in _KEPT:
            writer.add_tensor(tensor.name, convert(tensor), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_TYPES = {
    gguf.LlamaFileType.MOSTLY_F16: gguf.GGMLQuantizationType.F16,
    gguf.LlamaFileType.MOSTLY_Q4_0: gguf.GGMLQuantizationType.Q4_0,
}
