"""`radixlm rm`: remove compiled models, downloads or stores, by name or the least recently used ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import click

from ..tables import size
from .kept import KINDS, Kept, all_kept, beyond


@click.command("rm")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice([*KINDS]),
    multiple=True,
    help="Kind to remove; repeatable.  [default: compiled]",
)
@click.option(
    "--keep-gb",
    type=click.FloatRange(min=0),
    metavar="GB",
    help="Instead of NAME: remove the least recently used until the rest takes at most this much.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
def command(names: tuple[str, ...], kinds: tuple[str, ...], keep_gb: float | None, dry_run: bool) -> None:
    """Remove compiled models, downloads or prefix stores.

    NAME is a name in `radixlm list`, or a model's source, which means everything compiled from it. Nothing that a
    process uses is removed. A removed compiled model is compiled again when it is used.

    \b
    radixlm rm smollm2
    radixlm rm --keep-gb 20
    radixlm rm --kind download hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF
    """
    if bool(names) == (keep_gb is not None):
        raise ValueError("give NAME, or --keep-gb; radixlm list shows the names")
    if "" in names:  # as a path it is the current directory, which may be named like a model
        raise ValueError("NAME is empty; radixlm list shows the names")
    if keep_gb is not None and not math.isfinite(keep_gb):
        raise ValueError(f"--keep-gb is {keep_gb}; it must be a number of GB")
    kept = all_kept(kinds or ("compiled",))
    chosen = _named(kept, names) if keep_gb is None else beyond(kept, int(keep_gb * 1e9))
    for each in chosen:
        if not dry_run:
            each.remove()
        click.echo(f"{'would remove' if dry_run else 'removed'} {each.name}, {each.kind}, {size(each.num_bytes)}")
    if not chosen:
        click.echo("nothing is removed")
    if names and "download" not in kinds:
        for each in all_kept(["download"]):
            if any(each.is_called(name) for name in names):
                click.echo(f"the download stays; remove it with: radixlm rm --kind download {each.name}", err=True)


def _named(kept: Sequence[Kept], names: Sequence[str]) -> list[Kept]:
    """Return every model, download or store with one of the names, each once.

    Raises:
        ValueError: a name is unknown, or means something that a process uses.
    """
    chosen: dict[tuple[str, str], Kept] = {}
    for name in names:
        found = [each for each in kept if each.is_called(name)]
        if not found:
            if others := [each for each in all_kept() if each.is_called(name)]:
                raise ValueError(f"{name} is a {others[0].kind}; add --kind {others[0].kind}")
            raise ValueError(f"there is no model named {name!r}; radixlm list shows the names")
        chosen |= {(each.kind, each.name): each for each in found}
    for each in chosen.values():
        if each.is_open:
            raise ValueError(f"{each.name} is in use by another process; end that first. Nothing was removed")
    return list(chosen.values())
