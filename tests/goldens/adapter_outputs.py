"""What transformers computed for the tiny adapters, as `make_adapters.py` stored it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .tiny_outputs import GoldenPrompt

FILE = Path(__file__).with_name("adapters.npz")


def load_adapter_golden(name: str) -> tuple[str, GoldenPrompt]:
    """Return the digest of the model's weights, and the prompt with the adapted model's logits."""
    with np.load(FILE) as arrays:
        found = {key: arrays[f"{name}/{key}"] for key in ("digest", "prompt", "rows", "logits")}
    return str(found["digest"]), GoldenPrompt(found["prompt"].tolist(), found["rows"], found["logits"])
