"""Which families and formats are read, and what each was verified against. Loads no compiler.

What tests compare is theirs to know: `tests/goldens/evidence.py` writes it into `verified.json`, and the pages in docs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .families.registry import FAMILIES

VERIFIED = Path(__file__).resolve().parent / "verified.json"


@dataclass(frozen=True)
class Golden:
    """A tiny checkpoint, whose logits transformers has computed in float32; tests compare them.

    Attributes:
        llama_cpp: how far llama.cpp is from them, given the same weights: the largest difference over the logits'
            standard deviation; None where it was not asked.
        needs: what no kernel computes yet; None where the checkpoint compiles.
        bits: which of make's targets compares each token's bits, computed alone, in chunks, beside others and over what
            another sequence has computed; None where another golden of the family is taken for that.
    """

    name: str
    llama_cpp: float | None
    needs: str | None
    bits: Literal["test", "test-long"] | None


@dataclass(frozen=True)
class FamilyEvidence:
    """A family: what people call it, classes of config.json, llama.cpp's names, and what it was compared with.

    `gguf_of_others` are names of files that another family reads. `real` is a real model whose distributions a test
    compares with those of transformers.
    """

    title: str
    classes: tuple[str, ...]
    gguf: tuple[str, ...]
    gguf_of_others: tuple[str, ...]
    goldens: tuple[Golden, ...]
    real: str | None = None

    @property
    def llama_cpp(self) -> float | None:
        """The largest distance of llama.cpp; None where it was not asked about any."""
        return max((golden.llama_cpp for golden in self.goldens if golden.llama_cpp is not None), default=None)

    @property
    def bits(self) -> Literal["test", "test-long"] | None:
        """The target that is run most often of those that compare the bits of one of its goldens."""
        targets = {golden.bits for golden in self.goldens}
        return next((target for target in ("test", "test-long") if target in targets), None)

    @property
    def is_compiled(self) -> bool:
        """Whether all of its goldens compile."""
        return bool(self.goldens) and all(golden.needs is None for golden in self.goldens)


@dataclass(frozen=True)
class FormatEvidence:
    """A format of files, what of it is read, and what that was compared with."""

    title: str
    reads: str
    verified: str


FORMATS = (
    FormatEvidence("GGUF", "every type of the table in docs/models.md, mixed", "the reference of the gguf package"),
    FormatEvidence("safetensors", "F32, F16, BF16, in one file or shards", "the goldens of transformers"),
    FormatEvidence("GPTQ", "2, 3, 4 and 8 bits, version 1 and 2, act-order", "the format's formula"),
    FormatEvidence("AWQ", "gemm", "the format's formula"),
    FormatEvidence(
        "compressed-tensors", "pack-, int- and float-quantized, MXFP4, MXFP8, NVFP4", "the format's formula"
    ),
    FormatEvidence("FP8", "a scale for each matrix, row or block; fbgemm", "the format's formula"),
    FormatEvidence("MXFP4", "gpt-oss's blocks", "a golden of transformers"),
    FormatEvidence("ModelOpt", "FP8, NVFP4", "the format's formula"),
    FormatEvidence("MLX", "groups with scales and biases, mlx-lm's names", "the format's formula, the goldens"),
    FormatEvidence("MLC", "q0 and q4 conversions, mlc-llm's names", "the format's formula, the goldens"),
)


def families() -> list[FamilyEvidence]:
    """All families of the registry, in its order."""
    verified = json.loads(VERIFIED.read_text(encoding="utf-8"))
    return [
        FamilyEvidence(
            family.title,
            tuple(family.huggingface),
            family.gguf,
            family.gguf_of_others,
            tuple(Golden(**golden) for golden in verified.get(key, {}).get("goldens", ())),
            verified.get(key, {}).get("real"),
        )
        for key, family in FAMILIES.items()
    ]
