"""Write a tiny encoder as the GGUF file that llama.cpp's converter makes of it, in float32.

    gguf_encoders.write(ENCODERS["bert"], path)

Names of tensors are gguf's own. Needs NumPy and gguf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, TokenType

from .encoders import NUM_SPECIAL, TinyEncoder
from .rerankers import TinyReranker

ARCHITECTURES = {"bert": MODEL_ARCH.BERT, "xlm_roberta": MODEL_ARCH.BERT, "nomic_bert": MODEL_ARCH.NOMIC_BERT}
_POOLINGS = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS}


def write(tiny: TinyEncoder, path: Path, *, with_pooler: bool = False, labels: Sequence[str] = ("LABEL_0",)) -> Path:
    """Write `tiny` to `path`, and return it.

    Args:
        with_pooler: do not leave out BERT's pooler, as the converter does.
        labels: of a reranker.
    """
    arch = ARCHITECTURES[tiny.name]
    config = {tiny.keys.get(key, key): value for key, value in tiny.config.items()}
    first = config["pad_token_id"] + 1 if tiny.name == "xlm_roberta" else 0
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(config["max_position_embeddings"] - first)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    is_reranker = isinstance(tiny, TinyReranker)
    writer.add_pooling_type(gguf.PoolingType.RANK if is_reranker else _POOLINGS[tiny.pooling])
    if is_reranker:
        writer.add_classifier_output_labels(labels)
    if "rope_theta" in config:
        writer.add_rope_freq_base(config["rope_theta"])
    writer.add_token_type_count(config["type_vocab_size"])
    _add_tokenizer(writer, tiny.tokens())
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in tiny.tensors.items():
        bare = name.removeprefix(tiny.prefix)
        if bare.startswith("pooler.") and not with_pooler:
            continue
        bare = bare.replace("pooler.dense", "classifier.dense")
        if bare in ("classifier.weight", "classifier.bias"):
            bare = bare.replace("classifier", "classifier.out_proj")
        stored = names.get_name(bare, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if "position_embeddings" in name:
            tensor = tensor[first:]
        writer.add_tensor(stored, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, document: Mapping[str, Any]) -> None:
    """Write WordPiece with `▁` before words and no `##`, or Unigram with its scores."""
    model = document["model"]
    types = [TokenType.CONTROL] * NUM_SPECIAL
    if model["type"] == "WordPiece":
        writer.add_tokenizer_model("bert")
        tokens = [_phantom(token) for token in model["vocab"]]
        writer.add_unk_token_id(1)
        writer.add_sep_token_id(3)
        writer.add_bos_token_id(2)
    else:
        writer.add_tokenizer_model("t5")
        tokens = [token for token, _ in model["vocab"]]
        writer.add_token_scores([score for _, score in model["vocab"]])
        types[3] = TokenType.UNKNOWN
        for add, index in ((writer.add_bos_token_id, 0), (writer.add_eos_token_id, 2), (writer.add_unk_token_id, 3)):
            add(index)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(True)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
    writer.add_token_list(tokens)
    writer.add_token_types([*types, *[TokenType.NORMAL] * (len(tokens) - NUM_SPECIAL)])


def _phantom(token: str) -> str:
    """As the function of that name in llama.cpp's converter."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix("##") if token.startswith("##") else f"▁{token}"
