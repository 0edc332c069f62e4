"""What transformers computed for the tiny models, as `make_tiny.py` stored it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

FOLDER = Path(__file__).resolve().parent / "tiny"


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt and the logits at some of its positions."""

    ids: list[int]
    rows: np.ndarray  # int32 [R], positions
    logits: np.ndarray  # float32 [R, vocab]


@dataclass(frozen=True)
class GoldenTurn:
    """What the user adds to the conversation, and what greedy decoding answers."""

    user: list[int]
    reply: list[int]


@dataclass(frozen=True)
class TinyOutputs:
    """The golden of one tiny model."""

    digest: str  # of its weights, as TinyModel.digest
    prompts: list[GoldenPrompt]
    turns: list[GoldenTurn]

    @classmethod
    def load(cls, name: str) -> Self:
        with np.load(FOLDER / f"{name}.npz") as arrays:
            count = sum(key.startswith("prompt_") for key in arrays)
            return cls(
                digest=str(arrays["digest"]),
                prompts=[
                    GoldenPrompt(arrays[f"prompt_{i}"].tolist(), arrays[f"rows_{i}"], arrays[f"logits_{i}"])
                    for i in range(count)
                ],
                turns=[GoldenTurn(arrays[f"turn_{i}"].tolist(), arrays[f"reply_{i}"].tolist()) for i in range(3)],
            )
