"""Results on disk: `bench/results/NAME.json`, each with its origin. Rendering them is `report.py`'s."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .machine import Origin

RESULTS = Path(__file__).resolve().parent / "results"


def write_results(name: str, figures: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write `figures` and their origin; numbers keep four significant digits."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    content = {"origin": asdict(Origin.of_this_process()), **_rounded(figures)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def read_results(name: str, directory: Path = RESULTS) -> dict[str, Any] | None:
    """What `write_results` wrote, or None."""
    path = directory / f"{name}.json"
    content: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return content


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
