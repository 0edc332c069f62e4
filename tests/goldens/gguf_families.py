"""What llama.cpp's converter does to each family, by the family's `model_type`, and whether it has experts.

A family that is missing here has no converter.
"""

from __future__ import annotations

from .gguf_dense import DENSE, Config, Converter
from .gguf_experts import EXPERTS
from .gguf_hybrid import HYBRID
from .gguf_latest import LATEST

__all__ = ["GGUF_FAMILIES", "Converter", "converter_of"]

GGUF_FAMILIES: dict[str, Converter] = {**DENSE, **EXPERTS, **LATEST, **HYBRID}


def converter_of(c: Config) -> Converter | None:
    """What the converter does to a checkpoint with this configuration; None: it has none."""
    kind = str(c["model_type"])
    return GGUF_FAMILIES.get(f"{kind} with experts" if "n_routed_experts" in c else kind) or GGUF_FAMILIES.get(kind)
