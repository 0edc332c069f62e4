"""A tiny checkpoint of one family, and the changes that switch its features off one by one.

Needs NumPy and safetensors only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ..tiny_models import Part, TinyModel

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Off:
    """A feature, and how to do without it. Logits must then leave the golden by far more than the tolerance.

    `config` and `tensors` change the checkpoint, so that a compiler can be given it as it is. `modules` and
    `functions` change what transformers computes, where no checkpoint says it; a compiler's test changes its own
    description of the model instead.
    """

    feature: str
    config: Mapping[str, Any] = field(default_factory=dict)  # keys of config.json; None removes one
    tensors: Mapping[str, float] = field(default_factory=dict)  # a pattern of names: the value of all such weights
    modules: str = ""  # a pattern of names of transformers' modules, which pass on what they are given
    functions: Mapping[str, str] = field(
        default_factory=dict
    )  # a function of the modeling file: the file to take it of

    @property
    def in_checkpoint(self) -> bool:
        """Whether `TinyFamily.write(..., off)` switches the feature off by itself."""
        return not (self.modules or self.functions)


@dataclass(frozen=True)
class TinyFamily(TinyModel):
    """One checkpoint of one family. `parts` lists its tensors under the hub's names."""

    parts: Callable[[Config], Iterable[Part]] = field(kw_only=True)
    offs: tuple[Off, ...] = field(kw_only=True, default=())
    absent: str = field(kw_only=True, default="")  # pattern of transformers' names that the checkpoint leaves out
    prompt_lengths: tuple[int, ...] = (7, 33, 70, 300)

    def layout(self) -> Iterable[Part]:
        return self.parts(self.text)

    def write(self, directory: Path, off: Off | None = None) -> Path:
        """Write the checkpoint, without one feature if `off` is given; see TinyModel.write."""
        super().write(directory)
        if off is not None:
            tensors = {name: without(off, name, weight) for name, weight in self.tensors.items()}
            save_file(self.stored(tensors), directory / "model.safetensors", metadata={"format": "pt"})
            path = directory / "config.json"
            path.write_text(json.dumps(changed(json.loads(path.read_text("utf-8")), off.config)), encoding="utf-8")
        return directory


def changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`, which are of the language model; a key a.b is b inside a, None removes a key."""
    text = config.get("text_config", config)
    for key, value in changes.items():
        *outer, last = key.split("|")
        place = text
        for part in outer:
            place = place[part]
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return config


def without(off: Off, name: str, weight: np.ndarray) -> np.ndarray:
    """The weight as `off` leaves it."""
    for pattern, value in off.tensors.items():
        if re.search(pattern, name):
            return np.full_like(weight, value)
    return weight
