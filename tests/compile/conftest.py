"""Tiny models written as the formats' own tools write them, so that sources can be read back."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from radixlm.compile.families.registry import FAMILIES, weight_shapes
from radixlm.compile.families.settings import Settings
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import KVDType
from radixlm.runtime.artifact.model_config import ModelConfig

from ..conftest import CompileOnce

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(ord("a"), ord("z") + 1)), "th", "he"]


@dataclass
class TinyModel:
    """A random model: its settings under Hugging Face's keys, and its weights under Hugging Face's names, float32."""

    values: Mapping[str, Any]
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        for name, shape in weight_shapes(self.config).items():
            self.weights[name] = rng.standard_normal(shape, np.float32)

    @functools.cached_property
    def config(self) -> ModelConfig:
        """The configuration that any source of the model must give."""
        architecture, stored = self.values["architecture"], {"blk.0.attn_q.bias"} & set(self.values["stored"])
        settings = Settings("tiny", "gguf", architecture, architecture, self.values, frozenset(stored))
        return FAMILIES[architecture].config(settings)


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., TinyModel]:
    """Make a tiny model; keyword arguments replace parts of its configuration."""

    def make(**changes: Any) -> TinyModel:
        values: dict[str, Any] = {
            "architecture": "llama",
            "vocab_size": len(TOKENS),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 2.0**-17,
            "rope_theta": 5000.0,
            "max_position_embeddings": 128,
        }
        bias = changes.pop("attention_bias", False)
        return TinyModel(values | changes | {"stored": ("blk.0.attn_q.bias",) if bias else ()})

    return make


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a TinyModel as llama.cpp's converter does; `edit(writer)` adds metadata and tensors.

    `types` names matrices whose type is not `matrix_type`, such as {"v_proj": Type.Q8_0}.
    """

    def write(
        tiny: TinyModel,
        matrix_type: Type = Type.F32,
        edit: Callable[[gguf.GGUFWriter], None] | None = None,
        types: Mapping[str, Type] = MappingProxyType({}),
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = gguf.GGUFWriter(path, tiny.config.architecture)
        add_metadata(writer, tiny.config)
        if edit is not None:
            edit(writer)
        for name, weight in tiny.weights.items():
            stored = permuted(tiny.config, name, weight)
            type_ = types.get(name.split(".")[-2], matrix_type) if weight.ndim == 2 else Type.F32
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, type_), raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_metadata(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def permuted(config: ModelConfig, name: str, weight: np.ndarray) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, which Qwen2's converter does not call."""
    if config.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return weight
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8).get_name(stem)}.{suffix}"


@pytest.fixture
def write_huggingface(tmp_path: Path) -> Callable[..., Path]:
    """Write a TinyModel as transformers does; `changes` go into config.json, None removes a key."""

    def write(*args: Any, **changes: Any) -> Path:
        return write_checkpoint(tmp_path / "tiny-hf", *args, **changes)

    return write


def write_checkpoint(path: Path, tiny: TinyModel, dtype: Any = np.float32, num_shards: int = 1, **changes: Any) -> Path:
    """Write a TinyModel into a folder as transformers does."""
    path.mkdir(exist_ok=True)
    config = huggingface_config(tiny) | changes
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    names = list(tiny.weights)
    shards = [names[index::num_shards] for index in range(num_shards)]
    files = (
        ["model.safetensors"]
        if num_shards == 1
        else [f"model-{index + 1:05}-of-{num_shards:05}.safetensors" for index in range(num_shards)]
    )
    for file, shard in zip(files, shards, strict=True):
        whole = {name: tiny.weights[name].astype(dtype) for name in shard}
        write_safetensors(path / file, dict(part for name, array in whole.items() for part in stored(name, array)))
    if num_shards > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def stored(name: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """A tensor under the hub's names: a stack of experts is stored one by one."""
    before, found, after = name.partition(".experts.")
    if not found:
        return [(name, array)]
    return [(f"{before}.experts.{index}.{after}", part) for index, part in enumerate(array)]


def huggingface_config(tiny: TinyModel) -> dict[str, Any]:
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    architecture = tiny.values["architecture"]
    values = {key: value for key, value in tiny.values.items() if key not in ("architecture", "stored")}
    return values | {
        "architectures": [classes[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "eos_token_id": 2,
    }


def tokenizer_json() -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(TOKENS[:3])
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(TOKENS)},
            "merges": ["t h", "h e"],
        },
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    names = {
        np.dtype(np.float32): "F32",
        np.dtype(np.float16): "F16",
        np.dtype(ml_dtypes.bfloat16): "BF16",
        np.dtype(np.int8): "I8",
        np.dtype(np.uint8): "U8",
        np.dtype(np.int32): "I32",
        np.dtype(np.uint32): "U32",
        np.dtype(np.int64): "I64",
        np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
        np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(tensor.tobytes() for tensor in tensors.values())


@pytest.fixture(scope="session")
def tiny_in_floats(tiny_source: Path, compile_once: CompileOnce) -> Callable[[KVDType], Artifact]:
    """The random model of tests/conftest.py with its weights in float32, by how KV is stored."""
    return lambda kv_dtype: Artifact.open(compile_once(tiny_source, kv_dtype, quantize="f32"))
