"""Write a GGUF file in parts, as llama-gguf-split does."""

from __future__ import annotations

from pathlib import Path

import gguf


def split_in(path: Path, folder: Path, tensors_of_a_part: int) -> list[Path]:
    """Write a file again as parts called `tiny-00001-of-...`, with so many tensors in each; return them in order."""
    whole = gguf.GGUFReader(path)
    architecture = whole.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "tiny.gguf", architecture, split_max_tensors=tensors_of_a_part)
    for key, field in whole.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            of_items = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], of_items)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())
