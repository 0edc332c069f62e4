"""A table of first tokens after a restart. Knows what `store_restart.json` holds, not how it was measured."""

from __future__ import annotations

from statistics import median

from .tables import Json, table


def first_tokens(results: Json) -> str:
    """One row a disk: seconds, medians of the rounds, and what the planner's choice is to the better of the two."""
    rounds = results["rounds"]
    recompute = _seconds(rounds, "recompute")
    rows = []
    for disk in dict.fromkeys(name.split()[0] for name in rounds[0] if name != "recompute"):
        load, planner = _seconds(rounds, f"{disk} load"), _seconds(rounds, f"{disk} planner")
        shares = [each[f"{disk} planner"]["disk_tokens"] / results["num_tokens"] for each in rounds]
        rows.append(
            [
                disk if disk == "real" else f"{disk} MB/s",
                *(f"{seconds:.2f}" for seconds in (recompute, load, planner)),
                f"{median(shares):.0%}",
                f"{planner / min(recompute, load):.2f}",
                f"{recompute / planner:.1f}",
            ]
        )
    header = ["disk", "computed", "loaded", "as planned", "of it loaded", "to the better", "times as fast as computed"]
    return table(header, rows)


def _seconds(rounds: list[Json], name: str) -> float:
    return median(float(each[name]["seconds"]) for each in rounds)
