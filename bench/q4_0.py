"""A GGUF file's matrices rounded to Q4_0, the format that llama.cpp has its fastest CPU kernels for.

Knows the gguf package. The embedding, vectors and metadata stay as the source has them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import gguf
import numpy as np

_KEPT = ("token_embd.weight", "output.weight")  # llama.cpp keeps these in more bits, too


def q4_0_of(source: Path, cache_dir: Path) -> Path:
    """The Q4_0 file made of `source`, from `cache_dir` if it is there; it appears there whole or not at all."""
    made = cache_dir / f"{source.stem}.requantized-Q4_0.gguf"
    if made.is_file() and made.stat().st_mtime > source.stat().st_mtime:
        return made
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
        unfinished = Path(scratch) / made.name
        _write(gguf.GGUFReader(source), unfinished)
        os.replace(unfinished, made)
    return made


def _write(reader: gguf.GGUFReader, path: Path) -> None:
    writer = gguf.GGUFWriter(path, arch=str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = int(gguf.LlamaFileType.MOSTLY_Q4_0) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], sub_type=field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if len(tensor.shape) == 2 and tensor.name not in _KEPT:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            rounded = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0)
            writer.add_tensor(tensor.name, rounded, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
