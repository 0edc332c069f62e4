"""The section on other engines: each figure of each, the best peer by name, and how many times better ours is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ..engine.figures import Figure
from ..peers.scenarios import FIGURES, STREAMS_8_STEADY, STREAMS_50_STEADY
from .tables import Cell, Json, auto, each, origin, spread, table

OURS = "radixlm"
STEADY = (STREAMS_8_STEADY, STREAMS_50_STEADY)


class Best(NamedTuple):
    """The peer that is best in a row, its median, and how many times better ours is: less than 1 where it is ahead."""

    name: str
    value: float
    times: float


def best_of(values: Mapping[str, Mapping[str, Sequence[float]]], figure: Figure) -> Best | None:
    """The best peer in a figure, by medians; None if none or ours was not measured."""
    medians = {name: median(found[figure.name]) for name, found in values.items() if found.get(figure.name)}
    ours = medians.pop(OURS, None)
    if ours is None or not medians:
        return None
    name = (max if figure.higher_is_better else min)(medians, key=lambda name: medians[name])
    return Best(name, medians[name], figure.gain(ours, medians[name]))


def peers(results: Json) -> Iterator[str]:
    """All figures, model by model."""
    yield "## Beside other engines"
    yield (
        "One client asks all: streamed requests over HTTP, random prompts that share nothing unless the row says "
        "so, replies of fixed lengths. In every round one engine after the other has all processors; medians, "
        "with least and most. llama.cpp is built for the machine, or for the target's instructions; its wheel is "
        "`xllamacpp`, as pip gives it; "
        "Q4_0 is what its own tool made of the file. ik_llama.cpp decodes single streams with weights that it "
        "repacks. OpenVINO GenAI has continuous batching and a front of ours (`bench/peers/openvino_server.py`), "
        "on weights that its own tools made of the file's; vLLM has these in bfloat16. Total speeds include the "
        "prompts, steady ones do not. Memory is that of all its processes, mapped files included. Times more than "
        "1 say that radixlm is better than the best peer of that row."
    )
    for run in results["runs"].values():
        values = run["values"]
        names = [name for name in values if any(values[name].values())]
        target = run.get("target", "x86-64-v4-vnni")  # older runs had the machine's
        yield f"### {run['model']}, {target}"
        yield f"{run['threads']} threads for each."
        for name, why in sorted(run["missing"].items()):
            yield f"Not measured: {name} ({why})."
        for name in names:
            if lacking := [figure.title for figure in STEADY if _never_together(values[name], figure)]:
                yield f"No figure: {name}: {', '.join(lacking)} (its streams never ran all together)."
        rows = [
            {
                "title": f"{figure.title}, {figure.unit}",
                "values": [_cell(values[name].get(figure.name)) for name in names],
                "best": "" if best is None else f"{best.name}, {auto(best.value)}",
                "times": "" if best is None else f"**{best.times:.2f}**",
            }
            for figure in FIGURES
            for best in [best_of(values, figure)]
        ]
        rounds = {"title": "rounds", "values": [_rounds(values[name]) for name in names], "best": "", "times": ""}
        columns: dict[str, Cell] = {"median (least-most)": "{title}"}
        columns |= each(names, "values") | {"best peer": "{best}", "times the best": "{times}"}
        yield table(columns, [rounds, *rows])
        if (share := run["decode_bandwidth_share"]) is not None:
            yield (
                f"Decode reads {run['decode_bytes_per_token'] / 1e6:.1f} MB of weights a token, {share:.0%} of the "
                "bandwidth that was measured in the same round, right before and after."
            )
        yield origin(run)
        if earlier := [f"{made['commit']} ({made['date']})" for made in run.get("earlier", ())]:
            yield f"Rounds before it: {', '.join(earlier)}."


def _never_together(found: Mapping[str, Sequence[float]], steady: Figure) -> bool:
    """Whether streams have a total in some round, and in none a steady speed."""
    return bool(found.get(steady.name.removesuffix("_steady"))) and not found.get(steady.name)


def _rounds(found: Mapping[str, Sequence[float]]) -> str:
    """In how many rounds figures were measured: of some in fewer than of others."""
    counts = {len(found[figure.name]) for figure in FIGURES if found.get(figure.name)}
    return "-".join(str(count) for count in sorted({min(counts), max(counts)}))


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    return spread(values) if len(values) > 1 else auto(values[0])
