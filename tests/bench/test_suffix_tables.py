"""What the appended token costs, as a table."""

from __future__ import annotations

from bench.suffix_tables import costs


def test_a_row_has_the_tokens_and_pages_of_a_talk_and_the_medians_of_its_times() -> None:
    def talk(way: str, last_s: float, num_cached: int) -> dict[str, object]:
        turns = [
            {"num_prompt_tokens": 1000, "num_cached_tokens": 0, "to_first_token_s": 1.0, "num_pages": 63},
            {"num_prompt_tokens": 2000, "num_cached_tokens": num_cached, "to_first_token_s": last_s, "num_pages": 126},
        ]
        return {"way": way, "replies": "The", "turns": turns}

    rows = [talk("text", 0.25, 1500), talk("exact", 2.0, 900), talk("text", 0.5, 1500), talk("text", 0.125, 1500)]
    lines = costs({"page_bytes": 8_000_000, "rows": rows}).splitlines()
    assert lines[2] == "| The: text | 1,500 of 3,000 | 1.25 | 250 | 126 | 1,008 |"
    assert lines[3] == "| The: exact | 2,100 of 3,000 | 3.00 | 2000 | 126 | 1,008 |"
