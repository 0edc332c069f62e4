"""`radixlm replay-kv`: replay a KV event log, and verify its invariants."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("replay-kv")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def command(file: Path) -> None:
    """Replay a KV event log written by `serve --log-kv FILE`, including FILE.2, FILE.1 and so on, and verify it.

    The invariants are: pages have several owners only if these share them, no page is lost, a sequence has the pages
    that its tokens fill, and namespaces stay separate. The first line that breaks an invariant is shown, with its
    number, and the exit code is 2.

    \b
    radixlm serve smollm2.radixlm --log-kv kv.jsonl
    radixlm replay-kv kv.jsonl
    """
    from radixlm.runtime.kv_log.replay import replay

    replayed = replay(file)
    owners = replayed.owners
    files = f"{replayed.num_files} files" if replayed.num_files > 1 else "1 file"
    click.echo(f"{replayed.num_events.total():,} lines in {files} are valid")
    click.echo(
        f"at the end: {len(replayed.sequences)} requests, {len(owners.tree):,} pages cached, "
        f"{owners.num_free:,} of {owners.num_pages:,} pages free"
    )
