"""What transformers computed for the tiny models, as `make_tiny.py` and `make_families.py` stored it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

FOLDER = Path(__file__).resolve().parent / "tiny"


@dataclass(frozen=True)
class GoldenPrompt:
    """A prompt and the logits at some of its positions, of some tokens."""

    ids: list[int]
    rows: np.ndarray  # int32 [R], positions
    logits: np.ndarray  # float32 [R, C]
    columns: np.ndarray | None = None  # int16 [C], the tokens; None is all of them

    def of_columns(self, logits: np.ndarray) -> np.ndarray:
        """Those of `logits` `[., vocab]` that the golden keeps."""
        return logits if self.columns is None else logits[:, self.columns]

    def distance(self, logits: np.ndarray, rows: np.ndarray | slice = slice(None)) -> float:
        """The largest difference over the golden's standard deviation.

        `logits` `[len(self.rows[rows]), vocab]` are those of positions `self.rows[rows]`.
        """
        return float(np.abs(self.of_columns(logits) - self.logits[rows]).max() / self.logits.std())


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
    llama_cpp: float | None = None  # distance of llama.cpp's logits, where it knows the family

    @classmethod
    def load(cls, name: str) -> Self:
        """The golden of one of TINY_MODELS or FAMILIES."""
        with np.load(FOLDER / f"{name}.npz") as arrays:
            prompts, turns = (sum(key.startswith(f"{kind}_") for key in arrays) for kind in ("prompt", "turn"))
            columns = arrays.get("columns")
            return cls(
                digest=str(arrays["digest"]),
                prompts=[
                    GoldenPrompt(arrays[f"prompt_{i}"].tolist(), arrays[f"rows_{i}"], arrays[f"logits_{i}"], columns)
                    for i in range(prompts)
                ],
                turns=[GoldenTurn(arrays[f"turn_{i}"].tolist(), arrays[f"reply_{i}"].tolist()) for i in range(turns)],
                llama_cpp=float(arrays["llama_cpp"]) if np.isfinite(arrays.get("llama_cpp", np.nan)) else None,
            )
