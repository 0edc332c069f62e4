"""`radixlm replay`: compute recorded requests again, and compare the replies bit by bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .field_flags import CompileOptions, FieldCommand, compile_options, engine_keywords, take
from .tables import print_rows

if TYPE_CHECKING:
    from radixlm.runtime.replay.recording import Computed
    from radixlm.runtime.replay.replay import Replayed

EXIT_DIFFERENT = 1


@click.command("replay", cls=FieldCommand, flags=("num_threads", "kv_cache_bytes", "state_cache_bytes"))
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--artifact", "model", metavar="MODEL", help="The model to use.  [default: the recorded one]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@compile_options
def command(file: Path, model: str | None, as_json: bool, **options: Any) -> None:
    """Compute the requests of FILE, written by `serve --record FILE`, again, and compare their replies bit by bit.

    Replies must have the same token ids, and each token the same bits of its logprob. This holds for any version of
    radixlm, and for any machine or target of the recorded numeric class. If replies differ, the first request and token
    that differ are shown, and the exit code is 1. Cancelled requests, and those with approximate KV loading, are not
    compared.

    \b
    radixlm serve smollm2.radixlm --record recording.jsonl
    radixlm replay recording.jsonl
    radixlm replay recording.jsonl --artifact other.radixlm
    """
    import msgspec
    from radixlm.runtime import Engine
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.errors import RecordingUnusable
    from radixlm.runtime.replay.recording import Computed
    from radixlm.runtime.replay.replay import NUM_AT_ONCE, first_line, replay

    keywords = engine_keywords(options)
    first = first_line(file)
    if first is None:
        raise RecordingUnusable(f"{file} is empty; a recording begins with a description of the model")
    artifact = Artifact.open(take(CompileOptions, options).artifact_of(model or first.model, on_disk=True))
    with Engine(artifact, max_num_seqs=NUM_AT_ONCE, **keywords) as engine:
        replayed = replay(file, engine)
        now = Computed.of(engine.manifest, model=model or first.model, context_length=engine.context_length)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"now": now, "found": replayed})))
    else:
        print_rows(replayed_rows(replayed, now))
    if replayed.differences:
        sys.exit(EXIT_DIFFERENT)


def replayed_rows(replayed: Replayed, now: Computed) -> list[tuple[str, str]]:
    """Return the rows of the table: names and values."""
    counts = [f"{replayed.num_equal:,} equal ({replayed.num_tokens:,} tokens)"]
    counts.append(f"{len(replayed.differences):,} different")
    counts += [f"{count:,} not compared ({why})" for why, count in sorted(replayed.not_compared.items())]
    rows = [("recorded", _described(replayed.computed)), ("now", _described(now)), ("requests", ", ".join(counts))]
    if replayed.differences:
        first = replayed.differences[0]
        place = "" if first.place is None else f", token {first.place}"
        rows.append(("first difference", f"request {first.number} ({first.request}){place}: {first.says}"))
    return rows


def _described(computed: Computed | None) -> str:
    """Return the text that names an engine: its model, weights, KV type, version and target."""
    if computed is None:
        return "nothing"
    weights = f"weights {computed.weights[:16]}…"
    by = f"radixlm {computed.radixlm}, class {computed.numeric_class}, target {computed.target}"
    return f"{computed.name}, {weights}, KV in {computed.kv_dtype}: {by}"
