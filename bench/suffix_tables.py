"""A table of what the appended token costs. Knows what `suffix.json` holds, not how it was measured."""

from __future__ import annotations

from statistics import median

from .tables import Json, table


def costs(results: Json) -> str:
    """A row for each way to ask and each beginning of replies: tokens, seconds as medians of the rounds, and pages."""
    talks: dict[tuple[str, str], list[list[Json]]] = {}
    for row in results["rows"]:
        talks.setdefault((row["replies"], row["way"]), []).append(row["turns"])
    rows = []
    for (replies, way), rounds in talks.items():
        turns = rounds[0]
        num_computed = sum(turn["num_prompt_tokens"] - turn["num_cached_tokens"] for turn in turns)
        all_s = median(sum(float(turn["to_first_token_s"]) for turn in turns) for turns in rounds)
        last_s = median(float(turns[-1]["to_first_token_s"]) for turns in rounds)
        num_pages = turns[-1]["num_pages"]
        rows.append(
            [
                f"{replies}: {way}",
                f"{num_computed:,} of {sum(turn['num_prompt_tokens'] for turn in turns):,}",
                f"{all_s:.2f}",
                f"{last_s * 1e3:.0f}",
                f"{num_pages:,}",
                f"{num_pages * results['page_bytes'] / 1e6:,.0f}",
            ]
        )
    header = [
        "replies: way",
        "tokens computed of prompts",
        "to first tokens, s",
        "to the last turn's, ms",
        "pages",
        "MB",
    ]
    return table(header, rows)
