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


def group(*seconds: float, loaded: float | None = None, is_first: bool = False) -> dict[str, object]:
    shared = {"num_joined": 1, "is_first": is_first, "seconds": list(seconds), "loaded": [loaded] * len(seconds)}
    shared |= {name: [70_000_000] * len(seconds) for name in ("read_bytes", "device_bytes")}
    return {**shared, "dropped_mass": [None if loaded is None else 0.1] * len(seconds)}


def way(*groups: dict[str, object]) -> dict[str, object]:
    return {"known_bytes": 0, "groups": list(groups)}


def shown(measured: dict[str, object], lines: Lines) -> list[str]:
    shape: dict[str, object] = {"num_tokens": [[1, 1000]], "num_history": [4], "workload": "nq", "page_bytes": 368_640}
    shape["origin"] = dict.fromkeys(("command", "commit", "date", "machine", "apache_tvm"), "x")
    return lines(store.first_token({"runs": {"m": {"model": "m", "measured": measured, **shape}}}))


def test_a_quarter_is_held_against_what_is_better(lines: Lines) -> None:
    slow = {"25 full": way(group(3.0, 3.0)), "25 planner": way(group(1.25, 1.25))}
    slow["25 25%"] = way(group(1.0, 1.0, loaded=0.25))
    fast = {"real full": way(group(0.2)), "real 25%": way(group(0.2)), "real planner": way(group(0.1))}
    found = shown({"recompute": way(group(2.0)), **slow, **fast}, lines)
    assert "| 25 MB/s, 1,000-1,000, later | 3.00 | met | 0.50 | 0.80 | 0% | 2 | 2 | 0.100 |" in found
    assert "| the real one, 1,000-1,000, later | 1.00 |  | 1.00 | 2.00 | 100% | 0 | 1 |  |" in found


def test_first_requests_stand_apart_and_those_above_the_best_exact_way_are_counted(lines: Lines) -> None:
    def both(first: float, *later: float) -> dict[str, object]:
        return way(group(first, is_first=True), group(*later))

    ways = {"25 full": both(3.0, 3.0), "25 planner": both(1.0, 1.0), "recompute": both(2.0, 2.0)}
    found = shown({**ways, "25 25%": both(1.2, 0.5, 1.04, 1.06, 0.5)}, lines)
    assert "| 25 MB/s, 1,000-1,000, first | 2.50 | met | 0.60 | 1.20 | 100% | 0 | 1 |  |" in found
    assert "| 25 MB/s, 1,000-1,000, later | 3.90 | met | 0.39 | 0.77 | 25% | 0 | 4 |  |" in found
