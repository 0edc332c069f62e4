"""Ladders and loads become tables that show what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from bench.agents.long_prompt import Round, figures
from bench.load.ladder import Rung, is_met
from bench.machine import Origin
from bench.report import serving

Lines = Callable[[Iterable[object]], list[str]]


def test_the_table_has_a_row_for_each_rung_and_shows_what_is_wrong(lines: Lines) -> None:
    times = {"p50": 0.25, "p99": 2.0, "max": 3.0}
    rung = {
        **vars(Rung("6 streams", 6, 12, num_words=8, num_reply_tokens=24, pool_tokens=256)),
        "mean_prompt_tokens": 39.6,
        "tokens_per_s": 1234.5,
        "first_token_s": times,
        "between_tokens_s": times,
        "num_preemptions": 1000,
        "num_failures": 0,
        "num_pages": 16,
        "num_free_pages": 16,
    }
    broken = {**rung, "num_failures": 2, "num_free_pages": 15}
    run = {"name": "m", "rungs": [rung, broken], "origin": asdict(Origin.of_this_process())}
    rows = lines(serving.ladder({"runs": {"m": run}}))
    assert rows[0] == (
        "| 6 streams | 12 | 40 + 24 | 256 | 1,234 | 250 ms / 2,000 ms | 250 ms / 2,000 ms | 1,000 | none | 16 of 16 |"
    )
    assert rows[1].endswith("| **2** | **15 of 16** |")
    assert not is_met(broken)


def test_the_table_has_a_column_for_each_run_and_says_what_did_not_hold(lines: Lines) -> None:
    times = {"p50": 0.25, "p99": 2.0, "max": 3.0}
    names = ("first_token_s", "between_tokens_s", "health_s")
    zeros = ("num_faults", "num_hung", "num_failed", "num_evicted_pages", "num_preemptions", "num_different_survivors")
    run: dict[str, Any] = {
        "model": "m",
        "num_streams": 50,
        "seconds": 60.2,
        "num_pages": 64,
        "answered": {"ids": 1000, "chat": 234},
        "refused": {"429 queue full": 7, "404 no such model": 2},
        "left": {"leave in mid-stream": 5},
        "tokens_per_s": 123.4,
        "cached_share": 0.25,
        "leaks": {"num_pages_lost": 0},
        "memory": {"warm_bytes": 1 << 20, "end_bytes": 2 << 20, "bytes_per_s": (1 << 20) / 60},
        "num_compared": 10,
        "num_greedy_compared": 4,
        "is_met": True,
        "origin": asdict(Origin.of_this_process()),
        **dict.fromkeys(names, times),
        **dict.fromkeys(zeros, 0),
    }
    broken = {**run, "num_streams": 200, "num_hung": 2, "num_different_survivors": 1, "is_met": False}
    rows = lines(serving.load({"runs": {"a": run, "b": broken}}))
    assert "| wrong, failed or hung | none | **2** |" in rows
    assert "| survivors the same alone | 10 of 10 (4 greedy) | 9 of 10 (4 greedy) |" in rows
    assert "| first token, p50 / p99 | 250 ms / 2.0 s | 250 ms / 2.0 s |" in rows
    assert "| memory warm → end, MiB | 1.0 → 2.0, +1.00 a minute | 1.0 → 2.0, +1.00 a minute |" in rows
    assert "| all held | yes | **no** |" in rows
    assert "| 429 queue full | 7 | 7 |" in rows


def test_a_long_prompt_has_a_row_for_each_bar_and_shows_which_is_missed(lines: Lines) -> None:
    rounds = [
        Round(30.0, 60.0, 80.0, 36.0, 0.2, (0.3, 0.9), 240.0),
        Round(30.0, 69.0, 80.0, 44.0, 0.2, (0.4, 1.1)),
    ]
    found = figures(rounds, 16_000)
    assert [bar["is_met"] for bar in found["bars"]] == [False, True, True, True]
    run = {**found, "origin": asdict(Origin.of_this_process())}
    rows = lines(serving.long_prompt({"runs": {"m": run}}))
    assert rows[0] == "| a short request's first token, s, at worst | 1.10 | 1: **missed** |"
    assert rows[2] == "| the long prompt's time, of its time alone | 2.15 | 2.2: met |"
    assert rows[3] == "| alone, times as fast as llama.cpp | 8.00 | 5: met |"
    assert rows[5] == "| 30.0 | 69.0 | - | 80.0 | 44.0 | 0.20 | 0.75 (0.40-1.10) |"
