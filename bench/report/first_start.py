"""The section on compiling and first starts. Knows the contents of the JSON file, not how it was measured."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from .tables import Json, origin, table

_COMPILE = {
    "copy": "`cp FILE COPY && sync COPY`",
    "compile_cold": "`radixlm compile`, cold kernel cache",
    "compile_cold_cpu": "the same, CPU s",
    "compile_warm": "`radixlm compile`, warm kernel cache",
    "compile_warm_cpu": "the same, CPU s",
    "compile_warm_mib": "the same, peak private memory, MiB",
    "build_context": "kernels for another context length",
    "build_kv": "kernels for another KV type",
}
_SERVE = {
    "llama_cpp": "llama.cpp's server",
    "serve_cold": "`radixlm serve`, first start, cold kernel cache",
    "serve_warm": "`radixlm serve`, first start, warm kernel cache",
    "serve_second": "`radixlm serve`, second start",
}


def first_start(results: Json) -> Iterator[str]:
    """Yield, for each model, the seconds of compiling, and those to a first token, also of llama.cpp."""
    yield "## Compiling, and the first start of a server"
    for name, run in results["runs"].items():
        values = {figure: median(found) for figure, found in run["values"].items()}
        rounds = len(next(iter(run["values"].values())))
        yield f"### {name}"
        yield (
            f"{run['bytes'] / 1e6:,.0f} MB. Seconds, medians of {rounds} rounds. Each begins with the file out of "
            "the page cache, if it is on a disk."
        )
        yield table({"compiling": "{name}", "": "{value:auto}"}, _rows(_COMPILE, values))
        rows = _rows(_SERVE, values)
        peer = values.get("llama_cpp")
        for row in rows:
            row["ratio"] = "" if peer is None else f"{row['value'] / peer:.2f}"
        columns = {"from the start to a first token": "{name}", "": "{value:auto}", "times llama.cpp's": "{ratio}"}
        yield table(dict(columns), rows)
        yield origin(run)


def _rows(names: dict[str, str], values: dict[str, float]) -> list[Json]:
    return [{"name": name, "value": values[figure]} for figure, name in names.items() if figure in values]
