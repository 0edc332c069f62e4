"""Results become a page; numbers are read back as they were written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.engine import figures
from bench.engine.__main__ import FIGURES as ENGINE_FIGURES
from bench.machine import Origin
from bench.peers.contestants import OURS
from bench.peers.scenarios import FIGURES, SIZE_FIGURES
from bench.report import engine
from bench.report.adapters import adapters
from bench.report.peers import peers as section
from bench.report.peers import sizes, vectors
from bench.results import add_run, read_results, write_results

Lines = Callable[[Iterable[object]], list[str]]

LIMITS = {
    "num_threads": 2,
    **{
        f"{name}{thread}": 12.0
        for name in ("read_gb_per_s", "integer_gop_per_s", "float_gflop_per_s")
        for thread in ("", "_thread")
    },
}


def peers() -> dict[str, Any]:
    values = {
        name: {figure.name: [float(factor), 2.0 * factor] for figure in FIGURES}
        for factor, name in enumerate((OURS, "one", "other"), 1)
    }
    return {
        "origin": asdict(Origin.of_this_process()),
        "model": "a.gguf",
        "threads": 2,
        "decode_bytes_per_token": 96_000_000,
        "decode_bandwidth_share": 0.8,
        "missing": {"third": "there is no server"},
        "values": values,
    }


def test_numbers_come_back_with_four_digits_and_an_origin(tmp_path: Path) -> None:
    write_results("x", {"speed": 123456.0, "deep": {"list": [0.00012345678]}, "name": "n", "count": 123456}, tmp_path)
    found = read_results("x", tmp_path)
    assert found is not None
    assert set(found.pop("origin")) >= {"machine", "commit", "command", "date"}
    assert found == {"speed": 123500.0, "deep": {"list": [0.0001235]}, "name": "n", "count": 123456}
    assert read_results("y", tmp_path) is None


def test_a_request_is_held_against_the_engine_that_has_as_many_callers(lines: Lines) -> None:
    medians = {"engine": 3.0, "models": 0.5, "whole": 4.5, "engine, 8 at once": 10.0, "whole, 8 at once": 13.0}
    assert lines(engine.request_cost({"requests": 50, "median_ms": medians})) == [
        "| engine | 3.00 |  |",
        "| models | 0.50 |  |",
        "| whole | 4.50 | 1.50 |",
        "| engine, 8 at once | 10.00 |  |",
        "| whole, 8 at once | 13.00 | 3.00 |",
    ]


def test_the_cost_of_adapters_is_held_against_their_bytes(lines: Lines) -> None:
    base = {"step": "base", "adapter_bytes": 0, "median_s": 0.02, "least_s": 0.018, "ratio": [1.0, 1.0, 1.0]}
    eight = {"step": "8", "adapter_bytes": 50_000_000, "median_s": 0.03, "least_s": 0.02, "ratio": [1.4, 1.5, 1.6]}
    run = {
        "rank": 16,
        "num_rows": 8,
        "num_past": 200,
        "step_bytes": 100_000_000,
        "steps": [base, eight],
        "origin": asdict(Origin.of_this_process()),
    }
    assert lines(adapters({"runs": {"small, f16": run}})) == [
        "| base | 20.00 | 18.00 | **1.00** | 1.00-1.00 | 1.00 | 100.0 | 0.0 |  |",
        "| 8 | 30.00 | 20.00 | **1.50** | 1.40-1.60 | 1.50 | 100.0 | 50.0 | 25.0 |",
    ]


def test_the_table_of_peers_shows_medians_ranges_and_the_best_by_name(lines: Lines) -> None:
    rows = lines(section({"runs": {"a.gguf": peers()}}))
    assert "| decode, tok/s | 1.50 (1.00-2.00) | 3.00 (2.00-4.00) | 4.50 (3.00-6.00) | other, 4.50 | **0.33** |" in rows
    assert (
        "| process start to ready, s | 1.50 (1.00-2.00) | 3.00 (2.00-4.00) | 4.50 (3.00-6.00) | one, 3.00 | **2.00** |"
    ) in rows


def test_a_peer_that_was_not_there_is_named(lines: Lines) -> None:
    run = peers()
    del run["values"]["one"]["memory"]
    shown = list(section({"runs": {"a.gguf": run}}))
    assert "Not measured: third (there is no server)." in shown
    assert "| peak memory, one request of 2,048, MiB | 1.50 (1.00-2.00) | - |" in "".join(shown)


def test_a_cut_models_figures_are_scaled_where_they_follow_from_layers_or_bytes(lines: Lines) -> None:
    def run(layers: list[int]) -> dict[str, Any]:
        values = {name: {figure.name: [12.0 * i] for figure in SIZE_FIGURES} for i, name in enumerate((OURS, "one"), 1)}
        return {**peers(), "values": values, "target": "x86-64", "layers": layers, "decode_scale": 3.0}

    rows = lines(sizes({"runs": {"a": run([6, 24])}}))
    assert "| prompt of 512, tok/s | 12.0 | 24.0 | one, 24.0 | **0.50** | ~3.00 | ~6.00 |" in rows
    assert "| decode after 512, a core taken, tok/s | 12.0 | 24.0 | one, 24.0 | **0.50** | ~4.00 | ~8.00 |" in rows
    assert "| process start to ready, s | 12.0 | 24.0 | one, 24.0 | **2.00** |  |  |" in rows
    assert rows[0] == "| rounds | 1 | 1 |  |  |  |  |"
    assert "~" not in "".join(lines(sizes({"runs": {"a": run([24, 24])}})))


def test_embeddings_are_told_in_tokens_a_second_and_times_the_peer(lines: Lines) -> None:
    origin = asdict(Origin.of_this_process())
    run = {"num_tokens": 6400, "values": {OURS: [4.0, 8.0, 5.0], "llama.cpp": [10.0]}, "origin": origin}
    assert "| embeddings | 5.00 (4.00-8.00) | 1,280 | 10.0 (10.0-10.0) | 640 | **2.00** |" in lines(
        vectors({"runs": {"embeddings": run}})
    )


def test_a_run_is_added_beside_the_others(tmp_path: Path) -> None:
    for name, value in (("b", 1), ("a", 2), ("b", 3)):
        add_run("x", name, {"value": value}, tmp_path)
    found = read_results("x", tmp_path)
    assert found is not None
    assert [(name, run["value"]) for name, run in found["runs"].items()] == [("a", 2), ("b", 3)]


def test_a_row_of_results_is_a_line(tmp_path: Path) -> None:
    rows = [{"name": "a", "values": [1, 2]}, {"name": "b", "values": [3]}]
    text = write_results("x", {"rows": rows}, tmp_path).read_text()
    assert ' "rows": [\n  {"name": "a", "values": [1, 2]},\n  {"name": "b", "values": [3]}\n ]\n}\n' in text


def test_sections_read_what_is_published() -> None:
    from bench.report.page import SECTIONS, render
    from bench.results import RESULTS

    published = {path.stem for path in RESULTS.glob("*.json")}
    assert published <= set(SECTIONS) and render(RESULTS).count("\n## ") >= len(published)


def test_a_page_has_a_section_for_each_file(tmp_path: Path) -> None:
    from bench.report.page import render

    assert "##" not in render(tmp_path)
    curve = [{"size": size, "seconds": size / 1e3, "limit_s": size / 2e3} for size in (1, 2)]
    other = {**peers(), "model": "b.gguf"}
    write_results("peers", {"runs": {"a.gguf": peers(), "b.gguf": other}}, tmp_path)
    names = [figure.name for figure in (*ENGINE_FIGURES, figures.RESIDENT)]
    write_results(
        "engine", {"limits": LIMITS, "values": {name: [1.0] for name in names}, "shares": {"decode": [0.5]}}, tmp_path
    )
    kernel = {"kernel": "linear", "size": "1 rows", "seconds": 1e-5, "gb_per_s": 40.0, "gop_per_s": 100.0, "share": 0.8}
    write_results("kernels", {"target": "x86-64", "limits": LIMITS, "kernels": [kernel]}, tmp_path)
    curves = dict.fromkeys(("decode_s_by_context", "prefill_s_by_prompt", "step_s_by_batch"), curve)
    write_results("growth", curves, tmp_path)
    page = render(tmp_path)
    assert page.count("\n## ") == 4
    assert "| decode, batch 1, tok/s | 1.00 (1.00-1.00) | 50% |" in page
    assert "1 rows: 10.0 µs, 40.0 GB/s, **80%**" in page
    assert page.count("Not measured: third (there is no server).") == 2
    assert page == render(tmp_path)


def test_a_step_through_experts_has_its_share_of_memory_and_what_routing_takes(lines: Lines) -> None:
    kernels = [{"kernel": name, "share": share} for name, share in (("RouterSpec(32)", 0.01), ("linear fp4", 0.9))]
    step = {"streams": 1, "seconds": 0.02, "read_gb_per_s": 40.0, "share": 0.75, "kernels": kernels}
    results = {"active_bytes": 6e8, "all_bytes": 2e9, "steps": [step]}
    assert lines(engine.experts(results)) == ["| 1 | 20.0 | 40.0 | 75% | 1.0% |"]
