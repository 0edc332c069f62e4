"""The section on other engines: each figure of each, the best peer by name, and how many times better ours is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from ..engine.figures import Figure
from ..peers.scenarios import FIGURES, REQUESTS_8_STEADY, SIZE_FIGURES, STREAMS_8_STEADY, STREAMS_50_STEADY
from .tables import Cell, Json, auto, each, origin, spread, table

OURS = "radixlm"
STEADY = (STREAMS_8_STEADY, STREAMS_50_STEADY, REQUESTS_8_STEADY)
PREFILL, DECODE = "prefill", "decode"  # prefixes of the names of figures that depend on layers, and on bytes


class Best(NamedTuple):
    """The peer that is best in a row, its median, and how many times better ours is: less than 1 where it is ahead."""

    name: str
    value: float
    times: float


def best_of(values: Mapping[str, Mapping[str, Sequence[float]]], figure: Figure) -> Best | None:
    """Return the best peer in a figure, by medians; None if none or ours was not measured."""
    medians = {name: median(found[figure.name]) for name, found in values.items() if found.get(figure.name)}
    ours = medians.pop(OURS, None)
    if ours is None or not medians:
        return None
    name = (max if figure.higher_is_better else min)(medians, key=lambda name: medians[name])
    return Best(name, medians[name], figure.gain(ours, medians[name]))


def sizes(results: Json) -> Iterator[str]:
    """Yield all figures, shape by shape; for models with fewer layers, also those of the whole."""
    yield "## Sizes that people run"
    yield (
        "The shapes and types of published models, with random weights (`bench/peers/shapes.py`). One client asks all "
        "engines: streamed requests over HTTP, random prompts that share nothing, replies of fixed lengths, drawn "
        "greedily, radixlm without speculation. In every round each engine has the machine to itself for a turn, with "
        "one setting for all rows: llama.cpp and ik_llama.cpp with flash attention, the latter with weights repacked "
        "at load (`-rtr`). Medians, with least and most. Total speeds include the prompts. A core taken: another "
        "process loops on one of the processors. The first start has nothing of an earlier one, and the file out of "
        "the page cache; ours compiles the model and its kernels. Memory includes mapped files. Times more than 1 say "
        "that radixlm is better than the best peer of that row. Where a model has fewer layers than the real one, the "
        "last columns are what the whole would do: prompts take time by layers, decode by bytes of weights that a "
        "token reads."
    )
    for run in results["runs"].values():
        have, whole = run["layers"]
        yield from _section_of(run, SIZE_FIGURES, f"{run['model']}: {have} of {whole} layers, {run['target']}")


def _scaled(run: Json, figure: Figure, value: float | None) -> str:
    """Return the whole model's figure from that of some layers, or an empty string if it does not scale with them."""
    have, whole = run["layers"]
    scale = {PREFILL: whole / have, DECODE: run["decode_scale"]}.get(
        figure.name.removeprefix("busy_").partition("_")[0]
    )
    return "" if value is None or scale is None else f"~{auto(value / scale)}"


def peers(results: Json) -> Iterator[str]:
    """Yield a section for each model: every figure of all engines, and the best peer."""
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
        # older runs had the machine's
        yield from _section_of(run, FIGURES, f"{run['model']}, {run.get('target', 'x86-64-v4-vnni')}")


def _section_of(run: Json, figures: Sequence[Figure], title: str) -> Iterator[str]:
    """Yield the section of one model: a row for each figure, a column for each engine, and the best peer."""
    values = run["values"]
    names = [name for name in values if any(values[name].values())]
    yield f"### {title}"
    yield f"{run['threads']} threads for each."
    for name, why in sorted(run["missing"].items()):
        yield f"Not measured: {name} ({why})."
    for name in names:
        if lacking := [
            figure.title for figure in figures if figure in STEADY and _never_together(values[name], figure)
        ]:
            yield f"No figure: {name}: {', '.join(lacking)} (its streams never ran all together)."
    bests = {figure: best_of(values, figure) for figure in figures}
    rows = [
        {
            "title": f"{figure.title}, {figure.unit}",
            "values": [_cell(values[name].get(figure.name)) for name in names],
            "best": "" if best is None else f"{best.name}, {auto(best.value)}",
            "times": "" if best is None else f"**{best.times:.2f}**",
        }
        for figure, best in bests.items()
    ]
    rounds = {"title": "rounds", "values": [_rounds(values[name], figures) for name in names], "best": "", "times": ""}
    columns: dict[str, Cell] = {"median (least-most)": "{title}"}
    columns |= each(names, "values") | {"best peer": "{best}", "times the best": "{times}"}
    if "layers" in run and run["layers"][0] < run["layers"][1]:
        for row, (figure, best) in zip((rounds, *rows), ((None, None), *bests.items()), strict=True):
            ours = values[OURS].get(figure.name) if figure else None
            row["whole"] = _scaled(run, figure, median(ours)) if figure and ours else ""
            row["whole_best"] = _scaled(run, figure, best.value) if figure and best else ""
        columns |= {f"all {run['layers'][1]} layers, scaled": "{whole}", "the best peer's, scaled": "{whole_best}"}
    yield table(columns, [rounds, *rows])
    if (share := run["decode_bandwidth_share"]) is not None:
        yield (
            f"Decode reads {run['decode_bytes_per_token'] / 1e6:,.1f} MB of weights a token, {share:.0%} of the "
            "bandwidth that was measured in the same round, right before and after."
        )
    yield origin(run)


def _never_together(found: Mapping[str, Sequence[float]], steady: Figure) -> bool:
    """Return whether streams have a total in some round, and in none a steady speed."""
    return bool(found.get(steady.name.removesuffix("_steady"))) and not found.get(steady.name)


def _rounds(found: Mapping[str, Sequence[float]], figures: Sequence[Figure]) -> str:
    """Return in how many rounds figures were measured, as a range."""
    counts = {len(found[figure.name]) for figure in figures if found.get(figure.name)}
    return "-".join(str(count) for count in sorted({min(counts), max(counts)}))


def _cell(values: Sequence[float] | None) -> str:
    """Return the median and spread of the rounds' values; the value of a single round; `-` if there is none."""
    if not values:
        return "-"
    return spread(values) if len(values) > 1 else auto(values[0])


def vectors(results: Json) -> Iterator[str]:
    """Seconds and tokens a second of each request, beside llama.cpp's."""
    yield "## Embeddings and rerank"
    yield (
        "Both servers read the same file in Q8_0 with random weights. An embedding request has 32 texts of 200 tokens. "
        "A rerank request has 50 documents of 200 tokens, whose prompts share a head of 300. Tokens a second count the "
        "texts and documents alone. Medians, with least and most; texts are new in each round."
    )
    rows = [{"name": name, **run} for name, run in results["runs"].items()]
    columns: dict[str, Cell] = {"request": "{name}"}
    for engine in (OURS, "llama.cpp"):
        columns |= {f"{engine}, s": partial(_seconds, engine), f"{engine}, tok/s": partial(_speed, engine)}
    columns["times llama.cpp"] = lambda row: f"**{_median(row, 'llama.cpp') / _median(row, OURS):.2f}**"
    yield table(columns, rows)
    yield from (origin(run) for run in results["runs"].values())


def _median(row: Json, engine: str) -> float:
    found: float = median(row["values"][engine])
    return found


def _seconds(engine: str, row: Json) -> str:
    return spread(row["values"][engine])


def _speed(engine: str, row: Json) -> str:
    return auto(row["num_tokens"] / _median(row, engine))
