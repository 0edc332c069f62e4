"""Tables of caches of chunks. Knows what `chunk_cache.json` holds, not how it was measured."""

from __future__ import annotations

from .tables import Json, table


def hit_ratios(rows: list[Json]) -> str:
    """Share of the wanted bytes that each policy has in memory: a row for each trace and size of the cache."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    return table(
        ["requests, cache", *policies],
        [[name, *(f"{by_policy[policy]['hit_ratio']:.1%}" for policy in policies)] for name, by_policy in _lines(rows)],
    )


def first_tokens(rows: list[Json], policies: list[str]) -> str:
    """Megabytes read from disk a request, and estimated seconds to its first token."""
    speeds = [name for name in rows[0] if name.startswith("ttft_s_")]
    whats = ["MB", *(f"s at {name.removeprefix('ttft_s_')} MB/s" for name in speeds)]
    return table(
        ["requests, cache", *(f"{policy}: {what}" for policy in policies for what in whats)],
        [
            [
                name,
                *(
                    cell
                    for policy in policies
                    for cell in (
                        f"{by_policy[policy]['disk_bytes'] / 1e6:.1f}",
                        *(f"{by_policy[policy][speed]:.2f}" for speed in speeds),
                    )
                ),
            ]
            for name, by_policy in _lines(rows)
        ],
    )


def _lines(rows: list[Json]) -> list[tuple[str, dict[str, Json]]]:
    lines: dict[str, dict[str, Json]] = {}
    for row in rows:
        lines.setdefault(f"{row['trace']}, {row['share']:.0%}", {})[row["policy"]] = row
    return list(lines.items())
