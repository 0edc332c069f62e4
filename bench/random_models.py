"""Write models of well-known shapes with random weights as Hugging Face directories in bfloat16, in small pieces.

Knows safetensors' layout. Such a model's output is meaningless; its speed does not depend on that.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

_POOL = 1 << 22  # random numbers, repeated as often as needed
_ONE, _SIGN = np.uint16(0x3F80), np.uint16(0x8000)  # 1.0 as a bfloat16, and the bit of its sign


class AnyShape(Protocol):
    """A checkpoint's configuration and tensors; `is_qwen2` says that the last norm has both signs."""

    @property
    def is_qwen2(self) -> bool: ...
    def config(self) -> dict[str, object]: ...
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]: ...


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama or a Qwen2; `vocab_size` is the tokenizer's, not the original's."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool
    vocab_size: int = 49_152
    is_qwen2: bool = False  # biases on queries, keys and values; and a last norm of both signs

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all tensors."""
        return sum(int(np.prod(shape)) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM" if self.is_qwen2 else "LlamaForCausalLM"],
            "model_type": "qwen2" if self.is_qwen2 else "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "tie_word_embeddings": self.tie_word_embeddings,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, as in a checkpoint."""
        hidden, inner = self.hidden_size, self.intermediate_size
        keys = hidden // self.num_attention_heads * self.num_key_value_heads
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_hidden_layers):
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("self_attn.q_proj", (hidden, hidden)),
                ("self_attn.k_proj", (keys, hidden)),
                ("self_attn.v_proj", (keys, hidden)),
                ("self_attn.o_proj", (hidden, hidden)),
                ("post_attention_layernorm", (hidden,)),
                ("mlp.gate_proj", (inner, hidden)),
                ("mlp.up_proj", (inner, hidden)),
                ("mlp.down_proj", (hidden, inner)),
            ):
                yield f"model.layers.{layer}.{name}.weight", shape
            if self.is_qwen2:
                for name, size in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
                    yield f"model.layers.{layer}.self_attn.{name}.bias", (size,)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


@dataclass(frozen=True)
class HybridShape:
    """The sizes of an LFM2; `kinds` has a letter per layer, `c` for a short convolution, `a` for attention."""

    name: str
    hidden_size: int
    intermediate_size: int
    kinds: str
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    is_qwen2: bool = True  # a last norm of both signs

    def config(self) -> dict[str, object]:
        """Return the contents of config.json."""
        return {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 4096,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": len(self.kinds),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "layer_types": ["conv" if kind == "c" else "full_attention" for kind in self.kinds],
            "conv_L_cache": 3,
            "conv_bias": False,
            "tie_word_embeddings": True,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes, as in a checkpoint."""
        hidden, inner = self.hidden_size, self.intermediate_size
        head_dim = hidden // self.num_attention_heads
        keys = head_dim * self.num_key_value_heads
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer, kind in enumerate(self.kinds):
            mixer: tuple[tuple[str, tuple[int, ...]], ...] = (
                ("self_attn.q_proj", (hidden, hidden)),
                ("self_attn.k_proj", (keys, hidden)),
                ("self_attn.v_proj", (keys, hidden)),
                ("self_attn.out_proj", (hidden, hidden)),
                ("self_attn.q_layernorm", (head_dim,)),
                ("self_attn.k_layernorm", (head_dim,)),
            )
            if kind == "c":
                mixer = (
                    ("conv.in_proj", (3 * hidden, hidden)),
                    ("conv.conv", (hidden, 1, 3)),
                    ("conv.out_proj", (hidden, hidden)),
                )
            for name, shape in (
                ("operator_norm", (hidden,)),
                *mixer,
                ("ffn_norm", (hidden,)),
                ("feed_forward.w1", (inner, hidden)),
                ("feed_forward.w3", (inner, hidden)),
                ("feed_forward.w2", (hidden, inner)),
            ):
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.embedding_norm.weight", (hidden,)


def write_random_model(
    shape: AnyShape,
    directory: Path,
    tokenizer_json: str,
    *,
    chat_template: str | None = None,
    special_ids: tuple[int, int] = (1, 2),
) -> int:
    """Write the model into `directory`; return the bytes of its weights. `special_ids` begin and end a text."""
    directory.mkdir(parents=True)
    config = {**shape.config(), "bos_token_id": special_ids[0], "eos_token_id": special_ids[1]}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with (directory / "model.safetensors").open("wb") as file:
        return _write_tensors(shape, file)


def _write_tensors(shape: AnyShape, file: BinaryIO) -> int:
    """Write a safetensors file of random bfloat16, with norms of one; return the bytes of its tensors."""
    header: dict[str, object] = {}
    end = 0
    for name, dimensions in shape.tensors():
        size = 2 * int(np.prod(dimensions))
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    pool = _random_bfloat16(np.random.default_rng(0), _POOL)
    for name, dimensions in shape.tensors():
        if name.endswith("norm.weight"):
            ones = np.full(dimensions, _ONE, np.uint16)
            if shape.is_qwen2 and name in ("model.norm.weight", "model.embedding_norm.weight"):
                ones |= pool[: dimensions[0]] & _SIGN  # else the last token's own embedding is the likeliest
            file.write(ones.tobytes())
            continue
        left = int(np.prod(dimensions))
        while left:
            count = min(left, _POOL)
            file.write(pool[:count].data)
            left -= count
    return end


def _random_bfloat16(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return normal numbers of deviation 0.02, as their upper 16 bits."""
    values = (0.02 * rng.standard_normal(count)).astype(np.float32)
    return np.ascontiguousarray(values.view(np.uint16)[1::2])
