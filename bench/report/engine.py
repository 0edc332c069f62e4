"""Sections on kernels, the engine and the cost of a request. Knows the contents of the JSON files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean

from ..engine import figures
from ..timing import Spread
from .tables import Cell, Json, auto, origin, spread, table

_OF_A_PROCESS = (figures.START, figures.MEMORY, figures.RESIDENT)
_LIMITS = {
    "read_gb_per_s": "memory read, GB/s",
    "integer_gop_per_s": "8-bit integer products with 4-bit weights, GOP/s",
    "integer8_gop_per_s": "8-bit integer products with 8-bit weights, GOP/s",
    "float_gflop_per_s": "float32 multiply-adds, GFLOP/s",
}
_CURVES = {
    "decode_s_by_context": "decode after so many tokens",
    "prefill_s_by_prompt": "prompt of so many tokens",
    "step_s_by_batch": "step of so many streams",
}


def engine(results: Json) -> Iterator[str]:
    """Yield the engine's speeds in prefill, decode and batches, with their shares of the machine's limits."""
    yield "## The engine"
    yield _limits(results)
    shares = results["shares"]
    rows = [
        {
            "title": f"{figure.title}, {figure.unit}",
            "value": spread(results["values"][figure.name]),
            "share": f"{Spread.of(shares[figure.name]).median:.0%}" if figure.name in shares else "",
        }
        for figure in (*figures.OF_AN_ENGINE, *_OF_A_PROCESS)
    ]
    yield table({"median (min-max)": "{title}", "radixlm": "{value}", "share of the limit": "{share}"}, rows)


def kernels(results: Json) -> Iterator[str]:
    """Yield kernels by size: speed in the unit that limits them, and the share of the limit."""
    yield "## Kernels"
    yield (
        f"Target {results['target']}. The share is the least time at the limits over the time taken; rows that come "
        "from caches may pass the bandwidth of memory."
    )
    yield _limits(results)
    by_kernel: dict[str, list[str]] = {}
    for result in results["kernels"]:
        is_compute = result["gop_per_s"] > 20 * result["gb_per_s"]  # about where memory stops being the limit
        speed = f"{auto(result['gop_per_s'])} GOP/s" if is_compute else f"{auto(result['gb_per_s'])} GB/s"
        cell = f"{result['size']}: {auto(result['seconds'] * 1e6)} µs, {speed}, **{result['share']:.0%}**"
        by_kernel.setdefault(result["kernel"], []).append(cell)
    rows = [{"kernel": kernel, "cells": "<br>".join(cells)} for kernel, cells in by_kernel.items()]
    yield table({"kernel": "`{kernel}`", "size: time, speed, share of the limit": "{cells}"}, rows)


def experts(results: Json) -> Iterator[str]:
    """Yield a step through experts: its bandwidth and memory's, and the time of choosing and summing experts."""
    yield "## Experts of gpt-oss's shapes"
    yield f"A token reads {results['active_bytes'] / 1e6:.0f} of {results['all_bytes'] / 1e6:.0f} MB."
    yield table(
        {
            "streams": "{streams}",
            "ms a step": "{seconds:ms auto}",
            "memory read in the same run, GB/s": "{read_gb_per_s:auto}",
            "share of it": lambda step: "" if step["share"] is None else f"{step['share']:.0%}",
            "routing": lambda step: f"{_routing(step['kernels']):.1%}",
        },
        results["steps"],
    )


def _routing(kernels: Sequence[Json]) -> float:
    """Return the share of the router's matrix, the choice, the sorting of rows and the sum of experts' outputs."""
    lists = ("find_units", "find_slabs", "spread_rows", "starts", "gather_rows")
    names = ("RouterSpec", "CombineSpec", *lists, "linear bf16 32x")
    return sum(float(kernel["share"]) for kernel in kernels if kernel["kernel"].startswith(names))


def growth(results: Json) -> Iterator[str]:
    """Yield the times of decoding by context, of prefill by prompt length, and of a step by concurrent requests."""
    yield "## How cost grows"
    for name, title in _CURVES.items():
        yield table(
            {
                title: "{size:,}",
                "ms": "{seconds:ms auto}",
                "µs each": lambda point: auto(point["seconds"] * 1e6 / point["size"]),
                "share of the limit": lambda point: f"{point['limit_s'] / point['seconds']:.0%}",
            },
            results[name],
        )


def long_context(results: Json) -> Iterator[str]:
    """Yield parts and decode steps after long contexts, and the first tokens of returning conversations."""
    yield "## Long contexts"
    yield (
        "Two layers of Qwen3-4B's shape in Q4_K_M (`q4b-2l`), where layers cost the same, one by one, and of "
        "gpt-oss-20b's, of which one has a sliding window of 128 tokens. Codes are random."
    )
    for name, run in results["runs"].items():
        computed_s, num_tokens = run["computed_s"], run["num_tokens"]
        yield (
            f"{name}: {run['token_bytes']:,} bytes of KV a token. Behind contexts of repeated pages, the "
            f"module alone, medians. A prompt of {num_tokens:,} tokens in such parts takes {computed_s:.0f} s."
        )
        yield table(
            {"tokens before": "{context:,}", "512 tokens, s": "{part_s:.2f}", "a token, ms": "{decode_s:ms auto}"},
            run["parts"],
        )
        yield "A fresh engine with that prompt in its store, none of it in the page cache, and then in its memory."
        titles = {
            "restarted": "after a restart",
            "second": "a second conversation with the same beginning",
            "edited": "one that was edited at nine tenths",
        }
        yield table(
            {
                "": "{title}",
                "tokens": "{prompt:,}",
                "from disk": "{from_disk:,}",
                "cached": "{cached:,}",
                "first token, s": "{first_token_s:.2f}",
                "of computing the prompt": "{share:.2%}",
                "decode, tokens/s": "{decode_tokens_per_s:.1f}",
            },
            [
                {"title": title, "share": run[key]["first_token_s"] / computed_s, **run[key]}
                for key, title in titles.items()
            ],
        )
        yield origin(run)


def scaling(results: Json) -> Iterator[str]:
    """Yield steps divided for more threads than the machine has: their limits, and an estimate of their speed."""
    yield "## An estimate for more threads"
    yield (
        "Each kernel is cut for so many threads, and its parts are timed one after another on one thread. Balance is "
        "the mean part over the longest one. An estimated step is what one thread computes alone, the longest part of "
        "each launch, and the launches; memory has to deliver the last column. A launch is taken to cost what one of "
        "two threads was measured to cost for each thread beyond the first, or the same for any number, or nothing. "
        "`radixlm bench` measures launches and bandwidth where there are so many cores."
    )
    for name, run in results["runs"].items():
        yield f"### {name}, {run['layers']} layers, {run['launch_us']:.2f} µs a launch of two threads"
        alone = {row["step"]: row for row in run["rows"] if row["num_threads"] == 1}
        rows = [_estimate_speedups(row, alone[row["step"]], run) for row in run["rows"] if row["num_threads"] > 1]
        columns: dict[str, Cell] = {"step": "{step}", "threads": "{num_threads}", "launches": "{num_launches}"}
        columns |= {"alone, ms": "{serial_s:ms .2f}", "balance": "{balance:.0%}", "times one thread": "{linear:.1f}"}
        columns |= {"launches of equal cost": "{equal:.1f}", "no cost": "{free:.1f}", "GB/s then": "{gb_per_s}"}
        yield table(columns, rows)
        yield origin(run)


def _estimate_speedups(row: Json, alone: Json, run: Json) -> Json:
    """Return a row with its balance, three estimated speedups over one thread, and the bandwidth that they need.

    The speedups differ in the cost of launches: growing with the threads (`linear`), the same for any number (`equal`),
    or none (`free`).
    """
    launches_s = row["num_launches"] * run["launch_us"] / 1e6
    least_s = row["serial_s"] + row["longest_s"]
    one_s = alone["serial_s"] + alone["parts_s"]
    is_decode = row["step"].startswith("decode:1:")
    return row | {
        "balance": row["parts_s"] / row["num_threads"] / row["longest_s"],
        "linear": one_s / (least_s + launches_s * (row["num_threads"] - 1)),
        "equal": one_s / (least_s + launches_s),
        "free": one_s / least_s,
        "gb_per_s": f"{run['token_bytes'] / least_s / 1e9:.0f}" if is_decode else "",
    }


def quality(results: Json) -> Iterator[str]:
    """Yield the distance to transformers by the format of keys and values."""
    yield "## Distributions beside transformers'"
    yield (
        "KL(transformers || ours) in nats, transformers running the file's weights in float32, and the share of "
        "positions with the same most likely token. The ratio is to llama.cpp's KL on the same file, with 95 % of "
        "paired bootstraps. SmolLM2 has Q4_1. Gemma's positions are behind 500 others, in one prompt of 1,500 tokens."
    )
    columns: dict[str, Cell] = {"model": "{model}", "keys and values": "{kv_dtype}", "positions": "{positions:,}"}
    columns |= {"mean KL": "{mean_kl_nats:.5f}", "llama.cpp's mean KL": "{llama_cpp_mean_kl_nats:.5f}"}
    columns["times llama.cpp's"] = "{ratio[1]:.2f} ({ratio[0]:.2f}-{ratio[2]:.2f})"
    columns |= {"same top-1": "{top1_agreement:.1%}", "llama.cpp's": "{llama_cpp_top1_agreement:.1%}"}
    yield table(columns, results["rows"])


def request_cost(results: Json) -> Iterator[str]:
    """Yield milliseconds of each way, and how much longer that is than the engine alone takes."""
    yield "## What a request costs beyond the engine"
    yield (
        f"One token of a prompt that is cached, medians of {results['requests']} requests each way (8 at once: of each "
        "client), in turns: `Engine.generate` in one process, `radixlm serve` in another, asked by `http.client` on a "
        "connection that is kept open, or on a new one each time, and by the `openai` package if it was there."
    )
    medians = results["median_ms"]

    def beyond(row: Json) -> str:
        if row["name"].startswith(("engine", "models")):
            return ""
        return f"{row['ms'] - medians['engine, 8 at once' if 'at once' in row['name'] else 'engine']:.2f}"

    rows = [{"name": name, "ms": milliseconds} for name, milliseconds in medians.items()]
    yield table({"": "{name}", "ms": "{ms:.2f}", "beyond the engine, ms": beyond}, rows)


def speculation(results: Json) -> Iterator[str]:
    """Yield tokens per second with drafts divided by those without, task by task."""
    yield "## Speculative decoding"
    yield (
        "Tokens a second of replies after the first token, with drafts (`--speculate auto`) and without, one "
        "after the other in each round; the ratio is of one round. Ours had the same tokens both ways."
    )
    for run in results["runs"].values():
        yield f"### {run['model']}"
        rows = [
            {
                "task": name,
                "plain": spread(each["plain_per_s"] for each in rounds),
                "drafting": spread(each["drafting_per_s"] for each in rounds),
                "times": spread(each["drafting_per_s"] / each["plain_per_s"] for each in rounds),
                "num_tokens": auto(Spread.of(each["num_tokens"] for each in rounds).median),
                "drafted": sum(each["drafted"] for each in rounds),
                "accepted": sum(each["accepted"] for each in rounds),
                "same": "yes" if all(each.get("is_same", True) for each in rounds) else "**no**",
            }
            for name, rounds in run["tasks"].items()
        ]
        columns: dict[str, Cell] = {"": "{task}", "tokens": "{num_tokens}", "without": "{plain}", "with": "{drafting}"}
        columns |= {"times": "**{times}**", "draft tokens": "{drafted}", "accepted": "{accepted}"}
        yield table(columns | {"same text": "{same}"}, rows)
        for name, rounds in run["tasks"].items():
            if len(rounds) >= 5:
                ratios = [each["drafting_per_s"] / each["plain_per_s"] for each in rounds]
                bound = lower_bound(ratios)
                yield f"{name}: {len(rounds)} pairs, and the lower 95 % bound of their mean ratio is {bound:.2f}."
        yield origin(run)


def lower_bound(ratios: Sequence[float]) -> float:
    """Return the lower 95 % bound of their mean, by ten thousand samples of themselves."""
    chance = random.Random(1)
    means = sorted(fmean(chance.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return means[500]


def _limits(results: Json) -> str:
    """Return a table of the machine's measured limits, such as bandwidth, with all threads and with one."""
    found = results["limits"]
    rows = [
        {"title": title, "all": found[name], "one": found[f"{name}_thread"]}
        for name, title in _LIMITS.items()
        if name in found  # results of earlier runs lack some
    ]
    return table({"limit": "{title}", f"{found['num_threads']} threads": "{all:auto}", "1 thread": "{one:auto}"}, rows)


def hybrid(results: Json) -> Iterator[str]:
    """Yield the decode and prefill speed of a model with recurrent states, compared with llama.cpp."""
    yield "## A model that keeps states"
    yield (
        f"{results['model']}'s shape with random weights in 4 bits, medians of {results['num_rounds']} rounds: decode "
        f"{results['decode']:.1f} tokens/s, which read {results['weights_bytes'] / 1e6:.0f} MB of weights a token, and "
        f"read and write {results['state_bytes'] / 1e6:.1f} MB of state, at {results['share']:.0%} of the bandwidth "
        f"that was measured around it (bar 70%); prompts of 512 {results['prefill']:.0f} tokens/s."
    )
    if peer := results.get("peer"):
        times = {name: results[name] / peer[name] for name in ("prefill", "decode")}
        yield (
            "llama.cpp, natively built, by its own bench with the same file in turns: prompts "
            f"{peer['prefill']:.0f}, so that ours are **{times['prefill']:.2f}** times as fast (bar 3), "
            f"decode {peer['decode']:.1f} (**{times['decode']:.2f}** times)."
        )
    else:
        yield "llama.cpp: not measured."
