"""`radixlm list`: list downloads, compiled models and stores on this machine."""

from __future__ import annotations

import time

import click

from ..tables import size
from .kept import Kept, all_kept

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(as_json: bool) -> None:
    """List compiled models, downloads and prefix stores, with their sizes and last use.

    Downloads from the Hugging Face hub are in the cache of its library, which other tools share. Model files in your
    own folders are not listed, but their compiled models are.

    \b
    radixlm list --json
    radixlm rm smollm2
    """
    import msgspec

    found = sorted(all_kept(), key=lambda kept: -kept.last_used)
    if as_json:
        rows = [
            {name: getattr(each, name) for name in ("kind", "name", "num_bytes", "last_used", "is_open")}
            | {"path": str(each.path)}
            for each in found
        ]
        click.echo(msgspec.json.format(msgspec.json.encode(rows)))
        return
    if not found:
        click.echo("nothing yet; try: radixlm run smollm2")
        return
    width = max(len(each.name) for each in found)
    click.secho(f"{'NAME':<{width}}  {'KIND':<8}  {'SIZE':>8}  LAST USE", bold=True)
    for each in found:
        click.echo(
            f"{each.name:<{width}}  {each.kind:<8}  {size(each.num_bytes):>8}  {last_use_text(each, time.time())}"
        )
    click.echo(f"{size(sum(each.num_bytes for each in found))} in all")


def last_use_text(kept: Kept, now: float) -> str:
    """Return when a model, download or store was last used, such as "3 days ago"."""
    if kept.is_open:
        return "open now"
    passed = now - kept.last_used
    for unit, seconds in _UNITS:
        if passed >= seconds:
            count = int(passed // seconds)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"
