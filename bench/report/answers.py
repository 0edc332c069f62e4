"""Sections on questions that are answered over parts of prefixes. Knows the contents of the JSON files."""

from __future__ import annotations

from collections.abc import Iterator

from .tables import Cell, Json, each, origin, table

_SETS = {
    "nq": "questions about passages of NQ-open",
    "booleans": "boolean expressions of BBH's kind",
    "brackets": "brackets to be closed, of BBH's kind",
    "calls": "BFCL's simple calls, with its answers",
    "needles": "facts in a text, each asked for once",
}
_SCORES = {"exact": "exact match", "f1": "F1", "named": "right function"}
_BUDGETS = (0.1, 0.25, 0.5, 0.75)


def answers(results: Json) -> Iterator[str]:
    """Yield a section for each model and set of questions: scores by the way rows are chosen, and by their share."""
    yield "## Answers over a part of a prefix"
    yield (
        "Replies of the most likely tokens over a share of the prefix's rows, judged by a program: the mean score, and "
        "in brackets the 95 % interval of its ratio to that over the whole prefix (bootstrap over questions, in "
        "pairs). The bar is a lower end of 0.92. `hybrid` is what ships. `voting` is IMPRESS's choice, and the share "
        "of layers in which its probed heads disagree so much that IMPRESS loads the layer whole; here it never does."
    )
    for run in results["runs"].values():
        yield from _scores_of_run(run)


def lm_eval(results: Json) -> Iterator[str]:
    """Yield the harness's scores of each model: a row for each weight and KV type, and each share of a prefix."""
    yield "## What lm-evaluation-harness scores"
    yield (
        "The harness as it is, by the server's URL. Perplexity a word of passages of Shakespeare; exact match of "
        "boolean expressions of BBH's kind; exact match and F1 of questions about passages of NQ-open. Shares of "
        "prefixes are read from disk after a restart, by other questions than were asked before it, whatever the "
        "calibration thinks of them and also where all of a prefix would be there as quickly; `radixlm serve` reads it "
        "whole then, and scores as with 100 %. Where no request was served by a part, the scores are left out."
    )
    for run in results["runs"].values():
        yield f"### {run['model']}, {run['documents']} documents of a task at most"
        columns: dict[str, Cell] = {
            "way": "{way}",
            "perplexity": lambda row: _score(row, "text word_perplexity", "{:.1f}"),
            "booleans": lambda row: _score(row, "booleans exact", "{:.1%}"),
            "NQ, exact": lambda row: _score(row, "nq exact", "{:.1%}"),
            "NQ, F1": lambda row: _score(row, "nq f1", "{:.1%}"),
            "served by a part": _in_part,
        }
        yield table(columns, run["rows"])
        yield origin(run)


def _score(row: Json, name: str, form: str) -> str:
    return form.format(row["scores"][name]) if name in row["scores"] and not _is_no_share(row) else ""


def _in_part(row: Json) -> str:
    """Return a cell: how many replies were made from a part of a prefix."""
    if _is_no_share(row):
        return "none was served in part"
    return f"{row['in_part']:,}" if "in_part" in row else ""


def _is_no_share(row: Json) -> bool:
    """Return whether a share below 100 % was allowed and never read: its scores are those of whole prefixes."""
    return row.get("in_part") == 0 and not row["way"].startswith("100%")


def baselines(results: Json) -> Iterator[str]:
    """Yield tables that compare ways to choose a quarter of a prefix, and what each step of ours adds, by model."""
    yield "## A quarter of a prefix beside what others do"
    for run in results["runs"].values():
        yield f"### {run['model']}: {run['num_heads']} heads, {run['num_kv_heads']} KV heads"
        yield (
            f"{run['num_prefixes']} prefixes of {run['shortest_prefix']:,} to {run['longest_prefix']:,} tokens of "
            f"NQ-open, BFCL and BBH; KL is over {run['num_own']} queries, hits and bytes over 300 requests of a Zipf "
            "trace whose favourites stay, with a cache of a quarter of all keys and values (in brackets: favourites "
            "change every 100 requests). First tokens are estimated, at 50 MB/s and SmolLM2's speed. In "
            f"{run['falls_back']:.0%} of the layers IMPRESS's heads agree too little, and it loads them whole."
        )
        for title in ("rows", "ablation"):
            yield table(_BASELINE_COLUMNS, _baseline_rows(run, title))
        yield origin(run)


_BASELINE_COLUMNS: dict[str, Cell] = {
    "way": "{way}",
    "KL, nats": "{kl}",
    "wanted, MB": "{wanted_bytes:MB .1f}",
    "from disk, MB": "{disk_bytes:MB .1f}",
    "hits in memory": "{hit_ratio:.0%} ({other[hit_ratio]:.0%})",
    "first token, p50": "{p50_s_50:ms ,.0f} ms ({other[p50_s_50]:ms ,.0f})",
    "p99": "{p99_s_50:ms ,.0f} ms",
}
_SELECTED = {
    "full load, LRU": "0",
    "recompute": "0",
    "ours": "hybrid",
    "voting, never falls back": "voting",
    "voting, falls back": "voting, falls back",
    "a quarter by earlier queries, in text": "known",
    "+ order: ranked on disk": "known",
    "+ selection: half by a probe": "hybrid",
    "+ cache: fading uses": "hybrid",
}


def _baseline_rows(run: Json, title: str) -> Iterator[Json]:
    """Yield rows with a cache of a quarter, of the steady trace and the changing one."""
    steady, other = (
        {row["way"]: row for row in run[title] if row["cache"] == 0.25 and row["changes"] == changes}
        for changes in (False, True)
    )
    for way, row in steady.items():
        name = _SELECTED.get(way, way.partition(",")[0])
        kl = run["kl"].get(name)
        unknown = name if name == "0" else "not measured"
        yield {**row, "other": other[way], "kl": unknown if kl is None else f"{kl[0]:.3f} ± {kl[1]:.3f}"}


def _scores_of_run(run: Json) -> Iterator[str]:
    """Yield the section of one run: mean scores by the way rows are chosen, and by the share of rows that is read."""
    [full] = [row for row in run["rows"] if row["way"] == "full"]
    ways: dict[str, dict[float, Json]] = {}
    for row in run["rows"]:
        if row is not full:
            ways.setdefault(row["way"], {})[row["budget"]] = row
    names = [name for name in _SCORES if name in full]
    whole = ", ".join(f"{_SCORES[name]} {full[name]:.3f}" for name in names)
    yield f"### {run['model']}: {_SETS[run['set']]}"
    yield (
        f"{run['num_questions']} questions behind prefixes of {run['shortest_prefix']:,} to {run['longest_prefix']:,} "
        f"tokens. The whole prefix: {whole}; lower end {run['full_low']:.3f}, "
        + (
            f"above chance ({run['chance']:g})."
            if run["is_above_chance"]
            else f"**not above chance ({run['chance']:g})**."
        )
        + " "
        + "; ".join(f"{way} holds the bar {_least(least)}" for way, least in run["least"].items())
        + "."
    )
    main = run["score"]
    columns: dict[str, Cell] = {"chosen by": "{way}", **each((f"{budget:.0%}" for budget in _BUDGETS), "cells")}
    rows = [
        {"way": f"{way}, {_SCORES[main]}", "cells": [_cell(found.get(budget), main) for budget in _BUDGETS]}
        for way, found in ways.items()
    ]
    others = [name for name in names if name != main]
    rows += [
        {
            "way": f"{way}, {_SCORES[name]}",
            "cells": [f"{found[budget][name]:.3f}" if budget in found else "" for budget in _BUDGETS],
        }
        for name in others
        for way, found in ways.items()
    ]
    rows += [
        {
            "way": f"{way}, layers that fall back",
            "cells": [f"{found[budget]['falls_back']:.0%}" if budget in found else "" for budget in _BUDGETS],
        }
        for way, found in ways.items()
        if "falls_back" in next(iter(found.values()))
    ]
    yield table(columns, rows)
    if older := {row["way"]: row["commit"] for row in run["rows"] if "commit" in row}:
        yield f"Of commit {', '.join(dict.fromkeys(older.values()))}: {', '.join(older)}."
    yield origin(run)


def _cell(row: Json | None, main: str) -> str:
    return "" if row is None else f"{row[main]:.3f} ({row['low']:.2f} to {row['high']:.2f})"


def _least(least: float) -> str:
    return f"down to {least:.0%}" if least < 1 else "at no share that was tried"
