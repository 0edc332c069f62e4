"""Write a GGUF model with as many KV heads as heads: each KV head once for every head that shares it.

    python -m bench.partial.all_heads MODEL.gguf NEW.gguf

The new model computes the same as the old one, from the same quantized rows, and has more keys and values. So a method
that selects rows by KV head is measured on the heads of a trained model. Heads that shared a KV head have equal keys
and different queries, so they agree more often than heads that were trained separately. Knows Llama and Qwen2 in GGUF.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_DERIVED = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")  # the writer's own


def write(source: Path, target: Path) -> None:
    """Copy a GGUF file, with its KV heads repeated until each query head has its own."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    kv_key = f"{architecture}.attention.head_count_kv"
    num_heads = int(reader.fields[f"{architecture}.attention.head_count"].contents())
    num_kv_heads = int(reader.fields[kv_key].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name not in _DERIVED:
            value = num_heads if name == kv_key else field.contents()
            kind = field.types[0]
            writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        data = np.asarray(tensor.data)
        if ".attn_k." in tensor.name or ".attn_v." in tensor.name:
            data = repeated(data, num_kv_heads, num_heads // num_kv_heads)
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def repeated(rows: NDArray[np.generic], num_heads: int, times: int) -> NDArray[np.generic]:
    """Return the rows of each head `times` times, head by head.

    >>> repeated(np.array([1, 2, 3, 4]), num_heads=2, times=2).tolist()
    [1, 2, 1, 2, 3, 4, 3, 4]
    """
    heads = rows.reshape(num_heads, -1, *rows.shape[1:])
    return np.ascontiguousarray(np.repeat(heads, times, axis=0).reshape(-1, *rows.shape[1:]))


def main() -> None:
    """Write the copy of a GGUF file that has a KV head for each query head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    write(options.source, options.target)


if __name__ == "__main__":
    main()
