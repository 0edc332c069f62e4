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


def live(results: Json) -> str:
    """What a real model computed again, by how the reply before had ended."""
    rows = [
        [
            name,
            f"{found['num_turns']} ({found['is_other']})",
            f"{found['num_prompt_tokens']:,}",
            f"{found['num_prefilled']:,}",
            f"{found['num_again']}",
            f"{found['num_by_ids']:,}",
        ]
        for name, found in results["replies"].items()
    ]
    header = [
        "reply before",
        "turns (ids not the text's)",
        "prompt tokens",
        "prefilled",
        "of them had KV",
        "by ids alone",
    ]
    return table(header, rows)


def text_quality(results: Json) -> str:
    """What the model makes of the true text behind reused ids, beside the usual ones."""
    rows = [
        [
            f"{row['ids']}, {row['follows']}",
            f"{row['num_replies']}, {row['num_talks']}",
            f"{row['usual']:.3f}",
            f"**{row['gain']:+.4f}** ± {row['gain_error']:.4f}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
            f"{row['agreement']:.1%} ± {row['agreement_error']:.1%}",
        ]
        for row in results["rows"]
    ]
    header = ["ids, what follows", "replies, talks", "usual ids, nats a token", "reused: more by", "KL", "same top-1"]
    return table(header, rows)


def _sum(held: list[Json], field: str, name: str) -> int:
    return sum(one[field].get(name, 0) for one in held)
