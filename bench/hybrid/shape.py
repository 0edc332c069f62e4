"""Write a file of random weights in Qwen3.5-0.8B's shape, which llama.cpp reads, too.

Knows the names of a checkpoint's tensors. The goldens' witness knows what the file's converter changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.goldens.gguf_families import GGUF_FAMILIES

from ..replay.models import ReplayModel
from ..replay.weightless import add_tokenizer, add_value

_POOL = 1 << 22  # random numbers, repeated as needed


@dataclass(frozen=True)
class Qwen35Shape:
    """The shape: three layers of the gated delta rule before each attention layer."""

    name: str = "qwen3.5-0.8b"
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    num_state_heads: int = 16
    state_dim: int = 128
    vocab_size: int = 248_320
    is_qwen2: bool = False

    def config(self) -> dict[str, object]:
        """Return the content of config.json."""
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(self.num_hidden_layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": kinds,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": self.state_dim,
            "linear_value_head_dim": self.state_dim,
            "linear_num_key_heads": self.num_state_heads,
            "linear_num_value_heads": self.num_state_heads,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            },
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of tensors, as in a checkpoint."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        values = self.num_state_heads * self.state_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}."
            if layer % 4 == 3:
                yield f"{at}self_attn.q_proj.weight", (2 * heads, hidden)
                yield f"{at}self_attn.k_proj.weight", (keys, hidden)
                yield f"{at}self_attn.v_proj.weight", (keys, hidden)
                yield f"{at}self_attn.o_proj.weight", (hidden, heads)
                yield f"{at}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{at}self_attn.k_norm.weight", (self.head_dim,)
            else:
                for name, rows in (("qkv", 3 * values), ("z", values), ("b", self.num_state_heads)):
                    yield f"{at}linear_attn.in_proj_{name}.weight", (rows, hidden)
                yield f"{at}linear_attn.in_proj_a.weight", (self.num_state_heads, hidden)
                yield f"{at}linear_attn.conv1d.weight", (3 * values, 1, 4)
                yield f"{at}linear_attn.dt_bias", (self.num_state_heads,)
                yield f"{at}linear_attn.A_log", (self.num_state_heads,)
                yield f"{at}linear_attn.norm.weight", (self.state_dim,)
                yield f"{at}linear_attn.out_proj.weight", (hidden, values)
            for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden))):
                yield f"{at}mlp.{name}.weight", shape
            yield f"{at}mlp.down_proj.weight", (hidden, inner)
            yield f"{at}input_layernorm.weight", (hidden,)
            yield f"{at}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)


def write_gguf(shape: Qwen35Shape, path: Path, tokenizer_json: str, model: ReplayModel) -> None:
    """Write random weights of deviation 0.02, matrices in Q4_0; the vocabulary is padded to the shape's."""
    config, how = shape.config(), GGUF_FAMILIES["qwen3_5_text"]
    writer = gguf.GGUFWriter(path, how.architecture)
    for key, value in how.metadata(config).items():
        add_value(writer, f"{how.architecture}.{key}", value)
    end_id = next(token["id"] for token in json.loads(tokenizer_json)["added_tokens"] if token["content"] == model.end)
    add_tokenizer(writer, tokenizer_json, end_id, model.template, shape.vocab_size)
    names = gguf.get_tensor_name_map(how.model_arch, shape.num_hidden_layers)
    pool = (0.02 * np.random.default_rng(0).standard_normal(_POOL)).astype(np.float32)
    for name, dimensions in shape.tensors():
        for changed, weight in how.change(config, name, _values(name, dimensions, pool)):
            stem, suffix = re.fullmatch(r"(.*?)(\.weight|\.bias)?", changed).groups(default="")  # type: ignore[union-attr]
            stem = stem.removeprefix("=") if stem.startswith("=") else names.get_name(stem) or stem
            is_matrix = weight.ndim == 2 and "conv1d" not in stem
            kind = gguf.GGMLQuantizationType.Q4_0 if is_matrix else gguf.GGMLQuantizationType.F32
            writer.add_tensor(stem + suffix, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _values(name: str, dimensions: tuple[int, ...], pool: np.ndarray) -> np.ndarray:
    """Return values as in the checkpoint, where most gains are stored without their one."""
    size = int(np.prod(dimensions))
    if name == "model.norm.weight":  # of both signs: otherwise the last token's own embedding is the likeliest
        return np.where(pool[:size] > 0, 0.0, -2.0).astype(np.float32)
    if name.endswith("norm.weight"):
        return np.full(dimensions, 1.0 if "linear_attn" in name else 0.0, np.float32)
    return np.resize(pool, size).reshape(dimensions)
