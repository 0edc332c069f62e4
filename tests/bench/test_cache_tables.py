"""The cache's costs are measured of what is there, and its tables say which bar is met."""

from __future__ import annotations

from bench import cache_tables, match_cost


def test_costs_are_measured_and_shown_beside_the_bar() -> None:
    bar = {"s": 50e-6, "s_per_token": 1e-6}
    size = match_cost.measure(2000, (16, 40))  # asserts that all of each prompt is found, by its ids and by its text
    found = cache_tables.match_costs({"bar": bar, "sizes": [size]}).splitlines()
    assert [line.split(" | ")[0] for line in found[2:]] == ["| 16", "| 40"]
    assert [line.split(" | ")[2] for line in found[2:]] == ["66", "90"]
    assert cache_tables.index_sizes({"sizes": [size]}).splitlines()[2].startswith("| 2,")


def test_a_missed_bar_is_said() -> None:
    prompt = {"tokens": 100, "match_s": 60e-6, "insert_s": 80e-6, "text_match_s": 300e-6}
    size = {"cached_tokens": 1000, "num_nodes": 3, "bytes_per_token": 7.25, "prompts": [prompt]}
    results = {"bar": {"s": 50e-6, "s_per_token": 1e-6}, "sizes": [size]}
    assert cache_tables.match_costs(results).splitlines()[2] == "| 100 | 60 + 80 | 150 | met | 300 | 5 |"
    prompt["insert_s"] = 95e-6
    assert "**missed**" in cache_tables.match_costs(results)


def test_hit_rates_are_by_order_and_pool() -> None:
    pools = [{"share": share, "hit_rates": {"LRU": share / 2, "Belady": share}} for share in (0.1, 0.5)]
    assert cache_tables.hit_rates({"pools": pools}).splitlines()[2:] == [
        "| LRU | 5.00% | 25.00% |",
        "| Belady | 10.00% | 50.00% |",
    ]
