"""Sections on servers under load. Knows the contents of the JSON files, not how they were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .tables import Cell, Json, auto, each, format_cell, met, origin, spread, table

SANE = "yes"  # a reader's mark of a reply that has no fault


def ladder(results: Json) -> Iterator[str]:
    """Yield the section on growing numbers of concurrent requests, with a table for each run.

    It has the throughput, the latencies, the preemptions and the failures of each number.
    """
    yield "## More and more streams against a small pool"
    yield (
        "`radixlm serve` with its defaults and a small KV pool; each stream sends its next chat when its last reply "
        "has ended, over a connection that it keeps open. Prompts are distinct words and share no more than the "
        "template's beginning; replies have a fixed length. The last row is the run of llmperf after which mlc-llm "
        "#2766 reports a crash. Pages free: after the last reply, when the cache was emptied, too."
    )
    for run in results["runs"].values():
        columns: dict[str, Cell] = {
            run["name"]: "{name}",
            "requests": "{num_requests:,}",
            "tokens, prompt + reply": "{mean_prompt_tokens:.0f} + {num_reply_tokens}",
            "pool": "{pool_tokens:,}",
            "tokens/s": "{tokens_per_s:,.0f}",
            "first token, p50 / p99": "{first_token_s[p50]:ms ,.0f} ms / {first_token_s[p99]:ms ,.0f} ms",
            "between tokens, p50 / p99": "{between_tokens_s[p50]:ms ,.0f} ms / {between_tokens_s[p99]:ms ,.0f} ms",
            "preemptions": "{num_preemptions:,}",
            "failures": lambda rung: f"**{rung['num_failures']}**" if rung["num_failures"] else "none",
            "pages free": _pages_free,
        }
        yield table(columns, run["rungs"])
        yield origin(run)


def load(results: Json) -> Iterator[str]:
    """Yield a column for each run: the outcomes of requests, the speed, and the faults afterwards."""
    yield "## Impatient clients"
    yield (
        "A real server with a KV pool far too small for its clients, which ask for random prompts with random "
        "sampling, go on with conversations, leave in the middle, and send what must be refused. Survivors, drawn at "
        "random, are computed again from the ids that were used, alone on a fresh engine: ids, text, logprobs and "
        "finish reason must be the same to the last bit. Memory is what no file holds, from 30 % of the time on. "
        "`qwen2` has the shapes and the tokenizer of Qwen2-0.5B, 4 of its 24 layers and random weights "
        "(`python -m bench.load.model`)."
    )
    runs = {f"{run['model']}, {run['num_streams']} streams": run for run in results["runs"].values()}
    cells = each(runs, "cells")
    found = {title: [format_cell(cell, run) for run in runs.values()] for title, cell in _LOAD_ROWS.items()}
    yield table({"": "{title}"} | cells, [{"title": title, "cells": cells} for title, cells in found.items()])
    kinds = sorted({kind for run in runs.values() for kind in run["refused"]})
    rows = [{"kind": kind, "cells": [f"{run['refused'].get(kind, 0):,}" for run in runs.values()]} for kind in kinds]
    yield table({"status and reason": "{kind}"} | cells, rows)
    yield "  \n".join(
        f"{name}: `{run['origin']['command']}`, commit {run['origin']['commit']}, {run['origin']['date']}."
        for name, run in runs.items()
    )


def first_reply(results: Json) -> Iterator[str]:
    """Yield a row for each question with a reader's marks of both replies, and how many were sane."""
    yield "## The first reply of a small model"
    yield (
        "Twenty questions to SmolLM2-135M in Q4_1, each once with a seed of its own. All but the limit of "
        f"{results['max_tokens']} tokens is what the servers do by default. Replies were read without their names. A "
        "reply is sane if it has whole sentences, no invented words and no broken text, be it right or wrong. The "
        "replies are in `bench/results/first_reply.json`."
    )
    rows = results["rows"]
    names = list(rows[0]["replies"])
    cells = each(names, "cells")
    marks = [{"title": row["question"], "cells": [row["marks"].get(name, "") for name in names]} for row in rows]
    counts = [f"{sum(row['marks'].get(name) == SANE for row in rows)} of {len(rows)}" for name in names]
    yield table({"sane": "{title}"} | cells, [*marks, {"title": "**sane in all**", "cells": counts}])


def questions(results: Json) -> Iterator[str]:
    """Yield a row for each question: seconds of both, and how many times faster."""
    yield "## A coding agent's first and second question"
    yield (
        "The requests that opencode sends, to Qwen2.5-Coder-0.5B in Q4_K_M: for a title, with its instructions and "
        "tools, and with the second question behind the first reply. Replies have "
        f"{results['num_reply_tokens']} tokens. Fresh servers with their defaults, in turns; medians of the rounds, "
        "and their range. Cached tokens are those of the last round."
    )

    def cached(name: str) -> Cell:
        return lambda row: "{num_cached_tokens:,} of {num_prompt_tokens:,}".format(**row["tokens"][name])

    columns: dict[str, Cell] = {
        "question": "{number}",
        "radixlm, s": lambda row: spread(row["seconds"]["radixlm"]),
        "llama.cpp, s": lambda row: spread(row["seconds"]["llama.cpp"]),
        "times as fast": lambda row: spread(row["ratios"]),
        "bar": lambda row: f"{row['bar']}: {met(row['is_met'])}",
        "radixlm, cached": cached("radixlm"),
        "llama.cpp, cached": cached("llama.cpp"),
    }
    yield table(columns, [{"number": number, **row} for number, row in enumerate(results["rows"], 1)])


def long_prompt(results: Json) -> Iterator[str]:
    """Yield for each artifact a row for each requirement, and the measurements of the rounds."""
    yield "## A prompt of 16,000 tokens"
    yield (
        "Qwen2.5-Coder-0.5B in Q4_K_M. A fresh server with its defaults gets a long prompt of random ids alone, and "
        "another one beside a stream and, every five seconds, a prompt of 100 tokens. llama.cpp, with flash attention, "
        "gets the first one, too. The longest gap is between two tokens of the stream while the long prompt is "
        "computed."
    )
    for name, run in results["runs"].items():
        bars: dict[str, Cell] = {f"{name}, {run['num_tokens']:,} tokens": "{name}", "measured": "{value:auto}"}
        yield table(bars | {"bar": lambda row: f"{row['bar']:g}: {met(row['is_met'])}"}, run["bars"])
        rounds: dict[str, Cell] = {
            "alone, s": "{long_alone_s:auto}",
            "beside, s": "{long_beside_s:auto}",
            "llama.cpp alone, s": lambda row: "-" if row["peer_alone_s"] is None else auto(row["peer_alone_s"]),
            "stream alone, tok/s": "{stream_alone:auto}",
            "stream beside, tok/s": "{stream_beside:auto}",
            "longest gap, s": "{stream_gap_s:auto}",
            "first tokens of short ones, s": lambda row: spread(row["short_s"]),
        }
        yield table(rounds, run["rounds"])
        yield origin(run)


def _pages_free(rung: Json) -> str:
    free, pages = rung["num_free_pages"], rung["num_pages"]
    return f"{free:,} of {pages:,}" if free == pages else f"**{free:,} of {pages:,}**"


def _percentiles_cell(name: str) -> Cell:
    """Return a cell that shows the p50 and p99 of the field `name`, in seconds or milliseconds."""

    def cell(run: Json) -> str:
        times = [run[name][share] for share in ("p50", "p99")]
        return " / ".join(f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms" for seconds in times)

    return cell


def _survivors(run: Json) -> str:
    same = run["num_compared"] - run["num_different_survivors"]
    return f"{same} of {run['num_compared']} ({run['num_greedy_compared']} greedy)"


def _memory(run: Json) -> str:
    warm, end, slope = (run["memory"][name] / 2**20 for name in ("warm_bytes", "end_bytes", "bytes_per_s"))
    return f"{warm:.1f} → {end:.1f}, {slope * 60:+.2f} a minute"


def _wrong(run: Json) -> str:
    count = run["num_faults"] + run["num_hung"] + run["num_failed"]
    return "none" if not count else f"**{count}**"


_LOAD_ROWS: Mapping[str, Cell] = {
    "seconds": "{seconds:.0f}",
    "KV pool, tokens": lambda run: f"{run['num_pages'] * 16:,}",
    "answered": lambda run: f"{sum(run['answered'].values()):,}",
    "refused as they should be": lambda run: f"{sum(run['refused'].values()):,}",
    "of them for a full queue": lambda run: f"{run['refused'].get('429 queue full', 0):,}",
    "clients that left": lambda run: f"{sum(run['left'].values()):,}",
    "of them in mid-stream": lambda run: f"{run['left'].get('leave in mid-stream', 0):,}",
    "wrong, failed or hung": _wrong,
    "survivors the same alone": _survivors,
    "preemptions": "{num_preemptions:,}",
    "evicted pages": "{num_evicted_pages:,}",
    "lost pages": lambda run: str(sum(run["leaks"].values())),
    "tokens a second": "{tokens_per_s:.0f}",
    "prompt tokens from the cache": "{cached_share:.0%}",
    "first token, p50 / p99": _percentiles_cell("first_token_s"),
    "between tokens, p50 / p99": _percentiles_cell("between_tokens_s"),
    "`/health`, p50 / p99": _percentiles_cell("health_s"),
    "memory warm → end, MiB": _memory,
    "all held": lambda run: "yes" if run["is_met"] else "**no**",
}
