"""Results on disk: `bench/results/NAME.json`, each with its origin. `report.py` renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .machine import Origin

RESULTS = Path(__file__).resolve().parent / "results"
_LONGEST_ROW = 600  # characters


def write_results(name: str, figures: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write `figures` and their origin; numbers keep four significant digits."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.json"
    content = {"origin": asdict(Origin.of_this_process()), **_rounded(figures)}
    path.write_text(_laid_out(content) + "\n", encoding="utf-8")
    return path


def add_run(name: str, run: str, figures: Mapping[str, Any], directory: Path = RESULTS) -> Path:
    """Write the figures of one run and its origin, keeping the last ones of others, in the order of their names."""
    runs = (read_results(name, directory) or {"runs": {}})["runs"]
    runs[run] = {"origin": asdict(Origin.of_this_process()), **figures}
    return write_results(name, {"runs": dict(sorted(runs.items()))}, directory)


def read_results(name: str, directory: Path = RESULTS) -> dict[str, Any] | None:
    """Return the results that `write_results` wrote, or None."""
    path = directory / f"{name}.json"
    content: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return content


def _laid_out(value: Any, indent: str = "") -> str:
    """Return JSON in which a row is one line: values with numbers and names only, or few lists of them."""
    inner, line = indent + " ", json.dumps(value)
    depth = _depth(value)
    if depth < 2 or (depth == 2 and isinstance(value, dict) and len(line) < _LONGEST_ROW):
        return line
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_laid_out(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _laid_out(item, inner) for item in value) + f"\n{indent}]"


def _depth(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if items is None else 1 + max(map(_depth, items), default=0)


def _rounded(value: Any) -> Any:
    """Return a value of JSON with all floats rounded to four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
