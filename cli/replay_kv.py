"""`radixlm replay-kv`: check a server's log of its KV pages."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("replay-kv")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def command(file: Path) -> None:
    """Do again what FILE of `serve --log-kv` says, FILE.2, FILE.1 and so on before it, and check every line.

    No page has two owners that do not share it, none is lost, a sequence has the pages that its tokens fill, and what
    is private stays so. The first line that breaks a law is shown, with its number and the law; exit code 2.

    \b
    radixlm serve smollm2.radixlm --log-kv kv.jsonl
    radixlm replay-kv kv.jsonl
    """
    from radixlm.runtime.kv_log.replay import replay

    replayed = replay(file)
    owners = replayed.owners
    files = f"{replayed.num_files} files" if replayed.num_files > 1 else "1 file"
    click.echo(f"{replayed.num_events.total():,} lines in {files} keep the laws")
    click.echo(
        f"at the end: {len(replayed.sequences)} requests, {len(owners.tree):,} pages cached, "
        f"{owners.num_free:,} of {owners.num_pages:,} pages free"
    )
