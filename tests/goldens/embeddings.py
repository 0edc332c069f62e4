"""Tiny embedding models as `save_pretrained` of transformers writes them, with what they give of texts; and scores.

`embeddings.npz` has configurations, names of tensors, pooled hidden states and scores; the numbers of tensors are the
tiny families'. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .saved import tiny_of
from .tiny_models import TinyModel

FILE = Path(__file__).resolve().parent / "embeddings.npz"
FAMILIES: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),
    "gemma3-both": ("gemma3", {"use_bidirectional_attention": True}),
}
"""Tiny families, and what of their configurations is another: the last is as EmbeddingGemma."""
LENGTHS = (1, 7, 70, 300)
POOLINGS = ("last", "mean", "cls")
RERANKER = "qwen3"
YES, NO, END = 67, 84, 2  # tokens of the tiny vocabulary: two letters, and what ends a turn
QUERY = "what is a tree"
DOCUMENTS = ("a plant with a trunk", "the river flows to the sea", "yes")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class TinyEmbedding:
    """A tiny family without an output matrix, and its hidden states after the last norm.

    Attributes:
        config: of config.json, as transformers wrote it.
        names: of the tensors in its checkpoint, by the family's own.
        pooled: of each prompt of `prompts_of`, the last hidden state, their mean and the first, by `POOLINGS`.
    """

    tiny: TinyModel
    config: dict[str, Any]
    names: dict[str, str]
    pooled: list[dict[str, np.ndarray]]

    def write(self, directory: Path, pooling: dict[str, object], *, normalize: bool = True) -> Path:
        """Write a checkpoint with sentence-transformers' files, whose pooling is as `pooling` says."""
        self.tiny.write(directory)
        arrays = {self.names[name]: array for name, array in self.tiny.tensors.items() if name in self.names}
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        folders = ["", "1_Pooling", "2_Normalize"]
        listed = [
            {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{name}"}
            for index, (name, folder) in enumerate(zip(modules, folders, strict=False))
        ]
        (directory / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
        (directory / "1_Pooling").mkdir(exist_ok=True)
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
        return directory


def prompts_of(tiny: TinyModel) -> list[list[int]]:
    """The texts of which hidden states are stored."""
    return [tiny._ids(length) for length in LENGTHS]


@cache
def tiny_embedding(name: str) -> TinyEmbedding:
    """One of `FAMILIES`."""
    with np.load(FILE) as arrays:
        about = json.loads(str(arrays[name]))
        pooled = [dict(zip(POOLINGS, arrays[f"{name}_{length}"], strict=True)) for length in LENGTHS]
    return TinyEmbedding(tiny_of(FAMILIES[name][0]), about["config"], about["names"], pooled)


@cache
def scores() -> Sequence[float]:
    """What Qwen3-Reranker's model card makes of `DOCUMENTS` with the tiny family `RERANKER`, and `YES` and `NO`."""
    with np.load(FILE) as arrays:
        return [float(score) for score in arrays["scores"]]
