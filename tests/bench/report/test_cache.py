"""Costs of the prefix cache, finds, replays and the appended token become tables that say which bar is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench.cache import match_cost
from bench.report import cache

Lines = Callable[[Iterable[object]], list[str]]


def test_costs_are_measured_and_shown_beside_the_bar(lines: Lines) -> None:
    bar = {"s": 50e-6, "s_per_token": 1e-6}
    size = match_cost.measure(2000, (16, 40))  # asserts that all of each prompt is found, by its ids and by its text
    short, long, index = lines(cache.match_cost({"bar": bar, "sizes": [size]}))
    assert [line.split(" | ")[0] for line in (short, long)] == ["| 16", "| 40"]
    assert [line.split(" | ")[2] for line in (short, long)] == ["66", "90"]
    assert index.startswith("| 2,")


def test_a_missed_bar_is_said(lines: Lines) -> None:
    prompt = {"tokens": 100, "match_s": 60e-6, "insert_s": 80e-6, "text_match_s": 300e-6}
    size = {"cached_tokens": 1000, "num_nodes": 3, "bytes_per_token": 7.25, "prompts": [prompt]}
    results = {"bar": {"s": 50e-6, "s_per_token": 1e-6}, "sizes": [size]}
    assert lines(cache.match_cost(results))[0] == "| 100 | 60 + 80 | 150 | met | 300 | 5 |"
    prompt["insert_s"] = 95e-6
    assert "**missed**" in lines(cache.match_cost(results))[0]


def test_hit_rates_are_by_order_and_pool(lines: Lines) -> None:
    pools = [{"share": share, "hit_rates": {"LRU": share / 2, "Belady": share}} for share in (0.1, 0.5)]
    results = {"requests": 3, "hash_ids": 20, "distinct": 10, "pools": pools}
    assert lines(cache.mooncake(results)) == ["| LRU | 5.00% | 25.00% |", "| Belady | 10.00% | 50.00% |"]


def test_ratios_have_a_row_for_each_kind_of_replies(lines: Lines) -> None:
    def row(policy: str, num_prefilled: int) -> dict[str, Any]:
        fixed = {"model": "llama2", "replies": "bare", "num_prompt_tokens": 12_000}
        return {**fixed, "policy": policy, "num_prefilled": num_prefilled, "ratio": num_prefilled / 1000}

    results = {
        "is_met": True,
        "rows": [row("text", 1000), row("seam", 6500), row("exact", 6500), row("others", 6600)],
    }
    assert lines(cache.replay(results)) == ["| llama2, bare | 1 | 6.5 | 6.5 | 6.6 | 1,000 | 12,000 |"]


def test_live_turns_have_a_row_each(lines: Lines) -> None:
    counts = {"num_turns": 9, "is_other": 2, "num_prompt_tokens": 4000, "num_prefilled": 90}
    replies = {"whole": {**counts, "num_again": 0, "num_by_ids": 1500}}
    results = {"num_conversations": 3, "num_turns": 4, "is_met": False, "replies": replies}
    assert lines(cache.replay_live(results)) == ["| whole | 9 (2) | 4,000 | 90 | 0 | 1,500 |"]
    assert any("**missed**" in part for part in cache.replay_live(results))


def test_a_row_has_the_tokens_and_pages_of_a_talk_and_the_medians_of_its_times(lines: Lines) -> None:
    def talk(way: str, last_s: float, num_cached: int) -> dict[str, object]:
        turns = [
            {"num_prompt_tokens": 1000, "num_cached_tokens": 0, "to_first_token_s": 1.0, "num_pages": 63},
            {"num_prompt_tokens": 2000, "num_cached_tokens": num_cached, "to_first_token_s": last_s, "num_pages": 126},
        ]
        return {"way": way, "replies": "The", "turns": turns}

    rows = [talk("text", 0.25, 1500), talk("exact", 2.0, 900), talk("text", 0.5, 1500), talk("text", 0.125, 1500)]
    found = lines(cache.suffix({"page_bytes": 8_000_000, "num_layers": 2, "rows": rows}))
    assert found[0] == "| The: text | 1,500 of 3,000 | 1.25 | 250 | 126 | 1,008 |"
    assert found[1] == "| The: exact | 2,100 of 3,000 | 3.00 | 2000 | 126 | 1,008 |"


def test_a_client_has_its_ratios_in_all_dialects_and_llama_cpps(lines: Lines) -> None:
    def row(dialect: str, ratio: float, peer_ratio: float) -> dict[str, Any]:
        counts = {"num_computed": 1000, "num_prompt_tokens": 9000, "num_idle": 7}
        return {"model": "m", "shape": "s", "dialect": dialect, "ratio": ratio, "peer_ratio": peer_ratio, **counts}

    results = {"bar": 1.01, "is_met": True, "num_turns": 3, "rows": [row("chat", 1, 2.5), row("messages", 1.25, 3)]}
    found = lines(cache.agents(results))
    assert found == ["| m: s | 1.0000 | 1.2500 | 1,000 | 9,000 | 7 | 2.5000 | 3.0000 |"]
