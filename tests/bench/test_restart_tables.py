"""First tokens after a restart, as a table."""

from __future__ import annotations

from bench.restart_tables import first_tokens


def test_the_planner_is_held_against_the_better_way() -> None:
    def first(seconds: float, disk_tokens: int = 0) -> dict[str, float]:
        return {"seconds": seconds, "disk_tokens": disk_tokens}

    one = {
        "recompute": first(8.0),
        **{"25 load": first(9.0, 1000), "25 planner": first(8.4)},
        **{"real load": first(0.25, 1000), "real planner": first(0.2, 1000)},
    }
    other = {**one, "25 planner": first(8.0)}
    rows = first_tokens({"num_tokens": 1000, "rounds": [one, other, other]}).splitlines()
    assert rows[2] == "| 25 MB/s | 8.00 | 9.00 | 8.00 | 0% | 1.00 | 1.0 |"
    assert rows[3] == "| real | 8.00 | 0.25 | 0.20 | 100% | 0.80 | 40.0 |"
