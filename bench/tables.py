"""Markdown tables of results. Knows what the JSON files hold, not how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from . import figures
from .bars import OURS, PEERS, ratios
from .timing import Spread

Json = dict[str, Any]
_OF_A_PROCESS = (figures.START, figures.MEMORY, figures.RESIDENT)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers.

    >>> print(table(["what", "ms"], [["a", "1"]]))
    | what | ms |
    |---|--:|
    | a | 1 |
    """
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in lines)
        .replace("| --- |", "|---|")
        .replace(" --: |", "--:|")
    )


def origin(results: Json) -> str:
    """Machine, commit, command and day, in a line."""
    made = results["origin"]
    tvm = f"apache-tvm {made['apache_tvm']}"
    return f"`{made['command']}`, commit {made['commit']}, {made['date']}; {made['machine']}; {tvm}."


def peers(results: Json) -> str:
    """What each engine reached, and the ratios of the rounds."""
    values = results["values"]
    rows = []
    for figure in (*figures.MEASURES, *_OF_A_PROCESS):
        cells = [_spread(Spread.of(values[name][figure.name])) for name in (OURS, *PEERS)]
        for peer in PEERS:
            ratio = ratios(values, figure, (peer,))
            cells.append(f"**{ratio.median:.2f}** ({ratio.minimum:.2f}-{ratio.maximum:.2f})")
        rows.append([f"{figure.title}, {figure.unit}", *cells])
    return table(["median (min-max)", OURS, *PEERS, *(f"times {peer}" for peer in PEERS)], rows)


def verdicts(results: Json) -> str:
    """The bars, and which are met."""
    rows = [
        [v["bar"], _number(v["value"]), _number(v["wanted"]), "met" if v["is_met"] else "**missed**"]
        for v in results["verdicts"]
    ]
    return table(["bar", "median", "wanted", ""], rows)


def engine(results: Json) -> str:
    """The engine's figures with their share of the limit."""
    rows = []
    for figure in (*figures.OF_AN_ENGINE, *_OF_A_PROCESS):
        share = results["shares"].get(figure.name)
        rows.append(
            [
                f"{figure.title}, {figure.unit}",
                _spread(Spread.of(results["values"][figure.name])),
                f"{Spread.of(share).median:.0%}" if share else "",
            ]
        )
    return table(["median (min-max)", "radixlm", "share of the limit"], rows)


_LIMITS = {
    "read_gb_per_s": "memory read, GB/s",
    "integer_gop_per_s": "8-bit integer products with 4-bit weights, GOP/s",
    "integer8_gop_per_s": "8-bit integer products with 8-bit weights, GOP/s",
    "float_gflop_per_s": "float32 multiply-adds, GFLOP/s",
}


def request_cost(results: Json) -> str:
    """Milliseconds of each way to ask, and how much longer that is than the engine alone takes."""
    medians = results["median_ms"]
    rows = []
    for name, milliseconds in medians.items():
        base = medians["engine, 8 at once" if "at once" in name else "engine"]
        beyond = "" if name.startswith(("engine", "models")) else f"{milliseconds - base:.2f}"
        rows.append([name, f"{milliseconds:.2f}", beyond])
    return table(["", "ms", "beyond the engine, ms"], rows)


def limits(results: Json) -> str:
    """What the machine can do."""
    found = results["limits"]
    rows = [
        [title, _number(found[name]), _number(found[f"{name}_thread"])]
        for name, title in _LIMITS.items()
        if name in found  # results of earlier runs lack some
    ]
    return table(["limit", f"{found['num_threads']} threads", "1 thread"], rows)


def kernels(results: Json) -> str:
    """Kernels by size: speed in what limits them, and the share of the limit."""
    by_kernel: dict[str, list[str]] = {}
    for result in results["kernels"]:
        operations = result["gop_per_s"] > 20 * result["gb_per_s"]  # about where memory stops being the limit
        speed = f"{_number(result['gop_per_s'])} GOP/s" if operations else f"{_number(result['gb_per_s'])} GB/s"
        cell = f"{result['size']}: {_number(result['seconds'] * 1e6)} µs, {speed}, **{result['share']:.0%}**"
        by_kernel.setdefault(result["kernel"], []).append(cell)
    rows = [[f"`{kernel}`", "<br>".join(cells)] for kernel, cells in by_kernel.items()]
    return table(["kernel", "size: time, speed, share of the limit"], rows)


def curve(results: Json, name: str, header: str) -> str:
    """Points of a growth curve."""
    rows = [
        [
            f"{point['size']:,}",
            _number(point["seconds"] * 1e3),
            _number(point["seconds"] * 1e6 / point["size"]),
            f"{point['limit_s'] / point['seconds']:.0%}",
        ]
        for point in results[name]
    ]
    return table([header, "ms", "µs each", "share of the limit"], rows)


def model_sizes(results: Json) -> str:
    """Compile and decode by shape."""
    rows = [
        [
            shape["shape"],
            f"{shape['num_parameters'] / 1e6:,.0f} M",
            _number(shape["compile_s"]),
            f"{shape['compile_memory'] / 2**20:,.0f}",
            f"{shape['artifact_bytes'] / 1e6:,.0f}",
            _number(shape["decode_tokens_per_s"]),
            f"{shape['decode_bandwidth_share']:.0%}",
            f"{shape['serve_memory'] / 2**20:,.0f}",
        ]
        for shape in results["shapes"].values()
    ]
    header = ["shape", "parameters", "compile, s", "its memory, MiB", "artifact, MB", "decode, tok/s"]
    return table([*header, "of read bandwidth", "serving memory, MiB"], rows)


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.minimum)}-{_number(spread.maximum)})"


def _number(value: float) -> str:
    """Three or four digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
