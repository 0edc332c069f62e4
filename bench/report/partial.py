"""Sections on parts of prefixes: the loss of replies, and the reads from disk. Knows the contents of the JSON files."""

from __future__ import annotations

from collections.abc import Iterator

from .tables import Cell, Json, each, met, origin, table

MAX_SCORED = 1.1  # of a step's time, that learning may take

WORKLOADS = {
    "text": "a text, and later parts of it as queries",
    "nq": "passages of NQ-open, and questions about each",
    "tools": "schemas of functions, and requests for each",
    "bbh": "few-shot examples of BBH's tasks, and one more of each",
}


def quality(results: Json) -> Iterator[str]:
    """Yield the loss of reading a part of a prefix: for each model a table by policy and share of the rows."""
    runs = list(results["runs"].values())
    yield f"## A part of a prefix's KV: {WORKLOADS[runs[0]['workload']]}"
    yield (
        "KL(full || partial) over what truly follows, with twice the standard error over queries. History is the "
        "attention of the prefix's other queries; the hybrid, which ships, takes half by that and that of the prefix "
        "itself, or without the latter (`no pass`). Voting is IMPRESS's choice, and no layer falls back. With all rows "
        "every query gave the full prefix's logits to the last bit."
    )
    for run in runs:
        yield _heading(run)
        columns: dict[str, Cell] = {"rows": "{budget:.0%}", "chosen by": "{policy}", **_KL}
        columns |= {"top-1": "{agreement:.0%}"}
        columns |= {f"perplexity (full {run['rows'][0]['full_perplexity']:.4g})": "{perplexity:.4g}"}
        yield table(columns | {"attention dropped": "{dropped:.1%}"}, run["rows"])
        yield origin(run)


def needle(results: Json) -> Iterator[str]:
    """Yield for each model a table of the facts found in prefixes: a row for each policy and share of rows."""
    yield "## A part of a prefix's KV: a fact that was not asked for before"
    yield "A fact lies at some depth of a prefix; found is where every token of the answer is the most likely one."
    for run in results["runs"].values():
        rows = run["rows"]
        yield _heading(run)
        columns: dict[str, Cell] = {"rows": "{budget:.0%}", "chosen by": "{policy}"}
        columns[f"found (full {rows[0]['full_found']:.2f})"] = "{found:.2f}"
        columns["probability over full's"] = lambda row: f"{row['answered'] / row['full_answered']:.2f}"
        depths = list(rows[0]["found_by_depth"])
        columns |= each((f"found at {float(depth):.0%}" for depth in depths), "at", ":.2f")
        yield table(columns | _KL, [{**row, "at": [row["found_by_depth"][depth] for depth in depths]} for row in rows])
        yield origin(run)


def _heading(run: Json) -> str:
    """Return the heading of a run: its model, prefixes and queries."""
    return (
        f"### {run['model']}: {run['num_prefixes']} prefixes of {run['shortest_prefix']:,} to "
        f"{run['longest_prefix']:,} tokens, {run['rows'][0]['num_queries']} queries"
    )


def scored(results: Json) -> Iterator[str]:
    """Yield for each model a table of milliseconds of steps, with and without scoring the KV rows that they read."""
    yield "## What scores of KV rows cost"
    yield (
        "`forward_scored`, which adds up how much attention each KV row gets from the tokens that are scored when they "
        "are served, beside `forward`; medians of calls in turn. It is wanted to take at most "
        f"{MAX_SCORED:.2f} times as long."
    )
    for run in results["runs"].values():
        yield f"### {run['model']}, {run['calls']} calls"
        columns: dict[str, Cell] = {"step": "{step}", "forward, ms": "{forward_s:ms .2f}"}
        columns |= {"scored, ms": "{scored_s:ms .2f}", "scored over forward": "{scored_over_forward:.2f}"}
        yield table(columns | {"met": lambda row: met(row["scored_over_forward"] <= MAX_SCORED)}, run["rows"])
        yield origin(run)


def learned(results: Json) -> Iterator[str]:
    """Yield how much of the importance order stays as a prefix is queried, and the loss of reading a quarter by it."""
    passages, tasks = results["nq"], results["bbh"]
    yield "## What of a stored order outlives a restart"
    yield (
        f"{results['num_questions']} questions are asked of a prefix, and as many others: what stays of the first "
        "eighth of the order on disk, mean and least of all prefixes. KL is of "
        f"{tasks['rows'][0]['num_queries']} questions that are never asked, over {results['budget']:.0%} of the rows "
        "by that order and the probe, with twice the standard error; more is the difference to the order before, "
        f"question by question. NQ is one prefix of {passages['num_tokens'][0]:,} tokens; BBH are "
        f"{len(tasks['num_tokens'])} of {min(tasks['num_tokens']):,} to {max(tasks['num_tokens']):,}, "
        "whose questions are of other tasks."
    )
    columns: dict[str, Cell] = {
        "text": "{text}",
        "order": lambda row: _ORDERS[row["way"]],
        "stays": lambda row: f"{row['stays']:.1%} ({row['least']:.1%})" if "stays" in row else "",
        "KL, nats": lambda row: f"{row['kl']:.3f} ± {row['kl_error']:.3f}" if "kl" in row else "",
        "more": lambda row: f"{row['more']:+.3f} ± {row['more_error']:.3f}" if "kl" in row else "",
    }
    named = [{"text": text, **row} for text, run in (("NQ", passages), ("BBH", tasks)) for row in run["rows"]]
    yield table(columns, [row for row in named if row.keys() & {"stays", "kl"}])


_ORDERS = {
    "before nothing": "before, in one process",
    "nothing": "after, in one process",
    "before": "before a restart",
    "a restart": "after a restart",
    "a restart that forgets": "after a restart, scores not read back",
    "first+recent": "none: first and recent rows",
}


def amplification(results: Json) -> Iterator[str]:
    """Yield the bytes read for each share of the rows and text, and the bytes on disk."""
    yield "## Bytes read for each byte attended to"
    yield (
        f"KV of {results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to "
        f"{results['longest_prefix']:,} tokens: half of the rows by stored order, from the run, and half in pages that "
        "a look through the keys of one KV head finds, of which each layer is read by itself. Bytes are whole units of "
        "4 KiB. The first request reads all, with header, checksums and probe keys; later ones find these in memory, "
        "but for the header. Pages alone: the same rows without a run."
    )
    ratios: dict[str, Cell] = {"first": "{first:.2f}", "later": "{later:.2f}", "pages alone": "{pages:.2f}"}
    reads: dict[str, Cell] = {"reads, later": "{later_reads:,.0f}", "parts of pages": "{parts:.1%}"}
    yield table({"rows": "{budget:.0%}"} | ratios | reads, results["rows"])
    sizes: dict[str, Cell] = {"MB, first": "{first_bytes:MB .1f}", "MB, later": "{later_bytes:MB .1f}"}
    yield table(
        {"text, rows": "{name}, {budget:.0%}", "queries": "{num_queries}"} | ratios | sizes,
        [{"name": name, **row} for name, found in results["workloads"].items() for row in found],
    )
    space = results["rows"][0]["space"]
    yield f"Pages, runs and scores together take {space:.2f} times the bytes of pages alone on disk."


def chunk_cache(results: Json) -> Iterator[str]:
    """Yield hit ratios by trace, size of the cache and policy; the bytes read and the time for that."""
    yield "## What of ordered runs and their pages stays in memory"
    yield (
        f"The share of bytes that a cache of 5 to 50 % of {results['kv_bytes'] / 1e6:,.0f} MB of keys and values has "
        f"when they are wanted: {results['num_prefixes']} prefixes of {results['shortest_prefix']:,} to "
        f"{results['longest_prefix']:,} tokens, {results['num_requests']} requests, Zipf, of which three quarters "
        f"count; each wants {results['wanted_bytes'] / 1e6:.1f} MB, for a load of {results['budget']:.0%}. "
        f"Changing: every {results['change_after']} requests others are popular. What is worth least makes room: uses, "
        "times the share of attention or over the rank where it says so. The optimum knows the future."
    )
    lines: dict[str, dict[str, Json]] = {}
    for row in results["rows"]:
        lines.setdefault(f"{row['trace']}, {row['share']:.0%}", {})[row["policy"]] = row
    policies = list(next(iter(lines.values())))
    columns: dict[str, Cell] = {"requests, cache": "{name}"}
    rows = [{"name": name, "found": [found[policy] for policy in policies]} for name, found in lines.items()]
    yield table(columns | each(policies, "found", "[hit_ratio]:.1%"), rows)
    yield (
        "Read from disk for a request, and its first token, estimated: the disk's time and "
        f"{results['passes_s'] * 1e3:.0f} ms for the look and the prompt."
    )
    for policy in ("LRU", "LFU", "fading"):
        number = policies.index(policy)
        columns[f"{policy}: MB"] = f"{{found[{number}][disk_bytes]:MB .1f}}"
        for speed in (name for name in results["rows"][0] if name.startswith("ttft_s_")):
            columns[f"{policy}: s at {speed.removeprefix('ttft_s_')} MB/s"] = f"{{found[{number}][{speed}]:.2f}}"
    yield table(columns, rows)


def _ratio(row: Json) -> str:
    """Return the ratio, or an empty string in results from before ratios were kept."""
    return f"{row['kl_ratio']:.2f} ± {row['kl_ratio_error']:.2f}" if "kl_ratio" in row else ""


_KL: dict[str, Cell] = {"KL, nats": "{kl:.3f} ± {kl_error:.3f}", "of first+recent's": _ratio}
