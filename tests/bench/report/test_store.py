"""First tokens of prompts on disk become tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.report import store

Lines = Callable[[Iterable[object]], list[str]]


def test_the_planner_is_held_against_the_better_way(lines: Lines) -> None:
    def first(seconds: float, disk_tokens: int = 0) -> dict[str, float]:
        return {"seconds": seconds, "disk_tokens": disk_tokens}

    one = {
        "recompute": first(8.0),
        **{"25 load": first(9.0, 1000), "25 planner": first(8.4)},
        **{"real load": first(0.25, 1000), "real planner": first(0.2, 1000)},
    }
    other = {**one, "25 planner": first(8.0)}
    rows = lines(store.restart({"num_tokens": 1000, "rounds": [one, other, other]}))
    assert rows[0] == "| 25 MB/s | 8.00 | 9.00 | 8.00 | 0% | 1.00 | 1.0 |"
    assert rows[1] == "| real | 8.00 | 0.25 | 0.20 | 100% | 0.80 | 40.0 |"


def test_a_quarter_is_held_against_what_is_better(lines: Lines) -> None:
    def group(*seconds: float, loaded: float | None = None) -> dict[str, object]:
        shared = {"num_joined": 1, "is_first": False, "seconds": list(seconds), "loaded": [loaded] * len(seconds)}
        shared |= {name: [70_000_000] * len(seconds) for name in ("read_bytes", "device_bytes")}
        return {
            "known_bytes": 0,
            "groups": [{**shared, "dropped_mass": [None if loaded is None else 0.1] * len(seconds)}],
        }

    ways = {"25 full": group(3.0, 3.0), "25 25%": group(1.0, 1.0, loaded=0.25), "25 planner": group(1.25, 1.25)}
    fast = {"real full": group(0.2), "real 25%": group(0.2), "real planner": group(0.1)}
    results = {"measured": {"recompute": group(2.0), **ways, **fast}, "num_tokens": [[1, 1000]]}
    found = lines(store.first_token({**results, "num_history": [4], "workload": "nq", "page_bytes": 368_640}))
    assert "| 25 MB/s, 1,000-1,000 | 3.00 | met | 0.50 | 0.80 | 2 | 2 | 0.100 |" in found
    assert "| the real one, 1,000-1,000 | 1.00 |  | 1.00 | 2.00 | 0 | 1 |  |" in found
