"""What llama.cpp's converter does to each family, by the family's `model_type`.

A family that is missing here has no converter.
"""

from __future__ import annotations

from .gguf_dense import DENSE, Converter
from .gguf_experts import EXPERTS
from .gguf_hybrid import HYBRID
from .gguf_latest import LATEST

__all__ = ["GGUF_FAMILIES", "Converter"]

GGUF_FAMILIES: dict[str, Converter] = {**DENSE, **EXPERTS, **LATEST, **HYBRID}
