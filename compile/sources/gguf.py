"""A GGUF file as a model source: llama.cpp's names, dimensions and row order turned into Hugging Face's.

Knows how llama.cpp's converter renames and permutes. `gguf_file.py` reads the file, `gguf_blocks.py` its blocks; what
differs between model families is said in their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import ModelConfig, SamplingDefaults, SourceInfo
from radixlm.runtime.errors import CorruptSource, SourceError, UnsupportedArchitecture, UnsupportedTensor

from ..models.registry import MODELS, SUPPORTED
from ..weights.quantization import Float32, Weight
from .checkpoint import END_OF_REPLY, check_heads, check_tensors, checked
from .gguf_blocks import BLOCK_TYPES, PLAIN_TYPES, weight_from_blocks
from .gguf_file import NOT_READ, GGUFFile
from .gguf_tokenizer import build_tokenizer_json, vocabulary_from_gguf
from .source import TensorInfo

_SAMPLE_BYTES = 1024  # of each tensor, in the fingerprint


class GGUFSource:
    """A model in one `.gguf` file; a `Source`."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        """Raises SourceNotFound, CorruptSource, UnsupportedArchitecture, -Tensor or -Tokenizer."""
        self._file = GGUFFile(path)
        metadata = self._file.metadata
        _refuse_parts(path, metadata)
        self.name = name or path.stem
        self.config = _config(self._file)
        layer_names = MODELS[self.config.architecture].gguf_layer_names
        self._factors, scales = _whole_tensor_scales(self._file)
        self._tensors = {
            _hugging_face_name(name, layer_names): name
            for name in self._file.tensors
            if name not in {_ROPE_FREQS, *scales}
        }
        check_heads(str(path), self.config)
        check_tensors(str(path), self.config, self.tensors())
        self._check_types()
        vocabulary = vocabulary_from_gguf(metadata)
        if len(vocabulary.tokens) > self.config.vocab_size:
            raise CorruptSource(
                f"{path}: the tokenizer has {len(vocabulary.tokens)} tokens, "
                f"the embedding {self.config.vocab_size} rows"
            )
        self.tokenizer_json = build_tokenizer_json(vocabulary)
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self.bos_token_id = vocabulary.bos_token_id
        self.add_bos_token = vocabulary.add_bos_token and vocabulary.bos_token_id is not None
        self.eos_token_ids = _eos_token_ids(metadata, vocabulary.tokens)
        self.sampling = SamplingDefaults()
        self.info = SourceInfo(format="gguf", name=self.name, fingerprint=self._fingerprint())

    def tensors(self) -> Mapping[str, TensorInfo]:
        infos = {}
        for name, stored_name in self._tensors.items():
            stored = self._file.tensors[stored_name]
            infos[name] = TensorInfo(tuple(int(n) for n in reversed(stored.shape)), stored.tensor_type.name)
        return infos

    def read(self, name: str, rows: slice | None = None) -> Weight:
        weight = weight_from_blocks(self._type_of(name), self._blocks(name, rows))
        factor = self._factors.get(self._tensors[name])
        if factor is not None and weight.scales is not None:
            with np.errstate(over="ignore"):
                weight = replace(weight, scales=(weight.scales * factor).astype(np.float16))
        for parts in (weight.scales, weight.minima):
            if parts is not None and not np.isfinite(parts).all():
                raise CorruptSource(
                    f"{self._file.path}: {name} ({self._type_of(name)}) has scales that are no numbers or larger than "
                    "float16 holds; fetch it again, or take a Q8_0 or F16 file of the same model"
                )
        return weight

    def read_float32(self, name: str, rows: slice | None = None) -> Float32:
        values: Float32 = dequantize(self._blocks(name, rows), GGMLQuantizationType[self._type_of(name)])
        factor = self._factors.get(self._tensors[name])
        return values if factor is None else values * factor

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _type_of(self, name: str) -> str:
        return str(self._file.tensors[self._tensors[name]].tensor_type.name)

    def _blocks(self, name: str, rows: slice | None) -> NDArray[np.uint8]:
        """Bytes of some rows in Hugging Face's order; a view of the file where that is its order too."""
        blocks = self._file.blocks(self._tensors[name])
        num_heads = self._num_permuted_heads(name)
        is_vector = len(self._file.tensors[self._tensors[name]].shape) == 1
        if is_vector:  # plain values, since `_check_types` refuses quantized vectors
            values = blocks.reshape(self.tensors()[name].shape[0], -1)
            values = values if num_heads is None else values[_unpermuted_rows(len(values), num_heads)]
            return values[rows or slice(None)].reshape(-1)
        if num_heads is None:
            return blocks[rows or slice(None)]
        return blocks[_unpermuted_rows(len(blocks), num_heads)[rows or slice(None)]]

    def _num_permuted_heads(self, name: str) -> int | None:
        if not MODELS[self.config.architecture].gguf_permutes_rotary:
            return None
        if ".q_proj." in name:
            return self.config.num_attention_heads
        return self.config.num_key_value_heads if ".k_proj." in name else None

    def _check_types(self) -> None:
        for name, info in self.tensors().items():
            is_vector = len(info.shape) == 1
            if info.type not in (PLAIN_TYPES if is_vector else BLOCK_TYPES):
                stored = f"is a vector stored as {info.type}" if is_vector else f"is stored as {info.type}"
                raise UnsupportedTensor(f"{self._file.path}: {self._tensors[name]} {stored}, {NOT_READ}")

    def _fingerprint(self) -> str:
        """Over the header, the file's size and the beginning of each tensor."""
        digest = hashlib.sha256(self._file.data[: self._file.header_bytes].data)
        digest.update(len(self._file.data).to_bytes(8, "little"))
        for tensor in self._file.tensors.values():
            start = self._file.data[tensor.data_offset :][: min(tensor.n_bytes, _SAMPLE_BYTES)]
            digest.update(start.data)
        return digest.hexdigest()


def _config(file: GGUFFile) -> ModelConfig:
    metadata, label = file.metadata, str(file.path)
    architecture = metadata.get("general.architecture")
    if architecture not in MODELS or metadata.get(f"{architecture}.expert_count"):
        kind = f"{architecture} with experts" if architecture in MODELS else architecture
        raise UnsupportedArchitecture(f"{label}: architecture {kind!r} is not supported; {SUPPORTED}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            return value[0]  # per layer, the same everywhere
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptSource(f"{label}: token_embd.weight is missing; the file is incomplete, fetch it again")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    try:
        head_dim = get("attention.key_length") or hidden_size // num_heads
    except (TypeError, ZeroDivisionError):
        raise CorruptSource(f"{label}: {hidden_size} values cannot be shared by {num_heads} heads") from None
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedArchitecture(f"{label}: heads whose parts differ in size are not supported; {SUPPORTED}")
    return checked(
        label,
        {
            "architecture": architecture,
            "vocab_size": int(embedding.shape[1]),
            "hidden_size": hidden_size,
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": get("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_scaling": _rope_scaling(file, get, head_dim),
            "max_position_embeddings": get("context_length"),
            "sliding_window": get("attention.sliding_window") or None,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        },
        ModelConfig,
    )


def _rope_scaling(file: GGUFFile, get: Any, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FREQS in file.tensors:
        tensor = file.tensors[_ROPE_FREQS]
        if tensor.tensor_type.name != "F32" or list(tensor.shape) != [head_dim // 2]:
            raise CorruptSource(f"{file.path}: {_ROPE_FREQS} is not {head_dim // 2} numbers in F32")
        return {"type": "factors", "factors": file.blocks(_ROPE_FREQS).view("<f4").tolist()}
    kind = get("rope.scaling.type", "linear" if get("rope.scale_linear") else "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise UnsupportedArchitecture(f"{file.path}: RoPE scaling {kind!r} is not supported, only linear and llama3")
    factor = float(get("rope.scaling.factor") or get("rope.scale_linear") or 1.0)
    return None if factor == 1.0 else {"type": "linear", "factor": factor}


def _whole_tensor_scales(file: GGUFFile) -> tuple[dict[str, np.float32], set[str]]:
    """What multiplies all of an NVFP4 matrix, by its name, and the names of the tensors that say so.

    `blk.0.attn_q.scale` belongs to `blk.0.attn_q.weight`. `input_scale` is for kernels that round activations to 4
    bits, which these do not.
    """
    factors, names = {}, set[str]()
    for name, tensor in file.tensors.items():
        if tensor.tensor_type.name != "NVFP4":
            continue
        stem = name.removesuffix("weight")
        names |= {stem + "scale", stem + "input_scale"}
        scale = file.tensors.get(stem + "scale")
        if scale is None:
            continue
        if scale.tensor_type.name != "F32" or scale.n_elements != 1:
            raise CorruptSource(f"{file.path}: {stem}scale is not one number in F32")
        factors[name] = np.float32(file.blocks(scale.name).view("<f4")[0])
    return factors, names


def _unpermuted_rows(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Where in the file each row of Q or K is.

    Hugging Face rotates the first half of a head against the second, ggml neighbours, and so llama.cpp's
    converter stores row `half * i + j` of a head at `2 * j + i`.
    """
    half = num_rows // num_heads // 2
    return np.arange(num_rows).reshape(num_heads, half, 2).swapaxes(1, 2).reshape(-1)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    if name in _NAMES:
        return _NAMES[name]
    match name.split("."):
        case ["blk", index, part, suffix] if part in layer_names:
            return f"model.layers.{index}.{layer_names[part]}.{suffix}"
    return name


def _eos_token_ids(metadata: Mapping[str, Any], tokens: list[str] | Any) -> tuple[int, ...]:
    """The declared ends of text, turn and message, and the well-known ones in the vocabulary."""
    declared = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    known = {text: index for index, text in enumerate(tokens) if text in END_OF_REPLY}
    ids = [*declared, *(known.get(text) for text in END_OF_REPLY)]
    return tuple(dict.fromkeys(index for index in ids if isinstance(index, int) and 0 <= index < len(tokens)))


def _refuse_parts(path: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("split.count", 1) not in (0, 1):
        raise SourceError(
            f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge first"
        )


_ROPE_FREQS = "rope_freqs.weight"
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
