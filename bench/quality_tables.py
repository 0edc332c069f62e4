"""Markdown tables of perplexities and of rounding errors. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .tables import Json, table


def perplexities(rows: Sequence[Json]) -> str:
    """What each evaluator made of each text, and its ratios to others."""
    others = list(dict.fromkeys(other for row in rows for other in row["against"]))
    cells = [
        [
            f"{row['text']}, {row['tokens']:,} tokens",
            row["evaluator"],
            f"{row['perplexity']:.4g}",
            *(_ratio(row["against"].get(other)) for other in others),
        ]
        for row in rows
    ]
    return table(["text", "evaluator", "perplexity", *(f"times {other}'s" for other in others)], cells)


def rounding_errors(errors: Sequence[Json]) -> str:
    """Squared errors of our q4 over those of Q4_0, by kind of matrix."""
    cells = [
        [f"`{row['matrices']}`, {row['count']}"]
        + [f"{row[name]:.3f}" for name in ("weights", "outputs", "outputs_at_worst")]
        for row in errors
    ]
    return table(["matrices", "weights", "outputs", "outputs, worst layer"], cells)


def _ratio(difference: dict[str, Any] | None) -> str:
    """With twice the standard error, about what 95 % of repetitions would stay within."""
    if difference is None:
        return ""
    ratio = math.exp(difference["nats"])  # files keep four digits of it, and so fewer of the ratio
    return f"{ratio:.4f} ± {2 * ratio * difference['standard_error']:.4f}"
