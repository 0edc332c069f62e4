"""Tables of what the prefix cache costs and finds. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

from .tables import Json, table


def match_costs(results: Json) -> str:
    """Microseconds by length of the prompt and size of the index, beside the bar."""
    sizes = results["sizes"]
    rows = []
    for index, prompt in enumerate(sizes[-1]["prompts"]):
        bar = results["bar"]["s"] + results["bar"]["s_per_token"] * prompt["tokens"]
        found = [size["prompts"][index] for size in sizes]
        rows.append(
            [
                f"{prompt['tokens']:,}",
                *(f"{_us(one['match_s'])} + {_us(one['insert_s'])}" for one in found),
                _us(bar),
                "met" if prompt["match_s"] + prompt["insert_s"] <= bar else "**missed**",
                _us(prompt["text_match_s"]),
                f"{prompt['text_match_s'] / prompt['match_s']:.0f}",
            ]
        )
    header = ["prompt, tokens", *(f"{size['cached_tokens']:,} cached" for size in sizes), "bar", ""]
    return table([*header, "text walk", "times the token walk"], rows)


def index_sizes(results: Json) -> str:
    """Memory of the index."""
    rows = [
        [f"{size['cached_tokens']:,}", f"{size['num_nodes']:,}", f"{size['bytes_per_token']:.1f}"]
        for size in results["sizes"]
    ]
    return table(["cached tokens", "runs", "bytes a token"], rows)


def hit_rates(results: Json) -> str:
    """Hit rates by order of eviction and size of the pool."""
    pools = results["pools"]
    header = ["pool, of all distinct pages", *(f"{pool['share']:.0%}" for pool in pools)]
    rows = [[order, *(f"{pool['hit_rates'][order]:.2%}" for pool in pools)] for order in pools[0]["hit_rates"]]
    return table(header, rows)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"
