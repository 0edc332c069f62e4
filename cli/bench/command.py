"""`radixlm bench`: measure the speed of a model, compared with the limits of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from radixlm.runtime.version import VERSION

from ..field_flags import CompileOptions, FieldCommand, compile_options, engine_keywords, take
from ..tables import print_rows, size

if TYPE_CHECKING:
    from radixlm.runtime.artifact.manifest import Manifest
    from radixlm.runtime.model.machine_limits import MachineLimits

    from .figures import Measured

_LEAST_READ_BYTES = 512 << 20


@click.command(
    "bench",
    cls=FieldCommand,
    flags=("num_threads", "kv_cache_bytes", "state_cache_bytes", "context_length", "prefill_ms"),
)
@click.argument("model")
@click.option(
    "--seconds", type=click.IntRange(0, 86400), default=50, show_default=True, help="Maximum time of the measurement."
)
@click.option("--json", "as_json", is_flag=True, help="Print all rounds as JSON.")
@compile_options
def command(model: str, seconds: int, as_json: bool, **options: Any) -> None:
    """Measure the speed of MODEL on this machine, compared with the machine's limits.

    Measures prefill of 512 and 2,048 tokens, decode after a short and a long prompt, and decode of 8 concurrent
    requests, in up to five rounds. The table has medians, the rates at which this machine reads memory and multiplies
    integers (measured with loops of the same compiler), and the share of these limits that the model reaches. Large
    models get fewer rounds: each figure is measured once, unless it alone takes longer than --seconds.

    Speculative decoding is off, because replies of random tokens say nothing about draft tokens. Run nothing else on
    the machine at the same time.

    \b
    radixlm bench smollm2.radixlm
    radixlm bench model.gguf --threads 8 --json
    """
    import msgspec
    from radixlm.runtime import Engine
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.artifact.cpu import cache_bytes
    from radixlm.runtime.model.machine_limits import LimitsMeter
    from radixlm.runtime.system import available_memory_bytes

    from .engine_timer import EngineTimer
    from .figures import Rounds

    keywords = engine_keywords(options)
    artifact = Artifact.open(take(CompileOptions, options).artifact_of(model, on_disk=True))
    manifest = artifact.manifest
    tell = partial(click.echo, err=True)
    read_bytes = max(_LEAST_READ_BYTES, min(4 * cache_bytes(), available_memory_bytes() // 4))
    with Engine(artifact, **keywords, speculate="off", idle_work=False) as engine:
        meter = LimitsMeter(artifact, num_threads=keywords.get("num_threads"), read_bytes=read_bytes)
        limits = meter.measure()
        rounds = Rounds(
            EngineTimer(engine),
            manifest,
            meter,
            integer_gop_per_s=limits.integer_gop_per_s[limits.num_threads],
            context_length=engine.context_length,
            seconds=seconds,
            tell=tell,
        )
        figures = rounds.measure()
        limits = limits.or_better(meter.measure())
    if as_json:
        found = {"machine": dict(machine_rows(manifest)), "limits": limits, "figures": figures}
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    print_rows([*machine_rows(manifest), *limit_rows(limits)])
    click.echo()
    for line in table(figures):
        click.echo(line)


def machine_rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the rows that describe the model and the machine."""
    from radixlm.runtime.artifact.cpu import cache_bytes, cpu_name, default_num_threads
    from radixlm.runtime.system import num_numa_nodes, total_memory_bytes

    kinds = ", ".join(f"{name} {size(kind.bytes)}" for name, kind in manifest.quantization.kinds.items())
    yield "model", f"{manifest.name}: {kinds}"
    yield "KV cache", manifest.kv.dtype
    yield "target", f"{manifest.target.name}, radixlm {VERSION}"
    yield "CPU", f"{cpu_name()}, {default_num_threads()} of {os.cpu_count()} cores can be used"
    nodes = f" on {num_nodes} NUMA nodes" if (num_nodes := num_numa_nodes()) > 1 else ""
    yield "memory", f"{size(total_memory_bytes())}{nodes}, {size(cache_bytes())} of caches"


def limit_rows(limits: MachineLimits) -> Iterator[tuple[str, str]]:
    """Yield the rows of the machine's limits."""
    reads = (f"{rate:.1f} with {count}" for count, rate in limits.read_gb_per_s.items())
    yield "threads", str(limits.num_threads)
    yield "memory read, GB/s", f"{', '.join(reads)} threads; the weights {limits.weights_gb_per_s:.1f}"
    rates = (f"{rate:,.0f} with {count}" for count, rate in limits.integer_gop_per_s.items())
    yield "integers, GOP/s", f"{', '.join(rates)} threads"
    yield "starting threads", f"{limits.launch_us:.1f} µs to start all threads and wait for their end"


_COLUMNS = ("", "tokens/s", "min-max", "GB/s", "of memory", "GOP/s", "of integers", "rounds")


def table(figures: Sequence[Measured]) -> Iterator[str]:
    """Yield the lines of the table: its header, then one for each figure."""
    rows = [_COLUMNS, *map(_row, figures)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([f"{name:<{widths[0]}}", *aligned])


def _row(measured: Measured) -> tuple[str, ...]:
    """Return the cells of a figure: name, speed and its range, shares of the machine's limits, and rounds."""
    median, values = measured.median, measured.tokens_per_s
    return (
        measured.name,
        f"{median['tokens_per_s']:.1f}",
        f"{min(values):.1f}-{max(values):.1f}",
        _cell(median, "gb_per_s", ".1f"),
        _cell(median, "memory_share", ".0%"),
        _cell(median, "gop_per_s", ",.0f"),
        _cell(median, "integer_share", ".0%"),
        str(len(values)),
    )


def _cell(median: Mapping[str, float], name: str, form: str) -> str:
    return f"{median[name]:{form}}" if name in median else ""
