"""Write a tiny family as the GGUF file that llama.cpp's converter makes of it; tensors in float32, unless told else.

    tiny_gguf.write(FAMILIES["qwen3"], path)

Needs NumPy and gguf. What a family's converter does beside renaming is in `gguf_families.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from .gguf_dense import Converter, Value
from .gguf_families import converter_of
from .tiny_models import BOS, CHAT_TEMPLATE, IM_END, TinyModel, tokenizer


def converter(tiny: TinyModel) -> Converter | None:
    """What llama.cpp's converter does for the family; None: it has none."""
    return converter_of(tiny.text)


def write(
    tiny: TinyModel,
    path: Path,
    types: Mapping[str, Type] | None = None,
    quantize: Callable[[np.ndarray, Type], np.ndarray] = gguf.quants.quantize,
    more: Mapping[str, Value] | None = None,
) -> Path:
    """Write `tiny` to `path` and return it; ValueError if llama.cpp does not know the family.

    Tensors whose names contain a key of `types` are stored as that type, in bytes that `quantize` gives.
    `more` are keys beside the usual ones.
    """
    how = converter(tiny)
    if how is None:
        raise ValueError(f"llama.cpp has no converter for {tiny.text['model_type']}")
    writer = gguf.GGUFWriter(path, how.architecture)
    for key, value in how.metadata(tiny.text).items():
        _add(writer, f"{how.architecture}.{key}", value)
    for key, value in (more or {}).items():
        _add(writer, key, value)
    _add_tokenizer(writer, tiny.vocab_size)
    for name, tensor in tensors(tiny).items():
        type_ = next((type_ for part, type_ in (types or {}).items() if part in name), None)
        data = np.ascontiguousarray(tensor)
        writer.add_tensor(name, data if type_ is None else quantize(data, type_), raw_dtype=type_ or Type.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(tiny: TinyModel) -> dict[str, np.ndarray]:
    """All tensors under GGUF's names, in GGUF's layout."""
    how = converter(tiny)
    assert how is not None
    return _renamed(tiny, how, how.tensors(tiny.text, stacked(tiny.tensors)))


def renamed(tiny: TinyModel, matrices: Mapping[str, np.ndarray], *, reorders: bool) -> dict[str, np.ndarray]:
    """Parts of matrices under GGUF's names; with `reorders` their rows are in GGUF's order."""
    how = converter(tiny)
    assert how is not None
    changed = (each for name, rows in matrices.items() for each in how.change(tiny.text, name, rows))
    return _renamed(tiny, how, changed if reorders else matrices.items())


def _renamed(tiny: TinyModel, how: Converter, given: Iterable[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(how.model_arch, int(how.metadata(tiny.text)["block_count"]))  # type: ignore[arg-type]
    found = {}
    for name, weight in given:
        stem, suffix = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups(default="")  # type: ignore[union-attr]
        stem = stem.removeprefix("=")
        renamed = stem if name.startswith("=") else names.get_name(stem)
        if renamed is None:
            raise ValueError(f"gguf knows no name for {name} of {how.architecture}")
        found[renamed + suffix] = weight
    return found


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`tensors` where those of each expert or head are one stack: experts.3.up_proj is experts.up_proj[3]."""
    found: dict[str, Any] = {}
    for name, weight in tensors.items():
        match = re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)(\..*)", name)
        if match:
            found.setdefault(match[1] + match[3], []).append(weight)
        else:
            found[name] = weight
    return {name: np.stack(weight) if isinstance(weight, list) else weight for name, weight in found.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    content: Any = tokenizer(vocab_size)
    vocab = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    pieces = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    types = (gguf.TokenType.CONTROL if piece in special else gguf.TokenType.NORMAL for piece in pieces)
    writer.add_token_types(list(types))
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(IM_END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
