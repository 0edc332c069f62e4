"""The section on LoRA adapters. Knows the content of `results/adapters.json`."""

from __future__ import annotations

from collections.abc import Iterator

from .tables import Cell, Json, origin, table


def adapters(results: Json) -> Iterator[str]:
    """Yield the time of decode steps with LoRA adapters over that without, beside the same ratio of bytes."""
    yield "## What LoRA adapters cost"
    yield (
        "Decode steps of an artifact with room for adapters, over those of one without, in turns: the median ratio and "
        "its quartiles. A step reads weights, KV and the adapters of its rows; the ratio of these bytes would be the "
        "cost if only memory counted. GB/s are the adapters' bytes in the least time beyond the base's."
    )
    for name, run in results["runs"].items():
        yield f"### {name}: rank {run['rank']}, {run['num_rows']} rows after {run['num_past']} tokens"
        columns: dict[str, Cell] = {"": "{step}", "median, ms": "{median_s:ms .2f}", "least, ms": "{least_s:ms .2f}"}
        columns |= {"over base": "**{median:.2f}**", "quartiles": "{quartiles}", "bytes over base": "{bytes:.2f}"}
        columns |= {"weights and KV, MB": "{step_bytes:MB .1f}", "adapters, MB": "{adapter_bytes:MB .1f}"}
        columns["adapters, GB/s"] = "{rate}"
        yield table(columns, [_row(step, run) for step in run["steps"]])
        yield origin(run)


def _row(step: Json, run: Json) -> Json:
    """Return the row of a step: its fields, the quartiles of its time ratio, its ratio of bytes, and its read rate."""
    first, median, third = step["ratio"]
    beyond_s = step["least_s"] - run["steps"][0]["least_s"]
    has_rate = step["adapter_bytes"] > 0 and beyond_s > 0
    return step | {
        "median": median,
        "quartiles": f"{first:.2f}-{third:.2f}",
        "step_bytes": run["step_bytes"],
        "bytes": (run["step_bytes"] + step["adapter_bytes"]) / run["step_bytes"],
        "rate": f"{step['adapter_bytes'] / beyond_s / 1e9:.1f}" if has_rate else "",
    }
