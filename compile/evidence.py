"""The supported families and formats, and their verification. Loads no compiler.

Tests decide what is compared: `tests/goldens/evidence.py` writes it into `verified.json`, and into the pages in docs.
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
    """A tiny checkpoint whose logits transformers computed in float32; tests compare them.

    Attributes:
        llama_cpp: distance of llama.cpp from them, given the same weights: the largest difference over the logits'
            standard deviation; None if it was not measured.
        needs: features that no kernel supports; None if the checkpoint compiles.
        bits: make's target that compares each token's bits: computed alone, in chunks, in a batch, and over another
            sequence's cache. None if another golden of the family is used for that.
    """

    name: str
    llama_cpp: float | None
    needs: str | None
    bits: Literal["test", "test-long"] | None


@dataclass(frozen=True)
class FamilyEvidence:
    """A family: its title, classes of config.json, llama.cpp's names, and its goldens.

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
        """The largest distance of llama.cpp; None if it was not measured for any golden."""
        return max((golden.llama_cpp for golden in self.goldens if golden.llama_cpp is not None), default=None)

    @property
    def without_llama_cpp(self) -> tuple[str, ...]:
        """Names of the goldens for which llama.cpp was not measured; `llama_cpp` is of the others."""
        return tuple(golden.name for golden in self.goldens if golden.llama_cpp is None)

    @property
    def bits(self) -> Literal["test", "test-long"] | None:
        """The most frequently run target that compares the bits of one of its goldens."""
        targets = {golden.bits for golden in self.goldens}
        return next((target for target in ("test", "test-long") if target in targets), None)

    @property
    def is_compiled(self) -> bool:
        """True if all of its goldens compile."""
        return bool(self.goldens) and all(golden.needs is None for golden in self.goldens)


@dataclass(frozen=True)
class FormatEvidence:
    """A file format, the supported part of it, its storage in the artifact, and its verification.

    `kept` lists differences from the file's numbers with `--quantize keep`, and refusals.
    """

    title: str
    reads: str
    kept: str
    verified: str


_FORMULA = "the format's formula"
_ROUNDED = "rounded to 8-bit integers with a scale for each 32, by at most 0.4 % of the largest of these"
FORMATS = (
    FormatEvidence(
        "GGUF",
        "one file or parts (-00001-of-0000N), all types but Q1_0 and Q2_0, mixed",
        "codes as they are; those of IQ1, IQ2 and IQ3 in 8 bits",
        "the reference of the gguf package",
    ),
    FormatEvidence(
        "safetensors", "F32, F16, BF16, in one file or shards", "exact; pickled files are refused", "transformers"
    ),
    FormatEvidence(
        "GPTQ",
        "2, 3, 4 and 8 bits, versions 1 and 2, symmetric or not, act-order, GPTQModel's dynamic",
        "codes as they are; act-order of stacks of experts and of the heads of latent attention (MLA) is refused, and "
        "rounded with --quantize q8; marlin's layout is refused",
        _FORMULA,
    ),
    FormatEvidence("AWQ", "4 bits, the layout gemm", "codes as they are; other layouts are refused", _FORMULA),
    FormatEvidence(
        "compressed-tensors",
        "pack-quantized (2, 4, 8 bits), int-, float- and naive-quantized, MXFP4, MXFP8, NVFP4, mixed",
        "codes as they are, but 8-bit floats as FP8's; NVFP4's scales are rounded to float16; act-order as GPTQ's; "
        "sparse ones and rotations (transform_config) are refused",
        _FORMULA,
    ),
    FormatEvidence("FP8", "E4M3 and E5M2 with a scale for each matrix, row or block; fbgemm's", _ROUNDED, _FORMULA),
    FormatEvidence("MXFP4", "gpt-oss's blocks", "exact; scales below 2^-126 become zero", "transformers"),
    FormatEvidence(
        "ModelOpt", "FP8, NVFP4", "FP8 as FP8's, NVFP4's scales rounded to float16; others are refused", _FORMULA
    ),
    FormatEvidence(
        "MLX",
        "affine of 2, 3, 4, 5, 6 and 8 bits, mxfp4, nvfp4, mixed; mlx-lm's names of tensors",
        "codes as they are; other modes are refused",
        f"{_FORMULA}; the same models' goldens",
    ),
    FormatEvidence(
        "MLC",
        "q0 and q4 conversions of mlc-llm, under its names of tensors",
        "codes as they are; q3 and FP8 conversions are refused",
        f"{_FORMULA}; the same models' goldens",
    ),
)


def families() -> list[FamilyEvidence]:
    """Return all families of the registry, in its order."""
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
