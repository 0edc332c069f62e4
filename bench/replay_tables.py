"""Markdown tables of replayed conversations. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

from .replay_engine import POLICIES
from .tables import Json, table


def ratios(results: Json) -> str:
    """Tokens prefilled to the ideal, by model, kind of replies and policy."""
    cells: dict[tuple[str, str], dict[str, Json]] = {}
    for row in results["rows"]:
        cells.setdefault((row["model"], row["replies"]), {})[row["policy"]] = row
    rows = [
        [
            f"{model}, {replies}",
            *(f"{found[policy]['ratio']:.4g}" for policy in POLICIES),
            f"{found['text']['num_prefilled']:,}",
            f"{found['text']['num_prompt_tokens']:,}",
        ]
        for (model, replies), found in cells.items()
    ]
    return table(["model, replies", *POLICIES, "`text` prefills, tokens", "of prompts with"], rows)


def changed(results: Json) -> str:
    """Requests that reused less than they must, of all, by what clients did."""
    rows = []
    for way in ("text", "memo"):
        held = [found[way] for found in results["changed"].values()]
        names = list(held[0]["num_requests"])
        rows.append(
            [way, *(f"{_sum(held, 'num_short', name)} of {_sum(held, 'num_requests', name)}" for name in names)]
        )
    return table(["", *names], rows)


def _sum(held: list[Json], field: str, name: str) -> int:
    return sum(one[field].get(name, 0) for one in held)
