"""Sections on the prefix cache: its cost, its hits, and what is computed again. Knows the contents of the JSON."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from .tables import Cell, Json, each, met, table


def match_cost(results: Json) -> Iterator[str]:
    """Yield the section on the cost of the prefix cache: times by prompt length and index size, and memory."""
    yield "## What the prefix cache costs"
    yield (
        "Microseconds to match a prompt that is cached, plus those to insert a new one, which is all that the cache "
        "does for a request: match, open, a step's reserve and commit, close. Without tokenization; medians. The text "
        "walk is of the same text in other ids: the prompt has two for each cached one."
    )
    sizes, bar = results["sizes"], results["bar"]
    rows = [
        {
            **found[-1],  # of the largest index, which the requirement is for
            "found": [f"{one['match_s'] * 1e6:,.0f} + {one['insert_s'] * 1e6:,.0f}" for one in found],
            "bar": bar["s"] + bar["s_per_token"] * found[-1]["tokens"],
        }
        for found in zip(*(size["prompts"] for size in sizes), strict=True)
    ]
    columns: dict[str, Cell] = {"prompt, tokens": "{tokens:,}"}
    columns |= each((f"{size['cached_tokens']:,} cached" for size in sizes), "found")
    columns |= {"bar": "{bar:us ,.0f}", "": lambda row: met(row["match_s"] + row["insert_s"] <= row["bar"])}
    columns["text walk"] = "{text_match_s:us ,.0f}"
    columns["times the token walk"] = lambda row: f"{row['text_match_s'] / row['match_s']:.0f}"
    yield table(columns, rows)
    columns = {"cached tokens": "{cached_tokens:,}", "runs": "{num_nodes:,}", "bytes a token": "{bytes_per_token:.1f}"}
    yield table(columns, sizes)


def mooncake(results: Json) -> Iterator[str]:
    """Yield the hit rates of the prefix cache on Mooncake's trace, by order of eviction and size of the pool."""
    yield "## Mooncake's conversation trace"
    yield (
        f"{results['requests']:,} requests with {results['hash_ids']:,} hash ids, {results['distinct']:,} distinct, "
        "each a page; the share of them that is found. The engine's order is LRU, leaves first; Belady's choice knows "
        "the future."
    )
    pools = results["pools"]
    columns: dict[str, Cell] = {"pool, of all distinct pages": "{order}"}
    columns |= each((f"{pool['share']:.0%}" for pool in pools), "rates", ":.2%")
    orders = pools[0]["hit_rates"]
    yield table(columns, [{"order": one, "rates": [pool["hit_rates"][one] for pool in pools]} for one in orders])


def replay(results: Json) -> Iterator[str]:
    """Yield prefilled tokens divided by the ideal, by model, kind of replies and policy."""
    yield "## Conversations replayed"
    yield (
        "Prompt tokens passed to the model in every turn but the first, over the ideal: all after the last token whose "
        "KV can exist. OASST conversations; the model is told what to say, in replies that begin with a word (bare) or "
        "a space, are split into any ids of the vocabulary, stand in white space (padded), or ended for want of room "
        "(cut). `others` feeds the rendered text and matches its ids. The bar is 1.01 for `text`: "
        f"{met(results['is_met'])}."
    )
    rows: dict[str, Json] = {}
    for row in results["rows"]:
        rows.setdefault(f"{row['model']}, {row['replies']}", {})[row["policy"]] = row
    columns: dict[str, Cell] = {"model, replies": "{name}"}
    columns |= {policy: f"{{{policy}[ratio]:.4g}}" for policy in next(iter(rows.values()))}
    columns["`text` prefills, tokens"] = "{text[num_prefilled]:,}"
    columns["of prompts with"] = "{text[num_prompt_tokens]:,}"
    yield table(columns, [{"name": name, **found} for name, found in rows.items()])


def replay_states(results: Json) -> Iterator[str]:
    """Yield computed tokens divided by pure attention's minimum, by kind of conversation and size of states."""
    sizes, bars = results["sizes"], results["bars"]
    yield "## Conversations and tool loops, replayed by models that keep states"
    shapes = ", ".join(f"{name} {size / 1e6:.2f} MB (bar {bars[name]})" for name, size in sizes.items())
    yield (
        "As the two tables of conversations and tool loops, with one more condition: a prompt goes on from a token at "
        "which a state stands. The least is pure attention's, which can go on from any token. A state of "
        f"{shapes}; the pool has {results['bytes'] / 1e9:.2f} GB. The bars are {met(results['is_met'])}."
    )
    rows: dict[str, Json] = {}
    for row in results["rows"]:
        rows.setdefault(row["talk"], {})[row["states"].replace(".", "")] = row
    keys = {name: name.replace(".", "") for name in sizes}
    columns: dict[str, Cell] = {"conversation": "{name}"}
    columns |= {name: f"{{{key}[ratio]:.4f}}" for name, key in keys.items()}
    columns |= {f"{name}: computed": f"{{{key}[num_computed]:,}}" for name, key in keys.items()}
    if any(row.get("peer_ratio") for row in results["rows"]):
        columns |= {f"llama.cpp, {name}": _peer_ratio(key) for name, key in keys.items()}
        yield (
            "llama.cpp's server, of the same requests with layers of the same kinds, where replies are the encoding of "
            "their text; it has the replies in its slot as if it had generated them."
        )
    yield table(columns, [{"name": name, **found} for name, found in rows.items()])


def _peer_ratio(key: str) -> Cell:
    return lambda row: f"{row[key]['peer_ratio']:.4f}" if row[key].get("peer_ratio") else ""


def agents(results: Json) -> Iterator[str]:
    """Yield computed tokens divided by the minimum, by model and the client's changes, in each API."""
    yield "## Tool loops of coding agents"
    yield (
        f"Loops of {results['num_turns']} turns over HTTP; the model is told what to say. Prompt tokens computed while "
        "a request waits, in every turn but the first, over the least possible: those behind the first byte in which a "
        "prompt differs from the longest earlier text, and the last token of each reply. Calls are equal however a "
        "client writes them; white space that it trims, and reasoning that it or the template drops, count as known. "
        "Where there are subagents, each has a loop of its own, and they take turns. "
        "Idle tokens are computed between the turns. "
        f"The bar is {results['bar']} for each: {met(results['is_met'])}. llama.cpp's server gets the same requests, "
        "and has the same replies in its slot as if it had generated them; what its usage reports is divided by the "
        "same least. It does not compute what the template drops while it idles."
    )
    rows: dict[str, Json] = {}
    for row in results["rows"]:
        rows.setdefault(f"{row['model']}: {row['shape']}", {})[row["dialect"]] = row
    dialects = list(next(iter(rows.values())))
    columns: dict[str, Cell] = {"model: client": "{name}"}
    columns |= {dialect: f"{{{dialect}[ratio]:.4f}}" for dialect in dialects}
    first = dialects[0]
    columns[f"{first}: computed"] = f"{{{first}[num_computed]:,}}"
    columns["of prompts with"] = f"{{{first}[num_prompt_tokens]:,}}"
    columns["idle"] = f"{{{first}[num_idle]:,}}"
    columns |= {f"llama.cpp, {dialect}": f"{{{dialect}[peer_ratio]:.4f}}" for dialect in dialects}
    yield table(columns, [{"name": name, **found} for name, found in rows.items()])


def replay_live(results: Json) -> Iterator[str]:
    """Yield the tokens that a real model computed again, by how the reply before had ended."""
    yield "## A real model's own replies"
    yield (
        f"{results['num_conversations']} conversations of {results['num_turns']} turns at temperature 1, counted at "
        "the model's door. Of a reply that came whole to the client nothing that had KV may be prefilled again: "
        f"{met(results['is_met'])}. The tokens of a stop string had KV, too, but their text is kept from the client, "
        "which cannot send it back."
    )
    yield table(
        {
            "reply before": "{name}",
            "turns (ids not the text's)": "{num_turns} ({is_other})",
            "prompt tokens": "{num_prompt_tokens:,}",
            "prefilled": "{num_prefilled:,}",
            "of them had KV": "{num_again}",
            "by ids alone": "{num_by_ids:,}",
        },
        [{"name": name, **found} for name, found in results["replies"].items()],
    )


def suffix(results: Json) -> Iterator[str]:
    """Yield the cost of Llama-2's token of a lone space: a row for each way of matching and first word of replies."""
    yield "## What Llama-2's appended token costs"
    num_turns, num_layers = len(results["rows"][0]["turns"]), results["num_layers"]
    yield (
        f"One conversation of {num_turns} turns over raw completions that end in a space, with Llama-2's tokenizer "
        f"and the shapes of Llama-2-7B, of which {num_layers} layers compute. Matched by ids with 29871 fed, as "
        "engines do that key their cache by ids (mlc-llm #2897); by ids without it; and by text, as is the default. "
        "Replies begin with '▁The', or with 'The', before which the token of the space is said where the prompt lost "
        "it. Seconds are medians of the rounds, from a prompt to its first token, of all turns and of the last; pages "
        "are those that the cache holds after it, and MB those of all layers."
    )
    conversations: dict[str, list[list[Json]]] = {}
    for row in results["rows"]:
        conversations.setdefault(f"{row['replies']}: {row['way']}", []).append(row["turns"])
    rows = [
        {
            "name": name,
            "num_computed": sum(turn["num_prompt_tokens"] - turn["num_cached_tokens"] for turn in rounds[0]),
            "num_prompt": sum(turn["num_prompt_tokens"] for turn in rounds[0]),
            "all_s": median(sum(float(turn["to_first_token_s"]) for turn in turns) for turns in rounds),
            "last_s": median(float(turns[-1]["to_first_token_s"]) for turns in rounds),
            "num_pages": rounds[0][-1]["num_pages"],
            "num_bytes": rounds[0][-1]["num_pages"] * results["page_bytes"],
        }
        for name, rounds in conversations.items()
    ]
    yield table(
        {
            "replies: way": "{name}",
            "tokens computed of prompts": "{num_computed:,} of {num_prompt:,}",
            "to first tokens, s": "{all_s:.2f}",
            "to the last turn's, ms": "{last_s:ms .0f}",
            "pages": "{num_pages:,}",
            "MB": "{num_bytes:MB ,.0f}",
        },
        rows,
    )
