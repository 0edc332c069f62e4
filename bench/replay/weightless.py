"""Write models of zeros as GGUF files, so that llama.cpp's server can get the requests of a replayed model.

They have its tokenizer, its template and its kinds of layers, but few and small ones: which tokens are computed does
not depend on weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from radixlm.runtime.artifact.model_config import GatedDelta, ShortConvolution

from .models import CONTEXT_LENGTH, TalkingArtifact

_WIDTH = 32
Shapes = Mapping[str, tuple[int, ...]]


def _square(*names: str) -> Shapes:
    return {f"{name}.weight": (_WIDTH, _WIDTH) for name in names}


def _row(*names: str) -> Shapes:
    return {f"{name}.weight": (_WIDTH,) for name in names}


_FEED = {**_square("ffn_gate", "ffn_up", "ffn_down"), **_row("attn_norm", "ffn_norm")}
_ATTENTION = _square("attn_q", "attn_k", "attn_v", "attn_output")
_QK_NORMS = _row("attn_q_norm", "attn_k_norm")
_DELTA_FEED = {**_square("ffn_gate", "ffn_up", "ffn_down"), **_row("attn_norm", "post_attention_norm")}
_DELTA = {
    **_square("attn_gate", "ssm_out"),
    **_row("ssm_norm"),
    "attn_qkv.weight": (3 * _WIDTH, _WIDTH),
    "ssm_conv1d.weight": (3 * _WIDTH, 4),
    "ssm_alpha.weight": (1, _WIDTH),
    "ssm_beta.weight": (1, _WIDTH),
    "ssm_dt.bias": (1,),
    "ssm_a": (1,),
}


@dataclass(frozen=True)
class _Kind:
    """An architecture with the tensors of each layer; `sizes` are its metadata beyond the usual."""

    architecture: str
    layers: tuple[Shapes, ...]
    last_norm: str = "output_norm"
    sizes: Mapping[str, Any] = field(default_factory=dict)


_QWEN2 = _Kind("qwen2", ({**_FEED, **_ATTENTION, **{f"attn_{part}.bias": (_WIDTH,) for part in "qkv"}},))
_LFM2 = _Kind(
    "lfm2",
    (
        {**_FEED, **_square("shortconv.out_proj"), "shortconv.in_proj.weight": (3 * _WIDTH, _WIDTH)}
        | {"shortconv.conv.weight": (_WIDTH, 3)},
        {**_FEED, **_ATTENTION, **_QK_NORMS},
    ),
    "token_embd_norm",
    {"attention.head_count_kv": [0, 1], "shortconv.l_cache": 3, "rope.freq_base": 1e4},
)
_QWEN35 = _Kind(
    "qwen35",
    (
        *({**_DELTA_FEED, **_DELTA} for _ in range(3)),
        {**_DELTA_FEED, **_ATTENTION, **_QK_NORMS, "attn_q.weight": (2 * _WIDTH, _WIDTH)},
    ),
    sizes={
        "attention.head_count_kv": 1,
        "attention.key_length": _WIDTH,
        "attention.value_length": _WIDTH,
        "rope.freq_base": 1e4,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": _WIDTH,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 1,
        "ssm.inner_size": _WIDTH,
    },
)


def write_weightless(path: Path, artifact: TalkingArtifact) -> None:
    """Write a model of zeros with the kinds of layers of `artifact`, as a GGUF file."""
    kind, vocab_size = _kind(artifact), artifact.manifest.model.vocab_size
    writer = gguf.GGUFWriter(path, kind.architecture)
    writer.add_block_count(len(kind.layers))
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, value in kind.sizes.items():
        add_value(writer, f"{kind.architecture}.{name}", value)
    end_id = artifact.manifest.tokenizer.eos_token_ids[0]
    add_tokenizer(writer, artifact.tokenizer_json, end_id, artifact.chat_template, vocab_size)
    for number, shapes in enumerate(kind.layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{number}.{name}", np.full(shape, "norm" in name, np.float32))
    writer.add_tensor(f"{kind.last_norm}.weight", np.ones(_WIDTH, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, _WIDTH), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value; sizes are unsigned in such files."""
    type_ = gguf.GGUFValueType.get_type(value)
    is_size = type_ is gguf.GGUFValueType.INT32
    writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if is_size else type_)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer_json: str, end_id: int, template: str, vocab_size: int) -> None:
    """Add a byte-pair tokenizer, its template, and as many unused tokens as the vocabulary has room for."""
    spec = json.loads(tokenizer_json)
    tokens = {id: (text, gguf.TokenType.NORMAL) for text, id in spec["model"]["vocab"].items()}
    for added in spec["added_tokens"]:
        type_ = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]] = (added["content"], type_)
    unused = gguf.TokenType.UNUSED
    texts, types = zip(*(tokens.get(id, (f"[unused {id}]", unused)) for id in range(vocab_size)), strict=True)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]])
    writer.add_eos_token_id(end_id)
    writer.add_chat_template(template)


def _kind(artifact: TalkingArtifact) -> _Kind:
    mixers = [layer.mixer for layer in artifact.manifest.model.layers]
    if any(isinstance(mixer, ShortConvolution) for mixer in mixers):
        return _LFM2
    return _QWEN35 if any(isinstance(mixer, GatedDelta) for mixer in mixers) else _QWEN2
