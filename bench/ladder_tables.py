"""The table of a ladder of streams. Knows what `ladder.json` holds, not how it was found."""

from __future__ import annotations

from collections.abc import Mapping

from .tables import Json, table


def rungs(run: Json) -> str:
    """A row for each rung: how fast, how soon, and what it cost."""
    header = [run["name"], "requests", "tokens, prompt + reply", "pool", "tokens/s", "first token, p50 / p99"]
    header += ["between tokens, p50 / p99", "preemptions", "failures", "pages free"]
    return table(header, [_cells(rung) for rung in run["rungs"]])


def _cells(rung: Json) -> list[str]:
    free, pages = rung["num_free_pages"], rung["num_pages"]
    return [
        rung["name"],
        f"{rung['num_requests']:,}",
        f"{rung['mean_prompt_tokens']:.0f} + {rung['num_reply_tokens']}",
        f"{rung['pool_tokens']:,}",
        f"{rung['tokens_per_s']:,.0f}",
        _times(rung["first_token_s"]),
        _times(rung["between_tokens_s"]),
        f"{rung['num_preemptions']:,}",
        f"**{rung['num_failures']}**" if rung["num_failures"] else "none",
        f"{free:,} of {pages:,}" if free == pages else f"**{free:,} of {pages:,}**",
    ]


def _times(times: Mapping[str, float]) -> str:
    return " / ".join(f"{times[name] * 1e3:,.0f} ms" for name in ("p50", "p99"))
