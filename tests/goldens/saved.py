"""Tiny families as `save_pretrained` of transformers writes them, also inside the classes that see and hear.

`saved.json` has what transformers wrote, but the numbers: those are the tiny family's. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .tiny_models import TINY_MODELS, TinyModel

FILE = Path(__file__).resolve().parent / "saved.json"


@dataclass(frozen=True)
class SavedFamily:
    """One tiny family as one class of transformers saves it.

    Attributes:
        family: the tiny family's name.
        config: all of config.json.
        prefixes: what names of the language model begin with in this class, by what they begin with in the family.
        others: shapes of the tensors that are no part of the language model, by name.
    """

    family: str
    config: Mapping[str, Any]
    prefixes: Mapping[str, str]
    others: Mapping[str, list[int]]

    def write(self, directory: Path) -> Path:
        """Write the checkpoint into `directory`, made if missing; what sees and hears has zeros."""
        tiny = tiny_of(self.family)
        tiny.write(directory)
        arrays = {renamed(name, self.prefixes): array for name, array in tiny.stored(tiny.tensors).items()}
        arrays |= {name: np.zeros(shape, np.float16) for name, shape in self.others.items()}
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return directory


def tiny_of(name: str) -> TinyModel:
    """A tiny family, or one of the oldest."""
    from .families import FAMILIES

    return FAMILIES.get(name) or TINY_MODELS[name]


def renamed(name: str, prefixes: Mapping[str, str]) -> str:
    """`name` with the first of `prefixes` that it begins with replaced."""
    for before, after in prefixes.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


@cache
def saved_families() -> Mapping[str, SavedFamily]:
    """All of them, by FAMILY or FAMILY-in-CLASS."""
    return {name: SavedFamily(**entry) for name, entry in json.loads(FILE.read_text("utf-8")).items()}
