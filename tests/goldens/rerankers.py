"""Tiny rerankers with a head (cross-encoders), and what transformers gives of pairs of a query and a document.

`rerankers.npz` has the tokens of pairs with their types, one number of each, and what `save_pretrained` writes.
Needs no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .encoders import TinyEncoder, bert_parts, byte_level, encoder_config, linear, modernbert_parts, unigram, wordpiece
from .families.family import Config, Off
from .families.parts import bias, gain, matrix
from .tiny_models import Part

FILE = Path(__file__).resolve().parent / "rerankers.npz"
QUERY = "is it a tree, or a house"
DOCUMENTS = (
    "the tree is not a house, and it rains",
    "",
    "a house",
    "A tree. " * 9 + "Rain and rain, and the tree is a tree",
    "it is the rain",
)


@dataclass(frozen=True)
class TinyReranker(TinyEncoder):
    """An encoder with a head of one output, which has no files of sentence-transformers."""

    file: Path = field(kw_only=True, default=FILE)

    def write(self, directory: Path, off: Off | None = None, *, saved: bool = False) -> Path:
        super().write(directory, off, saved=saved)
        (directory / "modules.json").unlink()
        shutil.rmtree(directory / "1_Pooling")
        return directory


@dataclass(frozen=True)
class Golden:
    """The tokens of each pair of `QUERY` and `DOCUMENTS`, with their types, and the number that the head makes."""

    pairs: list[tuple[list[int], list[int]]]
    numbers: np.ndarray


@cache
def golden(name: str) -> Golden:
    """What transformers gives of the pairs."""
    with np.load(FILE) as arrays:
        about: dict[str, Any] = json.loads(str(arrays[name]))
        return Golden([(ids, types) for ids, types in about["pairs"]], arrays[f"{name}_numbers"])


def _bert(c: Config) -> Iterator[Part]:
    yield from bert_parts("bert.")(c)
    yield from linear("classifier", 1, c["hidden_size"], 4.0)


def _xlm_roberta(c: Config) -> Iterator[Part]:
    yield from (part for part in bert_parts("roberta.")(c) if ".pooler." not in part[0])
    yield from linear("classifier.dense", c["hidden_size"], c["hidden_size"])
    yield from linear("classifier.out_proj", 1, c["hidden_size"], 4.0)


def _modernbert(c: Config) -> Iterator[Part]:
    hidden = c["hidden_size"]
    yield from modernbert_parts(c)
    yield matrix("head.dense", hidden, hidden)
    if c["classifier_bias"]:
        yield bias("head.dense", hidden, 0.3)
    yield gain("head.norm", hidden)
    yield from linear("classifier", 1, hidden, 4.0)


_ONE_LABEL: Mapping[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_MODERNBERT = encoder_config(
    *("ModernBertForSequenceClassification", "modernbert"),
    **_ONE_LABEL,
    num_hidden_layers=3,
    local_attention=32,
    global_attn_every_n_layers=3,
    global_rope_theta=160000.0,
    local_rope_theta=1000.0,
    hidden_activation="gelu",
    norm_eps=1e-5,
    norm_bias=False,
    attention_bias=False,
    mlp_bias=False,
    classifier_pooling="mean",
    classifier_bias=True,
    classifier_activation="gelu",
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    cls_token_id=2,
    sep_token_id=3,
)
_ALL = (
    TinyReranker(
        "bert",
        401,
        encoder_config(
            *("BertForSequenceClassification", "bert"),
            **_ONE_LABEL,
            type_vocab_size=2,
            layer_norm_eps=1e-12,
            hidden_act="gelu",
            pad_token_id=0,
        ),
        parts=_bert,
        offs=(
            Off("token_types", tensors={"token_type_embeddings": 0.0}),
            Off("pooler", tensors={r"pooler\.dense\.weight": 0.0}),
            Off("pooler_bias", tensors={r"pooler\.dense\.bias": 0.0}),
            Off("head", tensors={r"classifier\.weight": 0.0}),
            Off("head_bias", tensors={r"classifier\.bias": 0.0}),
        ),
        tokens=wordpiece,
        prefix="bert.",
    ),
    TinyReranker(
        "xlm_roberta",
        402,
        encoder_config(
            *("XLMRobertaForSequenceClassification", "xlm-roberta"),
            **_ONE_LABEL,
            max_position_embeddings=322,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            hidden_act="gelu",
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
        ),
        parts=_xlm_roberta,
        offs=(
            Off("dense", tensors={r"classifier\.dense\.weight": 0.0}),
            Off("dense_bias", tensors={r"classifier\.dense\.bias": 0.0}),
            Off("head", tensors={r"out_proj\.weight": 0.0}),
            Off("head_bias", tensors={r"out_proj\.bias": 0.0}),
        ),
        tokens=unigram,
        prefix="roberta.",
    ),
    TinyReranker(
        "modernbert",
        403,
        _MODERNBERT,
        parts=_modernbert,
        offs=(
            Off("pooling", config={"classifier_pooling": "cls"}),
            Off("function", config={"classifier_activation": "silu"}),
            Off("dense", tensors={r"head\.dense\.weight": 0.0}),
            Off("dense_bias", tensors={r"head\.dense\.bias": 0.0}),
            Off("head_norm", tensors={r"head\.norm": 1.0}),
            Off("head", tensors={r"classifier\.weight": 0.0}),
        ),
        tokens=byte_level,
        prefix="model.",
    ),
    TinyReranker(
        "modernbert-cls",
        404,
        {**_MODERNBERT, "classifier_pooling": "cls", "classifier_bias": False},
        parts=_modernbert,
        offs=(Off("pooling", config={"classifier_pooling": "mean"}),),
        tokens=byte_level,
        prefix="model.",
    ),
)
RERANKERS: Mapping[str, TinyReranker] = {tiny.name: tiny for tiny in _ALL}
