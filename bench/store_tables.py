"""Tables of what the store reads. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

from .tables import Json, table


def by_stored_order(rows: list[Json]) -> str:
    """Read amplification by share and chunk size, of the first tokens in stored order."""
    return table(
        ["share, chunk", "in text", "ranked", "whole chunks", "reads in text", "ranked", "chunks in text", "ranked"],
        [
            [
                _name(row),
                f"{row['text']:.2f}",
                f"**{row['ranked']:.3f}**",
                "" if row["whole"] is None else f"{row['whole']:.3f}",
                *(f"{row[name]:,.0f}" for name in ("text_reads", "ranked_reads", "text_chunks", "ranked_chunks")),
            ]
            for row in rows
            if row["policy"] == "stored"
        ],
    )


def by_probe(rows: list[Json]) -> str:
    """The same where half of the tokens are picked by a probe, with what is read for that and without."""
    return table(
        ["share, chunk", *(f"{order}{what}" for order in _ORDERS for what in ("", ", no probe", ", no order"))],
        [
            [
                _name(row),
                *(f"{row[f'{order}{what}']:.2f}" for order in _ORDERS for what in ("", "_no_probe", "_no_order")),
            ]
            for row in rows
            if row["policy"] == "hybrid"
        ],
    )


def by_workload(workloads: dict[str, list[Json]]) -> str:
    """Amplification, megabytes and reads of both policies on each text."""
    return table(
        ["text, policy, share", "queries", *_ORDERS, *(f"MB, {order}" for order in _ORDERS), "reads, text", "quarter"],
        [
            [
                f"{name}, {row['policy']}, {row['budget']:.0%}",
                str(row["num_queries"]),
                *(f"{row[order]:.2f}" if order in row else "" for order in _ORDERS),
                *(f"{row[f'{order}_bytes'] / 1e6:.1f}" if order in row else "" for order in _ORDERS),
                *(f"{row[f'{order}_reads']:,.0f}" if order in row else "" for order in ("text", "quarter")),
            ]
            for name, rows in workloads.items()
            for row in rows
        ],
    )


_ORDERS = ("text", "ranked", "quarter")


def _name(row: Json) -> str:
    return f"{row['budget']:.0%}, {row['chunk_size']}"
