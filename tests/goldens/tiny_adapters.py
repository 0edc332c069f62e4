"""Tiny random LoRA adapters for tiny models: PEFT's folders, and GGUF files as llama.cpp's converter writes them.

Needs NumPy, safetensors and, for GGUF, the package `gguf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .families import FAMILIES
from .tiny_models import TINY_MODELS, Draw, TinyModel

LAYER_MATRIX = r".*layers\.\d+\..*_proj\.weight"


@dataclass(frozen=True)
class TinyAdapter:
    """An adapter of one tiny model.

    Attributes:
        targets: a pattern of the names of the matrices that it changes.
        alpha: `lora_alpha`; the change of a matrix is `alpha / rank * B A`.
        ranks: ranks that differ, by the end of a matrix's name: PEFT's `rank_pattern`.
    """

    model: str
    seed: int = 1
    targets: str = LAYER_MATRIX
    rank: int = 5
    alpha: float = 7.0
    size: float = 0.06
    ranks: tuple[tuple[str, int], ...] = ()
    rslora: bool = False

    @property
    def tiny(self) -> TinyModel:
        """The model."""
        return FAMILIES.get(self.model) or TINY_MODELS[self.model]

    @cached_property
    def matrices(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """A `[rank, inputs]` and B `[outputs, rank]` of each matrix, float32."""
        draw, found = Draw(self.seed), {}
        for name, weight in self.tiny.tensors.items():
            if re.fullmatch(self.targets, name):
                rank = self.rank_of(name)
                found[name] = draw((rank, weight.shape[1]), 0.0, self.size), draw((len(weight), rank), 0.0, self.size)
        return found

    def rank_of(self, name: str) -> int:
        """The rank of a matrix."""
        return next((rank for end, rank in self.ranks if f".{name}".endswith(f".{end}.weight")), self.rank)

    def scale_of(self, name: str) -> float:
        """The factor of a matrix's change."""
        rank = self.rank_of(name)
        return self.alpha / (rank**0.5 if self.rslora else rank)

    def changes(self) -> Mapping[str, np.ndarray]:
        """`scale * B A` of each matrix, float32."""
        return {name: np.float32(self.scale_of(name)) * (b @ a) for name, (a, b) in self.matrices.items()}

    def merged(self) -> dict[str, np.ndarray]:
        """The model's weights with the adapter added to them."""
        changes = self.changes()
        return {name: weight + changes.get(name, np.float32(0)) for name, weight in self.tiny.tensors.items()}

    def write_peft(self, folder: Path, config: Mapping[str, Any] | None = None) -> Path:
        """Write PEFT's folder, with changes of its `adapter_config.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, (a, b) in self.matrices.items():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        save_file(tensors, folder / "adapter_model.safetensors")
        content = {
            "peft_type": "LORA",
            "base_model_name_or_path": f"tiny/{self.model}",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "use_rslora": self.rslora,
            "rank_pattern": dict(self.ranks),
            "alpha_pattern": {},
            "bias": "none",
            "modules_to_save": None,
            **(config or {}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
        return folder

    def write_gguf(self, path: Path) -> Path:
        """Write the file of llama.cpp's `convert_lora_to_gguf.py`; rows of B are in the order of the model's file."""
        import gguf

        from . import tiny_gguf

        how = tiny_gguf.converter(self.tiny)
        assert how is not None
        writer = gguf.GGUFWriter(path, how.architecture)
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", self.alpha)
        for end, part in (("lora_a", 0), ("lora_b", 1)):
            of_part = {name: both[part] for name, both in self.matrices.items()}
            # B has a row for each output, and is reordered as the weight is
            renamed = tiny_gguf.renamed(self.tiny, of_part, reorders=end == "lora_b")
            for name, values in renamed.items():
                writer.add_tensor(f"{name}.{end}", np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


ADAPTERS = {name: TinyAdapter(name) for name in ("llama", "qwen2", "gemma3", "phi3-short")} | {
    "llama3-ranks": TinyAdapter("llama3", 2, ranks=(("q_proj", 3), ("mlp.down_proj", 16)), rslora=True, alpha=3.0)
}
"""By the names of their goldens: all matrices, of Llama, Qwen2 (with biases), Gemma 3, and Phi-3 (joined matrices)."""
