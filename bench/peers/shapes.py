"""Write GGUF files of the shapes of popular models, with random weights, for sizes that no package ships.

    python -m bench.peers.shapes qwen3-4b FILE.gguf [--layers 2]

Sizes and types are those of the published files: Q4_K_M as llama.cpp's tool mixes it, gpt-oss in MXFP4 and Q8_0,
embedding models and rerankers in Q8_0. Weights have the deviation of trained ones, so that no sum overflows; the
replies of such a model are meaningless. The tokenizer is Qwen2's, which is in the repository, with unused tokens up to
the vocabulary's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from ..agents.models import MODELS, tokenizer_json_of
from ..options import read_options
from ..replay.weightless import add_tokenizer
from .random_blocks import random_blocks

_TALKER = MODELS["Qwen3, which thinks"]
_END_ID = 151_645  # `<|im_end|>`
_EMBEDDING_DEVIATION = 0.03
_LAST, _RANK = 3, 4  # llama.cpp's poolings: the last token's hidden state, and scores of documents
_RERANK = (  # as llama.cpp's converter writes Qwen3-Reranker's
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: {query}\n"
    "<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True)
class Tensor:
    """A tensor as in the file: rows are the dimension before the last. `share` of its bytes is read for one token."""

    name: str
    dimensions: tuple[int, ...]
    type: Type = Type.F32
    deviation: float = 0.0  # 0: all ones
    share: float = 1.0

    @property
    def num_bytes(self) -> int:
        """The bytes in the file."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.dimensions) // block * size


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of Qwen3's family, or of gpt-oss, which has biases, attention sinks and a window.

    `pooling` is that of an embedding model or a reranker, by llama.cpp's number.
    """

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the dense layer, or of one expert
    vocab_size: int = 151_936
    num_experts: int = 0
    num_active: int = 0
    is_tied: bool = False
    pooling: int = 0

    @property
    def is_gpt_oss(self) -> bool:
        """True for gpt-oss, False for a Qwen3."""
        return self.architecture == "gpt-oss"

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors())

    @property
    def bytes_per_token(self) -> float:
        """The bytes of weights that decode reads for a token."""
        return sum(tensor.num_bytes * tensor.share for tensor in self.tensors())

    def with_layers(self, num_layers: int) -> Shape:
        """Return the same shape with `num_layers` layers."""
        return replace(self, num_layers=num_layers)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors, in the file's order."""
        outer = Type.Q8_0 if self.is_gpt_oss or self.pooling else Type.Q6_K
        table = (self.vocab_size, self.hidden_size)
        yield Tensor("token_embd.weight", table, outer, _EMBEDDING_DEVIATION, float(self.is_tied))
        yield Tensor("output_norm.weight", (self.hidden_size,))
        if not self.is_tied:
            yield _matrix("output", *table, type=outer)
        if self.pooling == _RANK:
            yield _matrix("cls.output", 2, self.hidden_size, type=Type.F32)
        for layer in range(self.num_layers):
            for tensor in self._layer_tensors(self._wider_type(layer)):
                yield replace(tensor, name=f"blk.{layer}.{tensor.name}")

    def _wider_type(self, layer: int) -> Type:
        """Return the type of values and last matrices: wider in the first and last eighth, and each third between."""
        if self.is_gpt_oss or self.pooling:
            return Type.Q8_0
        eighth = self.num_layers // 8
        is_wide = not eighth <= layer < 7 * self.num_layers // 8 or (layer - eighth) % 3 == 2
        return Type.Q6_K if is_wide else Type.Q4_K

    def _layer_tensors(self, wider: Type) -> Iterator[Tensor]:
        """Yield the tensors of one layer, named without its index.

        Args:
            wider: type of the value matrix and of the last feed-forward matrix, wider in some layers.
        """
        hidden, heads, keys = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        type = Type.Q8_0 if self.is_gpt_oss or self.pooling else Type.Q4_K
        yield Tensor("attn_norm.weight", (hidden,))
        yield Tensor("post_attention_norm.weight" if self.is_gpt_oss else "ffn_norm.weight", (hidden,))
        yield _matrix("attn_q", heads, hidden, type=type)
        yield _matrix("attn_k", keys, hidden, type=type)
        yield _matrix("attn_v", keys, hidden, type=wider)
        yield _matrix("attn_output", hidden, heads, type=type)
        if self.is_gpt_oss:
            for name, size in (("attn_q", heads), ("attn_k", keys), ("attn_v", keys), ("attn_output", hidden)):
                yield Tensor(f"{name}.bias", (size,), deviation=0.02)
            yield Tensor("attn_sinks.weight", (self.num_heads,), deviation=1.0)
        else:
            yield Tensor("attn_q_norm.weight", (self.head_dim,))
            yield Tensor("attn_k_norm.weight", (self.head_dim,))
        yield from self._expert_tensors(wider) if self.num_experts else self._dense_tensors(wider)

    def _dense_tensors(self, wider: Type) -> Iterator[Tensor]:
        """Yield the matrices of a dense feed-forward layer."""
        type = Type.Q8_0 if self.pooling else Type.Q4_K
        yield _matrix("ffn_gate", self.intermediate_size, self.hidden_size, type=type)
        yield _matrix("ffn_up", self.intermediate_size, self.hidden_size, type=type)
        yield _matrix("ffn_down", self.hidden_size, self.intermediate_size, type=wider)

    def _expert_tensors(self, wider: Type) -> Iterator[Tensor]:
        """Yield the router and the stacks of expert matrices of a layer with experts."""
        experts, share = self.num_experts, self.num_active / self.num_experts
        type, last = (Type.MXFP4, Type.MXFP4) if self.is_gpt_oss else (Type.Q4_K, wider)
        inwards = (experts, self.intermediate_size, self.hidden_size)
        outwards = (experts, self.hidden_size, self.intermediate_size)
        yield _matrix("ffn_gate_inp", experts, self.hidden_size, type=Type.F32)
        yield _matrix("ffn_gate_exps", *inwards, type=type, share=share)
        yield _matrix("ffn_up_exps", *inwards, type=type, share=share)
        yield _matrix("ffn_down_exps", *outwards, type=last, share=share)
        if self.is_gpt_oss:
            yield Tensor("ffn_gate_inp.bias", (experts,), deviation=0.02)
            yield Tensor("ffn_gate_exps.bias", inwards[:2], deviation=0.02)
            yield Tensor("ffn_up_exps.bias", inwards[:2], deviation=0.02)
            yield Tensor("ffn_down_exps.bias", outwards[:2], deviation=0.02)

    def metadata(self) -> Iterator[tuple[str, int | float | str]]:
        """Yield the keys of the architecture, as llama.cpp reads them."""
        yield "context_length", 131_072 if self.is_gpt_oss else 40_960
        yield "embedding_length", self.hidden_size
        yield "block_count", self.num_layers
        yield "feed_forward_length", self.intermediate_size if self.is_gpt_oss or not self.num_experts else 6144
        yield "attention.head_count", self.num_heads
        yield "attention.head_count_kv", self.num_kv_heads
        yield "attention.key_length", self.head_dim
        yield "attention.value_length", self.head_dim
        yield "attention.layer_norm_rms_epsilon", 1e-5 if self.is_gpt_oss else 1e-6
        yield "rope.freq_base", 150_000.0 if self.is_gpt_oss else 1e6
        yield "vocab_size", self.vocab_size
        if self.pooling:
            yield "pooling_type", self.pooling
        if self.num_experts:
            yield "expert_count", self.num_experts
            yield "expert_used_count", self.num_active
            yield "expert_feed_forward_length", self.intermediate_size
        if self.is_gpt_oss:
            yield "attention.sliding_window", 128
            yield "rope.scaling.type", "yarn"
            yield "rope.scaling.factor", 32.0
            yield "rope.scaling.original_context_length", 4096


def _matrix(name: str, *dimensions: int, type: Type, share: float = 1.0) -> Tensor:
    return Tensor(f"{name}.weight", dimensions, type, dimensions[-1] ** -0.5, share)


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("qwen3-embedding-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, is_tied=True, pooling=_LAST),
        Shape("qwen3-reranker-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, is_tied=True, pooling=_RANK),
        Shape("qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 128, 6144, is_tied=True),
        Shape("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, is_tied=True),
        Shape("qwen3-8b", "qwen3", 36, 4096, 32, 8, 128, 12_288),
        Shape("qwen3-30b-a3b", "qwen3moe", 48, 2048, 32, 4, 128, 768, num_experts=128, num_active=8),
        Shape("gpt-oss-20b", "gpt-oss", 24, 2880, 64, 8, 64, 2880, 201_088, num_experts=32, num_active=4),
    )
}


_KINDS = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}


def write_shape(shape: Shape, path: Path) -> None:
    """Write the file; the same for the same shape."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(shape.name)
    kind = gguf.LlamaFileType.MOSTLY_MXFP4_MOE if shape.is_gpt_oss else gguf.LlamaFileType.MOSTLY_Q4_K_M
    writer.add_file_type(kind)
    for key, value in shape.metadata():
        writer.add_key_value(f"{shape.architecture}.{key}", value, _KINDS[type(value)])
    if shape.pooling == _RANK:
        writer.add_array(f"{shape.architecture}.classifier.output_labels", ["yes", "no"])
        writer.add_string("tokenizer.chat_template.rerank", _RERANK)
    add_tokenizer(writer, tokenizer_json_of(_TALKER), _END_ID, _TALKER.template, shape.vocab_size)
    tensors = list(shape.tensors())
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, _stored_shape(tensor), _dtype(tensor), tensor.num_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for tensor in tensors:
        data = random_blocks(tensor.type, tensor.num_bytes, tensor.deviation, random)
        writer.write_tensor_data(data.view(_dtype(tensor)).reshape(_stored_shape(tensor)))
    writer.close()


def _stored_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions in the file, the last one in bytes if its type has blocks."""
    if tensor.type is Type.F32:
        return tensor.dimensions
    block, size = gguf.GGML_QUANT_SIZES[tensor.type]
    return (*tensor.dimensions[:-1], tensor.dimensions[-1] // block * size)


def _dtype(tensor: Tensor) -> np.dtype[np.generic]:
    return np.dtype(np.float32 if tensor.type is Type.F32 else np.uint8)


def main() -> None:
    """Write a GGUF file of a named shape, with random weights."""
    options = read_options(__doc__, "shape", "file", layers=int)
    shape = SHAPES[str(options.shape)]
    write_shape(shape if options.layers is None else shape.with_layers(options.layers), options.file)


if __name__ == "__main__":
    main()
